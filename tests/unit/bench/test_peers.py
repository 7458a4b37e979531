from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pdserve.bench.compare import CompareConfig, choose_cores, choose_scenarios
from pdserve.bench.contestants import ContestantSettings, plan_contestants
from pdserve.bench.scenarios import SCENARIOS
from pdserve.bench.serve import ServeConfig
from pdserve.bench.servers.pdserve_server import Split, plan_pdserve
from pdserve.bench.servers.peers import PeerSettings, plan_llama_cpp, plan_transformers, plan_vllm
from pdserve.bench.sweep import SweepConfig, SweepSettings, plan_deployments
from pdserve.commands.up import UpConfig
from pdserve.engine.config import EngineConfig, ModelSettings, SchedulerSettings
from pdserve.errors import ConfigError
from pdserve.settings import load_settings
from pdserve.supervisor.placement import available_cores

WORKLOADS = Path(__file__).parents[3] / "benchmarks" / "workloads"
SETTINGS = PeerSettings(
    directory=Path("/models/m"),
    model_name="m",
    dtype="bfloat16",
    max_model_len=2048,
    max_num_seqs=32,
    cores=(2, 3),
    prefix_caching=False,
)


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def value_after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_pdserve_is_started_with_the_very_settings() -> None:
    engine = EngineConfig(model=ModelSettings(dtype="float32"), scheduler=SchedulerSettings(max_num_seqs=7))
    plan = plan_pdserve(Split(2, 1), engine, threshold_tokens=64)
    assert plan.name == "pdserve 2:1, from 64 tokens"
    config = load_settings(UpConfig, prog="up", description="", argv=plan.command[5:])
    assert (config.up.prefill, config.up.decode, config.up.port) == (2, 1, 0)
    assert config.router.handoff.disaggregation_threshold_tokens == 64
    assert (config.engine.model, config.engine.scheduler) == (engine.model, engine.scheduler)
    assert config.engine.connector.connector == "auto"


def test_a_sweep_tries_each_combination_that_differs() -> None:
    def names(**settings: object) -> list[str]:
        config = dataclasses.replace(SweepConfig(), sweep=SweepSettings(**settings))  # type: ignore[arg-type]
        return [plan.name for plan in plan_deployments(config)]

    assert names() == ["pdserve 1:1"]
    assert names(splits=["0:2", "1:1"], thresholds=["0", "256"]) == [
        "pdserve 0:2",
        "pdserve 1:1",
        "pdserve 1:1, from 256 tokens",
    ]
    assert names(url="http://a:1/v1") == ["http://a:1"]


@pytest.mark.parametrize("text", ["", "1", "1:0", "a:b", "1:1:1", "-1:1"])
def test_what_is_no_split(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--splits: .* is no split"):
        Split.parse(text)


def test_vllm_gets_the_same_model_cores_and_limits(tmp_path: Path) -> None:
    vllm = program(tmp_path / "bin" / "vllm")
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    plan = plan_vllm(str(tmp_path), SETTINGS)
    command = list(plan.command)
    assert command[:3] == [str(vllm), "serve", "/models/m"]
    assert value_after(command, "--served-model-name") == "m"
    assert value_after(command, "--dtype") == "bfloat16"
    assert value_after(command, "--max-num-seqs") == "32"
    assert "--no-enable-prefix-caching" in command
    assert plan.url == f"http://127.0.0.1:{value_after(command, '--port')}"
    assert plan.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert plan.environment["HF_HUB_OFFLINE"] == "1"
    assert plan.environment["LD_PRELOAD"].split(":")[-1] == str(openmp)


def test_llama_cpp_gets_a_thread_for_each_core(tmp_path: Path) -> None:
    server = program(tmp_path / "llama-server")
    plan = plan_llama_cpp(str(server), Path("/m.gguf"), dataclasses.replace(SETTINGS, prefix_caching=True))
    command = list(plan.command)
    assert command[0] == str(server)
    assert [value_after(command, option) for option in ("-m", "-t", "-tb", "-np", "-c")] == [
        *("/m.gguf", "2", "2", "32", "16384")
    ]
    assert "--cache-prompt" in command


def test_transformers_runs_our_server_in_its_own_environment(tmp_path: Path) -> None:
    python = program(tmp_path / "bin" / "python")
    command = list(plan_transformers(str(tmp_path), SETTINGS).command)
    assert command[0] == str(python)
    assert Path(command[1]).name == "transformers_server.py"
    assert [value_after(command, option) for option in ("--model", "--threads", "--batch-size")] == [
        *("/models/m", "2", "32")
    ]


def test_the_server_for_transformers_needs_nothing_of_pdserve() -> None:
    from pdserve.bench.servers import transformers_server

    source = Path(transformers_server.__file__).read_text(encoding="utf-8")
    assert "import pdserve" not in source
    assert "from pdserve" not in source


def test_who_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin" / "vllm")
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = ContestantSettings(
        splits=["0:1", "1:1"], vllm_venv=str(tmp_path), peers={"mine": "http://127.0.0.1:9/v1"}
    )
    plans = plan_contestants(settings, EngineConfig(), (0,))
    assert [plan.name for plan in plans] == ["pdserve 0:1", "pdserve 1:1", "vLLM", "mine"]
    assert (plans[-1].url, plans[-1].command) == ("http://127.0.0.1:9", ())
    assert Path(list(plans[2].command)[2], "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="two servers have the same name"):
        plan_contestants(ContestantSettings(splits=["0:1", "0:1"]), EngineConfig(), (0,))


def test_cores_are_those_there_are() -> None:
    available = available_cores()
    assert choose_cores([]) == tuple(available)
    assert choose_cores([str(available[0])]) == (available[0],)
    for name in ("-1", "x", "100000"):
        with pytest.raises(ConfigError, match=f"--cores: {name} is not one of the cores here"):
            choose_cores([name])


@pytest.mark.parametrize("name", sorted(path.stem for path in WORKLOADS.glob("*.toml")))
def test_workload_files_load_and_are_what_compare_sends(name: str) -> None:
    argv = ["--config", str(WORKLOADS / f"{name}.toml")]
    config = load_settings(ServeConfig, prog="serve", description="", argv=argv)
    config.load.check()
    if name in SCENARIOS:
        assert (config.workload, config.load) == (SCENARIOS[name].workload, SCENARIOS[name].load)


def test_every_scenario_has_a_workload_file() -> None:
    assert set(SCENARIOS) <= {path.stem for path in WORKLOADS.glob("*.toml")}


def test_the_custom_scenario_is_the_users_own_workload() -> None:
    argv = ["--scenarios", "burst", "custom", "--num-requests", "5", "--rate", "2"]
    config = load_settings(CompareConfig, prog="compare", description="", argv=argv)
    burst, custom = choose_scenarios(config)
    assert burst is SCENARIOS["burst"]
    assert (custom.workload.num_requests, custom.load.rate) == (5, 2.0)

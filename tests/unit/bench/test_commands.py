from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.bench.compare import CompareConfig
from pdserve.bench.floors import FloorsConfig
from pdserve.bench.handoff import HandoffConfig
from pdserve.bench.latency import LatencyConfig
from pdserve.bench.perplexity import PerplexityConfig
from pdserve.bench.serve import ServeConfig
from pdserve.bench.sweep import SweepConfig
from pdserve.bench.throughput import ThroughputConfig
from pdserve.commands.bench import BENCHMARKS
from pdserve.connectors.testing.free_port import find_free_port
from pdserve.settings import option_flags

EVERY = "--config --help --version --output --progress"
ENGINE = """
    --model --served-model-name --dtype --max-model-len --quantization --device --kernel-backend
    --tensor-parallel-size --pipeline-parallel-size --worker-timeout-s
    --block-size --kv-dtype --num-blocks --memory-fraction
    --policy --max-num-seqs --max-num-batched-tokens --max-queue-len --kv-load-failure-policy
"""
OFFLINE = f"{ENGINE} --num-threads --enable-prefix-caching --floor-seconds --seed"
REQUESTS = "--endpoint --ignore-eos --extra-body --request-timeout-s"
PROMPTS = """
    --prompts-file --sharegpt --prompt-tokens --output-tokens --shared-prefix-tokens --num-prefixes
    --max-prompt-tokens --seed
"""
CONNECTOR = "--connector --connector-option"
OBJECTIVE = "--slo-ttft-ms --slo-itl-ms --slo-tpot-ms --slo-e2e-ms"
LOAD = "--max-concurrency --burst-size --num-warmups"
TIMES = "--rate --arrivals"


@pytest.mark.parametrize(
    ("root", "flags"),
    [
        (LatencyConfig, (OFFLINE, "--batch --prompt-tokens --output-tokens --repeats")),
        (ThroughputConfig, (OFFLINE, "--num-requests --prompt-tokens --output-tokens")),
        (FloorsConfig, ("--model --dtype --num-threads --seconds --context",)),
        (
            PerplexityConfig,
            ("--text --window-tokens --max-windows --model --dtype --quantization --kernel-backend --num-threads",),
        ),
        (
            HandoffConfig,
            (
                "--connectors --prompt-tokens --ways --chunk-tokens --prefill-tokens-per-s --full-stores --repeats",
                "--model --dtype --block-size --seed",
            ),
        ),
        (
            ServeConfig,
            ("--url --model --plot --tokenizer --num-requests", REQUESTS, PROMPTS, LOAD, TIMES, OBJECTIVE),
        ),
        (
            SweepConfig,
            (
                "--url --splits --thresholds --rates --start-rate --refinements --point-s --attainment --plot",
                ("--tokenizer --num-threads --enable-prefix-caching"),
                *(REQUESTS, PROMPTS, LOAD, OBJECTIVE, ENGINE, CONNECTOR),
            ),
        ),
        (
            CompareConfig,
            (
                "--scenarios --rounds --cores --floor-seconds --splits --vllm-venv --llama-server --llama-gguf",
                "--transformers-venv --peer --prefix-caching --num-requests",
                *(PROMPTS, LOAD, TIMES, ENGINE, CONNECTOR),
            ),
        ),
    ],
)
def test_option_names_are_frozen(root: type, flags: tuple[str, ...]) -> None:
    engine_flags = set(option_flags(root))
    assert engine_flags >= set(" ".join((EVERY, *flags)).split())
    unknown = engine_flags - set(" ".join((EVERY, *flags)).split())
    assert unknown == set()


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in BENCHMARKS)
    assert cli.main(["bench"]) == 2


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", name, "--help"])
    assert end.value.code == 0
    assert f"pdserve bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["srve"], "unknown benchmark srve; the nearest known one is serve (pdserve bench --help)"),
        (["serve", "--rate", "0"], "--rate: 0.0 is no rate; give requests a second above 0, or none for a burst"),
        (["serve", "--url", "127.0.0.1:80"], "--url: '127.0.0.1:80' is no address of a server; write http://HOST:PORT"),
        (["serve", "--slo-ttft-ms", "0"], "--slo-ttft-ms: 0.0 must be above 0"),
        (["serve", "--plot", "a.pdf"], "--plot a.pdf: only .png files are drawn"),
        (["serve", "--output", "/none/there.json"], "--output /none/there.json: the directory /none is not there"),
        (["serve", "--output", "/"], "--output / is a directory; give a file"),
        (["serve", "--num-requests", "0"], "--num-requests: 0 is below 1, the least that is allowed"),
        (["sweep", "--rates", "1", "zero"], "--rates: 'zero' is not a number"),
        (["sweep", "--rates", "0"], "--rates: 0 is no rate; give requests a second above 0"),
        (["sweep", "--start-rate", "0"], "--start-rate: 0.0 is no rate; give requests a second above 0"),
        (
            ["sweep", "--splits", "1:0"],
            "--splits: '1:0' is no split; write PREFILL:DECODE with at least 1 to decode, as in 1:1",
        ),
        (["sweep", "--thresholds", "many"], "--thresholds: 'many' is no number of tokens"),
        (
            ["sweep", "--url", "http://a:1", "--splits", "2:1"],
            "--splits and --thresholds are for services that the sweep starts; --url names one that runs",
        ),
        (
            ["sweep", "--url", "http://a:1", "--num-blocks", "5"],
            "the engine's settings are for services that the sweep starts; --url names one that runs",
        ),
        (
            ["sweep", "--rates", "1", "--refinements", "5"],
            "--start-rate and --refinements are for the search; --rates names the rates to try",
        ),
        (["handoff", "--prompt-tokens", "0"], "--prompt-tokens: '0' is no number of tokens"),
        (["handoff", "--ways", "later"], "--ways: 'later' is none of as-served, at-once"),
        (
            ["handoff", "--connectors", "null"],
            "--connectors: 'null' is none of memory, nixl, shared_storage, redis, lmcache, multi",
        ),
        (["compare", "--scenarios", "none"], "--scenarios: 'none' is none of decode, prefill, burst, poisson, custom"),
        (["compare", "--cores", "9999"], None),
        (
            ["compare", "--vllm-venv", "/none"],
            "--vllm-venv: vLLM is not installed in /none; docs/benchmarks.md says how to install it",
        ),
        (
            ["compare", "--transformers-venv", "/none"],
            "--transformers-venv: Python is not installed in /none; docs/benchmarks.md says how to install it",
        ),
        (
            ["compare", "--llama-server", "/none/llama-server"],
            "--llama-server: '/none/llama-server' is no program here; docs/benchmarks.md says how to get it",
        ),
        (["compare", "--peer", "x=nowhere"], "--peer: 'nowhere' is no address of a server; write http://HOST:PORT"),
        (["floors", "--model", "no-such-model"], None),
        (["perplexity"], "--text is missing: name a plain text file"),
        (
            ["perplexity", "--text", "/none"],
            "--text /none cannot be read: [Errno 2] No such file or directory: '/none'",
        ),
        (["latency", "--model", "no-such-model"], None),
        (
            ["throughput", "--prompt-tokens", "none"],
            "--prompt-tokens: 'none' is no mix of lengths; write 200, 100-300 or 128:0.7,1024:0.3",
        ),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    argv: list[str], line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    if line is not None:
        assert captured.err == f"error: {line}\n"


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    for command in ("serve", "sweep"):
        assert cli.main(["bench", command, "--url", url]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {url} cannot be reached: ")
        assert error.endswith("; is the server up?\n")


def test_comparing_with_nobody_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    assert cli.main(["bench", "compare"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: there is only one server to compare; name a peer, or several --splits\n"
    for name in ("vLLM", "llama.cpp", "transformers"):
        assert f"note: {name} is not compared" in captured.out


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    assert cli.main(["bench", "serve", "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == (
        "error: --plot needs matplotlib, which is not installed: pip install 'pdserve[bench]'\n"
    )


def test_a_run_that_is_told_to_end_takes_away_what_it_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_cleaned_up = []

    def run(argv: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            has_cleaned_up.append(True)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("pdserve.bench.floors.run", run)
    assert cli.main(["bench", "floors"]) == 130
    assert has_cleaned_up
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before

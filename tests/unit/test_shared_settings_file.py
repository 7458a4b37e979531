"""One TOML file for all commands of a service."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.latency import LatencyConfig
from pdserve.commands.doctor import DoctorConfig
from pdserve.commands.up import UpConfig
from pdserve.decode.main import DecodeConfig
from pdserve.engine.config import ModelSettings
from pdserve.errors import ConfigError
from pdserve.prefill.main import PrefillConfig
from pdserve.router.config import RouterSettings, ServedModelSettings
from pdserve.settings import load_settings
from pdserve.settings.fields import list_sections
from pdserve.settings.toml_file import INSTANCE_MODEL_KEYS, PROCESS_OF_COMMAND, SERVICE_SECTIONS

ROOTS: dict[str, Any] = {
    "run-prefill": PrefillConfig,
    "run-decode": DecodeConfig,
    "run-router": RouterSettings,
    "pdserve doctor": DoctorConfig,
    "pdserve up": UpConfig,
}
FILE = """
[model]
model = "./my-model"
num_threads = 3
[connector]
connector = "shared_storage"
connector_options = {path = "/mnt/kv", compress = false}
[pools]
prefill_policy = "round_robin"
[up]
decode = 2
[doctor]
timeout_s = 2
[run-prefill.instance]
port = 8101
[run-decode.connector.connector_options]
path = "/mnt/other"
[run-router.pools]
decode = ["10.0.0.2:8200"]
prefill_policy = "least_loaded"
"""


def load(command: str, path: Path, text: str, *argv: str) -> Any:
    path.write_text(text)
    return load_settings(ROOTS[command], prog=command, description="", argv=["--config", str(path), *argv])


def test_each_command_takes_what_is_its_own(tmp_path: Path) -> None:
    configs = {command: load(command, tmp_path / "service.toml", FILE) for command in ROOTS}
    for command in ("run-prefill", "run-decode", "pdserve up"):
        model = configs[command].engine.model
        assert (model.model, model.num_threads) == ("./my-model", 3)
    options = {
        command: configs[command].engine.connector.connector_options for command in ("run-prefill", "run-decode")
    }
    assert options == {
        "run-prefill": {"path": "/mnt/kv", "compress": False},
        "run-decode": {"path": "/mnt/other", "compress": False},
    }
    assert [configs[command].instance.port for command in ("run-prefill", "run-decode")] == [8101, 8200]
    for router in (configs["run-router"], configs["pdserve doctor"].router):
        assert router.model.model == "./my-model"
        assert (router.pools.decode, router.pools.prefill_policy) == (["10.0.0.2:8200"], "least_loaded")
    assert configs["pdserve doctor"].doctor.timeout_s == 2.0
    assert (configs["pdserve up"].up.decode, configs["pdserve up"].router.pools.prefill_policy) == (2, "round_robin")


def test_the_command_line_goes_over_a_process_own_table(tmp_path: Path) -> None:
    assert load("run-prefill", tmp_path / "service.toml", FILE, "--port", "7").instance.port == 7


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("run-prefill", "[pool]\n", "unknown section [pool]; the nearest known one is [pools]"),
        ("run-router", "[schedule]\n", "unknown section [schedule]; the nearest known one is [scheduler]"),
        ("run-router", "[run-prefil]\n", "unknown section [run-prefil]; the nearest known one is [run-prefill]"),
        ("run-router", "[model]\ndtipe = 1\n", "[model] unknown key dtipe"),
        ("run-prefill", "[run-prefill.pools]\n", "unknown section [run-prefill.pools]"),
        ("run-prefill", "[run-prefill]\nport = 1\n", "unknown section [run-prefill.port]"),
        ("run-prefill", "run-prefill = 1\n", "run-prefill = 1 is not a table; write [run-prefill.SECTION]"),
        ("run-decode", "[run-decode.instance]\nprt = 1\n", "[run-decode.instance] unknown key prt; the nearest"),
        ("run-decode", '[run-decode.instance]\nport = "1"\n', "[run-decode.instance] port: '1' is not an integer"),
        ("run-router", "[run-router.model]\ndtype = 1\n", "[run-router.model] unknown key dtype"),
        ("pdserve up", "[http]\nport = 1\n", "[http] unknown key port"),
    ],
)
def test_what_belongs_to_no_command_is_refused(tmp_path: Path, command: str, text: str, message: str) -> None:
    path = tmp_path / "service.toml"
    with pytest.raises(ConfigError) as caught:
        load(command, path, text)
    assert caught.value.message.startswith(f"{path}: {message}")


def test_a_file_of_another_command_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "latency.toml").write_text("[pools]\n")
    with pytest.raises(ConfigError, match=r"unknown section \[pools\]"):
        load_settings(
            LatencyConfig,
            prog="pdserve bench latency",
            description="",
            argv=["--config", str(tmp_path / "latency.toml")],
        )


def test_the_names_are_those_of_the_commands() -> None:
    assert PROCESS_OF_COMMAND.keys() == ROOTS.keys()
    assert set().union(*(list_sections(root()) for root in ROOTS.values())) == SERVICE_SECTIONS
    of_instances, of_routers = (
        {field.name for field in dataclasses.fields(section)} for section in (ModelSettings, ServedModelSettings)
    )
    assert of_instances - of_routers == INSTANCE_MODEL_KEYS

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve import cli
from pdserve.commands.ask import describe_way
from pdserve.commands.up import UpConfig, plan_instances, resolve_engine
from pdserve.prefill.main import PrefillConfig
from pdserve.settings import load_settings
from pdserve.supervisor.placement import Placement


def up(*argv: str) -> UpConfig:
    return load_settings(UpConfig, prog="pdserve up", description="", argv=argv)


def test_help_lists_commands_and_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "up " in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pdserve ")
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["upp"], "error: unknown command upp; the nearest known one is up (pdserve --help lists them)\n"),
        (["up", "--prefil", "1"], "error: unknown argument --prefil; the nearest known one is --prefill\n"),
        (["up", "--decode", "0"], "error: --decode: 0 is below 1, the least that is allowed\n"),
        (["up", "--port", "70000"], "error: --port: 70000 is above 65535, the most that is allowed\n"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, line, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("argv", "connector", "options"),
    [
        ([], "shared_storage", {"path": "/run/kv"}),
        (["--prefill", "0"], "null", {}),
        (["--prefill", "0", "--connector", "shared_storage"], "shared_storage", {"path": "/run/kv"}),
        (["--connector-option", "path=/mnt"], "shared_storage", {"path": "/mnt"}),
        (["--connector", "some.module:Class"], "some.module:Class", {}),
    ],
)
def test_the_connector_fits_the_pools_and_kv_goes_to_a_fresh_place(argv, connector, options) -> None:
    engine = resolve_engine(up(*argv), Placement(3, [None]), Path("/run"))
    assert (engine.connector.connector, engine.connector.connector_options) == (connector, options)
    assert engine.model.num_threads == 3


def test_instances_get_names_and_at_a_restart_their_old_ports() -> None:
    plans = plan_instances(up("--prefill", "2", "--decode", "1", "--max-num-seqs", "5"), Path("/run"))
    assert [plan.name for plan in plans] == ["prefill-0", "prefill-1", "decode-0"]
    first = plans[0].build_arguments(None)
    again = plans[0].build_arguments({"address": "tcp://127.0.0.1:4001", "http": "http://127.0.0.1:4002"})
    for arguments, ports in ((first, (0, 0)), (again, (4001, 4002))):
        config = load_settings(PrefillConfig, prog="run-prefill", description="", argv=arguments)
        assert (config.instance.port, config.instance.http_port) == ports
        assert (config.instance.instance_id, config.engine.scheduler.max_num_seqs) == ("prefill-0", 5)


def test_the_way_of_a_handed_over_request_names_both_instances() -> None:
    timeline = {
        "instances": [{"role": "prefill", "instance_id": "prefill-1"}, {"role": "decode", "instance_id": "decode-0"}],
        "stages_ms": {"prefill": 40, "kv_save": 3, "kv_load": 2.04, "handoff": 9, "decode": 500, "total": 560},
        "kv_bytes_moved": 1234567,
        "prompt_tokens": 28,
        "completion_tokens": 12,
        "ttft_ms": 45,
    }
    way = describe_way(timeline)
    for part in (
        "prefill-1 prefilled 28 tokens in 40.0 ms",
        "1,234,567 bytes of KV went to decode-0: saved in 3.0 ms, loaded in 2.0 ms",
        "decode-0 decoded 11 tokens in 500.0 ms",
    ):
        assert part in way


def test_the_way_of_a_request_that_one_instance_served_alone() -> None:
    timeline = {
        "instances": [{"role": "decode", "instance_id": "decode-0"}],
        "stages_ms": {"prefill": 40, "total": 40.5},
        "kv_bytes_moved": 0,
        "prompt_tokens": 28,
        "completion_tokens": 1,
        "ttft_ms": 40.2,
    }
    assert "hand-off" not in describe_way(timeline)
    assert "decoded" not in describe_way(timeline)

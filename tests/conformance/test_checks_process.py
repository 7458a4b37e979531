"""Checks in a process of their own: what a connector does to the process is a verdict, and the next check runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pdserve.connectors.testing.check import Check
from pdserve.connectors.testing.checks import CHECKS
from pdserve.connectors.testing.checks_process import run_checks_apart
from pdserve.connectors.testing.faults.full_disk import full_disk, release_mounts
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.runner import Verdict
from pdserve.errors import ConfigError

BROKEN = Path(__file__).parent / "broken"


def get_checks_called(*names: str) -> list[Check]:
    return [check for check in CHECKS if check.id in names]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BROKEN)


@pytest.mark.parametrize(
    ("connector", "reason", "hangs"),
    [
        ("HoldingConnector", r"did not return from get_num_new_matched_tokens \(.*native_ends.py, line \d+\)", True),
        ("LockedOutConnector", r"did not return from get_num_new_matched_tokens \(.*native_ends.py, line \d+\)", True),
        ("CrashingConnector", r"ended the process by SIGSEGV in get_num_new_matched_tokens \(.*native_ends.py", False),
    ],
)
def test_native_code_that_keeps_or_ends_the_process_gets_a_verdict(
    tmp_path: Path, connector: str, reason: str, hangs: bool
) -> None:
    checks, patience = get_checks_called("what_is_undeclared_is_not_there"), Patience(call_timeout_s=1.0)
    told = []
    results, end_error = run_checks_apart(
        f"native_ends:{connector}", checks, tmp_path, patience=patience, on_result=told.append
    )
    (result,) = results
    assert (result.verdict, result.broken_rule, end_error, told) == (Verdict.FAIL, "R2", None, results)
    assert re.match(f"R2: the connector {reason}", result.reason)
    assert patience.has_hung == hangs


def test_the_next_process_goes_on_with_the_next_check(tmp_path: Path) -> None:
    checks = get_checks_called(
        "what_is_undeclared_is_not_there", "allocation_may_fail_many_times", "every_chunk_arrives"
    )
    results, end_error = run_checks_apart("native_ends:ExitingConnector", checks, tmp_path)
    assert [result.check for result in results] == checks
    assert [result.verdict for result in results] == [Verdict.FAIL, Verdict.NOT_DECLARED, Verdict.NOT_DECLARED]
    assert results[0].reason == "R2: the connector ended the process with status 3"
    assert end_error is None


def test_a_connector_that_ends_the_process_at_its_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unborn_connector.py").write_text("import os\nos._exit(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        run_checks_apart("unborn_connector:Any", get_checks_called("every_chunk_arrives"), tmp_path)
    assert caught.value.message == (
        "no engine can be started with connector unborn_connector:Any: it ended the process with status 4"
    )


def test_what_a_killed_process_left_mounted_is_taken_away(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs privileges")
    (tmp_path / "kv").mkdir()
    disk = full_disk(tmp_path / "kv")
    disk.__enter__()
    try:
        release_mounts(tmp_path)
        assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    finally:
        disk.__exit__(None, None, None)

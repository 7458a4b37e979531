"""The kit itself: its parts, its commands, and the page that describes it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cli import main
from pdserve.connectors.testing.check import Check, Level, Need
from pdserve.connectors.testing.checks import CHECKS, get_checks
from pdserve.connectors.testing.faults.full_disk import full_disk
from pdserve.connectors.testing.faults.link import Damage, FaultyLink
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.connectors.testing.kv_content import build_context
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.report import format_table, has_failed, judge_rules
from pdserve.connectors.testing.rules import RULE_IDS, RULES
from pdserve.connectors.testing.runner import CheckResult, Verdict, run_check
from pdserve.connectors.testing.target import ConformanceTarget, open_target, read_options
from pdserve.connectors.testing.violations import RuleViolationError
from pdserve.errors import ConfigError
from pdserve.protocol import Role

PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"


# --- rules and checks -----------------------------------------------------------------------------------------


def test_every_rule_has_a_check_and_every_check_a_rule() -> None:
    assert tuple(f"R{number}" for number in range(1, 24)) == RULE_IDS
    assert {check.rule for check in CHECKS} == set(RULE_IDS)
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert all(check.purpose.endswith(".") for check in CHECKS)


def test_levels_build_on_each_other() -> None:
    sizes = [len(get_checks(max_level=level)) for level in Level]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_page_has_a_section_for_each_rule_with_its_checks(rule) -> None:
    sections = PAGE.read_text().split("\n### ")
    (section,) = (text for text in sections if text.startswith(f"{rule.id}: {rule.title}\n"))
    assert f"**{rule.what}**" in section
    assert "Where it hurt: " in section
    listed = re.findall(r"`(\w+)`", section.split("Checks: ")[1].split("\n\n")[0])
    assert listed == [check.id for check in CHECKS if check.rule == rule.id]


# --- verdicts -------------------------------------------------------------------------------------------------


def result(rule: str, verdict: Verdict, reason: str = "", broken_rule: str | None = None) -> CheckResult:
    check = Check(f"check_of_{rule}", rule, Level.CONTRACT, (), "It works.", lambda bench: None)
    return CheckResult(check, verdict, reason, broken_rule)


def test_a_breach_counts_for_the_rule_that_is_broken_whoever_saw_it() -> None:
    results = [
        result("R1", Verdict.STOPPED, "R9: reported twice", "R9"),
        result("R9", Verdict.PASS),
        result("R2", Verdict.PASS),
        result("R2", Verdict.NOT_OFFERED, "no hook"),
        result("R3", Verdict.NOT_DECLARED, "cannot load"),
        result("R4", Verdict.WARNING, "loads all the same"),
    ]
    verdicts = {verdict.rule.id: verdict for verdict in judge_rules(results)}
    assert verdicts["R1"].verdict is Verdict.STOPPED
    assert verdicts["R9"].verdict is Verdict.FAIL
    assert verdicts["R9"].reasons == ("check_of_R1: R9: reported twice",)
    assert (verdicts["R2"].verdict, verdicts["R2"].reasons) == (Verdict.PASS, ("no hook",))
    assert verdicts["R3"].verdict is Verdict.NOT_DECLARED
    assert verdicts["R4"].verdict is Verdict.WARNING
    assert verdicts["R5"].verdict is Verdict.NOT_TESTED
    assert has_failed(verdicts.values())
    table = format_table(list(verdicts.values()))
    assert "R9   One completion for each load         fail          1 passed" in table
    assert table.splitlines()[-1] == "1 pass, 1 fail, 1 not declared, 1 warning, 18 not tested, 1 stopped"


# --- targets --------------------------------------------------------------------------------------------------


def test_options_may_name_the_runs_directory(tmp_path: Path) -> None:
    target = open_target("memory", tmp_path)
    assert isinstance(target.options["store"], dict)
    plain = ConformanceTarget(target.connector, {"path": "{directory}/kv", "size": 3}, tmp_path)
    assert plain.build_options("a", Role.PREFILL) == {"path": f"{tmp_path}/kv", "size": 3}


@pytest.mark.parametrize(
    ("target", "message"),
    [("json:loads", "no subclass of ConformanceTarget"), ("nowhere:Target", "cannot be imported")],
)
def test_a_wrong_target_is_told(tmp_path: Path, target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_target("null", tmp_path, target=target)


def test_options_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        read_options(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_options(tmp_path / "none.toml")


def test_needs_are_told() -> None:
    check = Check("a", "R1", Level.CONTRACT, (Need.SAVE, Need.STORE), "It works.", lambda bench: None)
    features = open_target("null", Path()).features
    assert check.find_unmet_need(features, composes=False) == "the connector does not declare that it can save KV"


# --- the harness ----------------------------------------------------------------------------------------------


def test_the_harness_watches_blocks_that_are_free(tmp_path: Path) -> None:
    engine = EngineHarness(open_target("null", tmp_path).connector, build_context(Role.DECODE, {}))
    engine.submit("a", range(5))
    block_id = engine.admit("a", 0)[0]
    engine.step({"a": 5})
    engine.finish("a")
    engine.step()
    engine.memory.kv_cache[block_id] = 1.0
    with pytest.raises(RuleViolationError, match=r"R9: block \d+ was written to after it was free"):
        engine.step()


def test_the_harness_sees_who_writes_over_a_living_request(tmp_path: Path) -> None:
    engine = EngineHarness(open_target("null", tmp_path).connector, build_context(Role.DECODE, {}))
    engine.submit("a", range(5))
    block_id = engine.admit("a", 0)[0]
    engine.step({"a": 5})
    engine.memory.kv_cache[block_id] = 1.0
    with pytest.raises(RuleViolationError, match="R9: token 0 of a was written over by somebody"):
        engine.finish("a")


# --- the full disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_mount", [True, False])
def test_a_full_disk_takes_nothing_and_is_as_before_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_mount: bool
) -> None:
    if may_mount and os.getuid() != 0:
        pytest.skip("mounting a small file system needs privileges")
    if not may_mount:
        monkeypatch.setattr("pdserve.connectors.testing.faults.full_disk._run", lambda *_: False)
    (tmp_path / "sub").mkdir()
    (tmp_path / "before").write_bytes(b"before")
    with full_disk(tmp_path):
        assert (tmp_path / "sub").is_dir()
        assert (tmp_path / "before").exists() != may_mount
        with pytest.raises(OSError, match=r"No space left|File too large"):
            (tmp_path / "sub" / "new").write_bytes(b"new")
    (tmp_path / "sub" / "after").write_bytes(b"after")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "sub"]
    assert (tmp_path / "before").read_bytes() == b"before"


def test_a_full_store_is_reported_where_nobody_may_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.connectors.testing.faults.full_disk._run", lambda *_: False)
    (check,) = (check for check in CHECKS if check.id == "a_full_store_is_a_reported_failure")
    target = open_target("shared_storage", tmp_path)
    result = run_check(target, check, Patience())
    assert (result.verdict, result.reason) == (Verdict.PASS, "")


# --- the bad link ---------------------------------------------------------------------------------------------

ANSWER = bytes(range(200))


@pytest.fixture
def link(tmp_path: Path):
    """A link to a server that answers each line with the same bytes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "server"))
    listener.listen()

    def serve(connection: socket.socket) -> None:
        with connection:
            while connection.recv(1):
                connection.sendall(ANSWER)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    link = FaultyLink(str(tmp_path / "server"), str(tmp_path / "link"))
    yield link
    link.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def ask(link: FaultyLink, timeout_s: float = 5.0) -> bytes:
    """What the server says, until it pauses or ends."""
    answer = b""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.settimeout(timeout_s)
        client.connect(str(link.address))
        client.sendall(b"?")
        while more := client.recv(4096):
            answer += more
            client.settimeout(0.1)
    return answer


def test_a_link_does_its_damage_and_recovers(link: FaultyLink) -> None:
    assert ask(link) == ANSWER
    expected = {
        Damage.NONE: lambda answer: answer == ANSWER,
        Damage.DELAY: lambda answer: answer == ANSWER,
        Damage.FLIP: lambda answer: sum((a ^ b).bit_count() for a, b in zip(answer, ANSWER, strict=True)) == 1,
        Damage.REPEAT: lambda answer: answer == ANSWER + ANSWER,
        Damage.DROP: lambda answer: len(answer) == len(ANSWER) - 7,
        Damage.TRUNCATE: lambda answer: answer == ANSWER[: len(ANSWER) // 2],
        Damage.STALL: lambda answer: answer == b"",
        Damage.CUT: lambda answer: answer == b"",
    }
    assert set(expected) == set(Damage)
    for damage, is_right in expected.items():
        with link.inflict(damage):
            assert is_right(ask(link, 0.3)), damage
        assert ask(link) == ANSWER, damage


# --- commands -------------------------------------------------------------------------------------------------


def test_the_command_writes_a_report_and_says_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["conformance", "--connector", "memory", "--level", "1", "--report", str(report)]) == 0
    assert "R1   Counts are beyond local              pass          4 passed" in capsys.readouterr().out
    content = json.loads(report.read_text())
    assert (content["connector"], content["failed"], len(content["rules"])) == ("memory", False, 23)


BROKEN_MODULE = """
from pdserve.connectors.base import ConnectorFeatures
from pdserve.connectors.null import NullConnector

class Boaster(NullConnector):
    features = ConnectorFeatures(can_save=True, can_load=True, is_store=True)
"""


def test_the_command_exits_with_1_when_a_rule_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "boasting_connector.py").write_text(BROKEN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    connector = "boasting_connector:Boaster"
    assert main(["conformance", "--connector", connector, "--level", "1", "--timeout-s", "0.3"]) == 1
    assert "R2   Whole-prompt hits work               fail" in capsys.readouterr().out


def test_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance"]) == 2
    assert "say which connector" in capsys.readouterr().err


def test_the_plugin_loads_neither_torch_nor_the_kit() -> None:
    code = "import sys, pdserve.connectors.testing.plugin; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


# --- connectors that misbehave ----------------------------------------------------------------------------------

MISBEHAVING_MODULE = """
import threading

from pdserve.connectors.null import NullConnector, NullScheduler, NullWorker


class Hangs(NullScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        threading.Event().wait()


class HangsAtTheEnd(NullWorker):
    def close(self):
        threading.Event().wait()


class FailsAtTheEnd(NullWorker):
    def close(self):
        raise OSError("cannot be closed")


class EndsTheProcess(NullWorker):
    def close(self):
        raise SystemExit(3)


class NeverStarts(NullWorker):
    def __init__(self):
        raise ValueError("no licence")


class Connector(NullConnector):
    scheduler, worker = NullScheduler, NullWorker

    @classmethod
    def build_scheduler(cls, context):
        return cls.scheduler()

    @classmethod
    def build_worker(cls, context):
        return cls.worker()


def of(half):
    name = "scheduler" if issubclass(half, NullScheduler) else "worker"
    return type(f"Of{half.__name__}", (Connector,), {name: half})


OfHangs, OfHangsAtTheEnd, OfNeverStarts = map(of, (Hangs, HangsAtTheEnd, NeverStarts))
OfFailsAtTheEnd, OfEndsTheProcess = map(of, (FailsAtTheEnd, EndsTheProcess))
"""


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The module's name."""
    (tmp_path / "misbehaving_connectors.py").write_text(MISBEHAVING_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "misbehaving_connectors"
    sys.modules.pop("misbehaving_connectors", None)


@pytest.mark.parametrize(
    ("connector", "reason"),
    [
        (
            "OfHangs",
            r"R2: the connector did not return from Hangs\.get_num_new_matched_tokens \(.*, line 9\) within 1.5 s",
        ),
        ("OfHangsAtTheEnd", "R2: the connector did not return from HangsAtTheEnd.close"),
        ("OfFailsAtTheEnd", "R2: the connector raised OSError: cannot be closed"),
        ("OfEndsTheProcess", "R2: the connector raised SystemExit: 3"),
        ("OfNeverStarts", "R2: the connector raised ValueError: no licence"),
    ],
)
def test_whatever_a_connector_does_there_is_a_verdict(
    tmp_path: Path, misbehaving: str, connector: str, reason: str
) -> None:
    (check,) = (check for check in CHECKS if check.id == "what_is_undeclared_is_not_there")
    patience = Patience(timeout_s=30.0, call_timeout_s=1.5)
    result = run_check(open_target(f"{misbehaving}:{connector}", tmp_path), check, patience)
    assert (result.verdict, result.broken_rule) == (Verdict.FAIL, "R2")
    assert re.match(reason, result.reason)
    assert patience.call_timeout_s == pytest.approx(0.15 if "Hangs" in connector else 1.5)


def test_a_connector_that_never_starts_is_told_once(misbehaving: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--connector", f"{misbehaving}:OfNeverStarts"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("OfNeverStarts: the connector raised ValueError: no licence\n")


def test_a_report_that_cannot_be_written_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--connector", "memory", "--report", str(tmp_path / "none" / "report.json")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_connectors_thread_does_not_keep_the_command_from_ending(tmp_path: Path) -> None:
    (tmp_path / "lingering.py").write_text(
        "import threading\n"
        "from pdserve.connectors.null import NullConnector\n"
        "class Lingering(NullConnector):\n"
        "    threading.Thread(target=threading.Event().wait, name='lingers').start()\n"
    )
    pdserve = str(Path(sys.executable).with_name("pdserve"))
    command = [pdserve, "conformance", "--connector", "lingering:Lingering", "--level", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("error: the connector left threads running: lingers\n")
    assert "not declared" in done.stdout

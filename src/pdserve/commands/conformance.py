"""``pdserve conformance``: a verdict for each rule of the connector contract."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.connectors.testing.check import Level
from pdserve.connectors.testing.checks import get_checks
from pdserve.connectors.testing.checks_process import run_checks_apart
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.report import build_report, format_table, has_failed, judge_rules
from pdserve.connectors.testing.runner import CheckResult, Verdict
from pdserve.connectors.testing.target import read_options
from pdserve.errors import ConfigError
from pdserve.settings import load_settings, setting


@dataclass(frozen=True)
class ConformanceSettings:
    """What is tested, how far, and where the report goes."""

    connector: str = setting("", help="a registered name, or module:Class", metavar="NAME")
    options: str | None = setting(None, help="the connector's options, as a TOML file", metavar="FILE")
    target: str | None = setting(
        None, help="its ConformanceTarget, where it has one of its own", metavar="MODULE:CLASS"
    )
    level: int = setting(3, help="1 = contract, 2 = faults too, 3 = real engines too", minimum=1, maximum=3)
    timeout_s: float = setting(10.0, help="how long to wait for what should come at once", minimum=0.1)
    report: str | None = setting(None, help="write all results to this JSON file", metavar="FILE")


@dataclass(frozen=True)
class ConformanceConfig:
    """All settings of ``pdserve conformance``."""

    conformance: ConformanceSettings = field(default_factory=ConformanceSettings)


def run(argv: Sequence[str]) -> int:
    """Run the checks and print the verdicts; 1 when a rule is broken.

    Raises:
        ConfigError: a setting is wrong, or no engine can be started with the connector.
    """
    settings = load_settings(
        ConformanceConfig,
        prog="pdserve conformance",
        description="Test a KV connector against every rule of the connector contract.",
        examples=[
            "pdserve conformance --connector shared_storage",
            "pdserve conformance --connector my_package:MyConnector --options options.toml --report report.json",
        ],
        argv=argv,
    ).conformance
    if not settings.connector:
        raise ConfigError("say which connector: --connector NAME or --connector module:Class")
    if settings.report is not None:
        _require_writable(Path(settings.report))
    options = read_options(Path(settings.options)) if settings.options else None
    with tempfile.TemporaryDirectory(prefix="pdserve-conformance-") as directory:
        results, end_error = run_checks_apart(
            settings.connector,
            get_checks(max_level=Level(settings.level)),
            Path(directory),
            options=options,
            target=settings.target,
            patience=Patience(settings.timeout_s),
            on_result=_show_progress,
        )
    is_broken = _report(settings, results)
    if end_error is not None:
        print(f"error: {end_error}", file=sys.stderr)
    return int(is_broken or end_error is not None)


def _report(settings: ConformanceSettings, results: Sequence[CheckResult]) -> bool:
    """Tell the verdicts; whether a rule is broken."""
    verdicts = judge_rules(results)
    print(format_table(verdicts))
    if settings.report is not None:
        report = build_report(settings.connector, results, verdicts)
        Path(settings.report).write_text(json.dumps(report, indent=2) + "\n")
    return has_failed(verdicts)


def _require_writable(report: Path) -> None:
    """Said before minutes of checks, not after."""
    try:
        report.open("a").close()
    except OSError as error:
        raise ConfigError(f"--report {report} cannot be written: {error.strerror}") from error


def _show_progress(result: CheckResult) -> None:
    if result.verdict is not Verdict.NOT_DECLARED:
        print(f"{result.check.rule} {result.check.id}: {result.verdict.value}", file=sys.stderr)

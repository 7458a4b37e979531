"""The checks as a pytest class, for the connector author's own repository.

    from pdserve.connectors.testing.suite import ConnectorConformanceSuite

    class TestMyConnector(ConnectorConformanceSuite):
        connector = "my_package:MyConnector"

That is a test for each check. `build_target` gives more: a server, a directory, ways to do damage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pdserve.connectors.testing.check import Check, Level
from pdserve.connectors.testing.checks import get_checks
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.runner import Verdict, run_check
from pdserve.connectors.testing.target import ConformanceTarget, open_target
from pdserve.connectors.testing.violations import UndeclaredAbilityError


class ConnectorConformanceSuite:
    """One test for each check; derive from it and say which connector.

    Attributes:
        connector: a registered name, or ``module:Class``.
        connector_options: its options; ``{directory}`` in a text stands for a directory of the run's own.
        max_level: checks above it are left out.
        timeout_s: how long to wait for what should come at once.
    """

    connector: ClassVar[str] = ""
    connector_options: ClassVar[Mapping[str, Any]] = {}
    max_level: ClassVar[Level] = Level.ENGINE
    timeout_s: ClassVar[float] = 10.0

    @classmethod
    def build_target(cls, directory: Path) -> ConformanceTarget:
        """The connector under test with its surroundings; called once for the class."""
        return open_target(cls.connector, directory, options=cls.connector_options)

    @pytest.fixture(scope="class")
    @classmethod
    def conformance_target(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConformanceTarget]:
        """The target, closed when the class's tests have run."""
        target = cls.build_target(tmp_path_factory.mktemp("conformance"))
        yield target
        target.close()

    @pytest.fixture(scope="class")
    @classmethod
    def conformance_patience(cls) -> Patience:
        """One patience for all checks: a connector that hangs does not hang them all for long."""
        return Patience(cls.timeout_s)

    @pytest.mark.parametrize("check", get_checks(), ids=lambda check: f"{check.rule}-{check.id}")
    def test_rule(self, check: Check, conformance_target: ConformanceTarget, conformance_patience: Patience) -> None:
        """The connector keeps the rule, as far as this check can tell."""
        if check.level > self.max_level:
            pytest.skip(f"level {check.level.value} is left out")
        result = run_check(conformance_target, check, conformance_patience)
        if result.verdict in (Verdict.NOT_DECLARED, Verdict.NOT_OFFERED):
            pytest.skip(result.reason)
        if result.verdict is Verdict.WARNING:
            pytest.xfail(f"{UndeclaredAbilityError.__doc__} {result.reason}")
        assert result.verdict is Verdict.PASS, result.reason

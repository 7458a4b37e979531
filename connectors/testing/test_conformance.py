"""The checks for the connector that the command line names.

pytest --pyargs pdserve.connectors.testing --connector NAME [--connector-options FILE]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.connectors.testing.suite import ConnectorConformanceSuite
from pdserve.connectors.testing.target import ConformanceTarget, open_target, read_options


class TestConnector(ConnectorConformanceSuite):
    """One test for each check."""

    @pytest.fixture(scope="class")
    @classmethod
    def conformance_target(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[ConformanceTarget]:
        """The target that the options describe."""
        option = request.config.option
        if not option.connector:
            pytest.skip("no connector is named: add --connector NAME or --connector module:Class")
        target = open_target(
            option.connector,
            tmp_path_factory.mktemp("conformance"),
            options=read_options(Path(option.connector_options)) if option.connector_options else None,
            target=option.connector_target,
        )
        yield target
        target.close()

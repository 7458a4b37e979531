"""Every connector that comes with pdserve keeps every rule, as far as the kit can tell, on its real back-end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pdserve.connectors import connector_names, load_connector
from pdserve.connectors.testing.check import Level
from pdserve.connectors.testing.suite import ConnectorConformanceSuite
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.errors import ConfigError


class Suite(ConnectorConformanceSuite):
    """Skips a connector whose packages, or those of one of its parts, are not installed here."""

    parts: ClassVar[Sequence[str]] = ()
    timeout_s: ClassVar[float] = 30.0  # machines that run all these tests are busy

    @classmethod
    def build_target(cls, directory: Path) -> ConformanceTarget:
        try:
            for connector in (cls.connector, *cls.parts):
                load_connector(connector)
        except ConfigError as missing:
            pytest.skip(missing.message)
        return super().build_target(directory)


class TestNull(Suite):
    connector = "null"


class TestMemory(Suite):
    connector = "memory"


class TestSharedStorage(Suite):
    connector = "shared_storage"


class TestSharedStorageWholeBlocks(Suite):
    connector = "shared_storage"
    connector_options: ClassVar[Mapping[str, Any]] = {"layerwise": False}


class TestRedis(Suite):
    connector = "redis"


class TestNixl(Suite):
    connector = "nixl"


class TestLmcache(Suite):
    connector = "lmcache"


class TestMulti(Suite):
    connector = "multi"


class TestMultiOfADirectOneAndAStore(Suite):
    connector = "multi"
    parts = ("nixl", "shared_storage")
    connector_options: ClassVar[Mapping[str, Any]] = {
        "children": [{"connector": "nixl"}, {"connector": "shared_storage"}]
    }
    max_level = Level.FAULTS


def test_all_are_here() -> None:
    assert {suite.connector for suite in Suite.__subclasses__()} >= set(connector_names())

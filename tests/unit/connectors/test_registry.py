from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pdserve.connectors as connectors
from pdserve.connectors import registry
from pdserve.connectors.null import NullConnector
from pdserve.connectors.registry import connector_names, load_connector
from pdserve.connectors.shared_storage import SharedStorageConnector
from pdserve.errors import ConfigError


class NoConnector:
    features = None


def _register(monkeypatch: pytest.MonkeyPatch, *entries: metadata.EntryPoint) -> None:
    monkeypatch.setattr(
        registry.metadata,
        "entry_points",
        lambda **criteria: metadata.EntryPoints(entries).select(**criteria),
    )


def test_registered_connectors_are_found_by_name() -> None:
    assert load_connector("null") is NullConnector
    assert load_connector("shared_storage") is SharedStorageConnector
    assert {"null", "shared_storage"} <= set(connector_names())


def test_a_class_is_found_by_module_and_name() -> None:
    assert load_connector("pdserve.connectors.null:NullConnector") is NullConnector


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'nixel' is unknown; registered: .*null.*shared_storage"):
        load_connector("nixel")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:Class", "No module named 'no'; is its package installed, or its folder in PYTHONPATH?"),
        ("pdserve.connectors.null:Missing", "has no Missing"),
        (":Class", "not of the form module:Class"),
        ("module:", "not of the form module:Class"),
        (f"{__name__}:NoConnector", "no connector, it lacks build_scheduler, build_worker"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys)
    monkeypatch.setattr(sys.modules[__name__], "NoConnector", NoConnector, raising=False)
    with pytest.raises(ConfigError, match=message):
        load_connector(name)


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    entry = metadata.EntryPoint("fast", "no_such_wheel.kv:Fast [fast]", registry.ENTRY_POINT_GROUP)
    entry = entry._for(metadata.PathDistribution(tmp_path))
    _register(monkeypatch, entry)
    with pytest.raises(ConfigError) as caught:
        load_connector("fast")
    assert caught.value.message == (
        "connector 'fast' cannot be imported: No module named 'no_such_wheel'"
        "; install it with: pip install 'acme[fast]'"
    )


def test_two_classes_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = registry.ENTRY_POINT_GROUP
    _register(monkeypatch, metadata.EntryPoint("kv", "a:A", group), metadata.EntryPoint("kv", "b:B", group))
    with pytest.raises(ConfigError, match="registered more than once; choose a:A or b:B"):
        load_connector("kv")


def test_the_same_entry_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("kv", "pdserve.connectors.null:NullConnector", registry.ENTRY_POINT_GROUP)
    _register(monkeypatch, entry, entry)
    assert load_connector("kv") is NullConnector


def test_all_public_names_are_there() -> None:
    assert all(hasattr(connectors, name) for name in connectors.__all__)


@pytest.mark.parametrize(
    "module",
    [
        "pdserve.connectors",
        *(f"pdserve.connectors.{name}" for name in ("null", "shared_storage", "memory", "redis", "multi")),
    ],
)
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

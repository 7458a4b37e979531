from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.connectors.shared_storage import SharedStorageConnector, options
from pdserve.connectors.shared_storage.options import StorageOptions, parse_options
from pdserve.connectors.testing import build_context
from pdserve.errors import ConfigError
from pdserve.protocol import Role


def parse(**given: Any) -> StorageOptions:
    return parse_options(build_context(Role.PREFILL, given))


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("path", "/a/b", Path("/a/b")),
        ("path", "relative", Path.cwd() / "relative"),
        ("path", "~/kv", Path.home() / "kv"),
        ("save", "always", "always"),
        ("max_bytes", 10_000, 10_000),
        ("max_bytes", "10000", 10_000),
        ("max_bytes", "512MiB", 512 << 20),
        ("max_bytes", "2 GB", 2_000_000_000),
        ("max_bytes", "1k", 1000),
        ("max_staging_bytes", "1gib", 1 << 30),
        ("min_age_s", 0, 0.0),
        ("min_age_s", "1.5", 1.5),
        ("save_timeout_s", 3, 3.0),
        ("load_timeout_s", "0.5", 0.5),
        ("reader_threads", "4", 4),
        ("writer_threads", 1, 1),
        ("reader_nice", "0", 0),
        ("layerwise", "true", True),
        ("layerwise", False, False),
    ],
)
def test_what_the_user_wrote_is_understood(name: str, raw: Any, value: Any) -> None:
    assert getattr(parse(**{name: raw}), name) == value


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("path", "", "give a directory"),
        ("path", 5, "give a directory"),
        ("save", "sometimes", "give one of auto, always, never"),
        ("save", True, "give one of auto, always, never"),
        ("max_bytes", "lots", "give bytes, as a number or like 512MiB"),
        ("max_bytes", -1, "give bytes"),
        ("max_bytes", True, "give bytes"),
        ("max_bytes", 1.5, "give bytes"),
        ("max_bytes", 100, "is below the 336 bytes of one block"),
        ("max_staging_bytes", 100, "is below the 336 bytes of one block"),
        ("min_age_s", "soon", "could not convert"),
        ("min_age_s", float("nan"), "give seconds"),
        ("min_age_s", -1, "give seconds"),
        ("save_timeout_s", "inf", "give seconds"),
        ("reader_threads", 0, "from 1 to 64"),
        ("reader_threads", "many", "invalid literal"),
        ("writer_threads", 65, "from 1 to 64"),
        ("writer_threads", 1.5, "from 1 to 64"),
        ("reader_nice", 20, "from 0 to 19"),
        ("reader_nice", -1, "from 0 to 19"),
        ("layerwise", "maybe", "give true or false"),
    ],
)
def test_what_is_wrong_is_named(name: str, raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(**{name: raw})
    assert name in caught.value.message


@pytest.mark.parametrize("build", ["build_scheduler", "build_worker"])
def test_an_unknown_option_names_the_known_ones(build: str) -> None:
    context = build_context(Role.PREFILL, {"pathh": "/x"})
    with pytest.raises(ConfigError, match=r"option 'pathh' is unknown; known: path, max_bytes, .*threads"):
        getattr(SharedStorageConnector, build)(context)


def test_the_default_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(options, "_SHARED_MEMORY", tmp_path / "absent")
    assert options.get_default_path() == tmp_path / f"pdserve-{os.getuid()}"
    monkeypatch.setattr(options, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(options, "_LEAST_SHARED_MEMORY_BYTES", 1)
    assert options.get_default_path() == tmp_path / f"pdserve-{os.getuid()}"
    monkeypatch.setattr(options.tempfile, "gettempdir", lambda: "/elsewhere")
    assert options.get_default_path() == tmp_path / f"pdserve-{os.getuid()}"
    monkeypatch.setattr(options, "_LEAST_SHARED_MEMORY_BYTES", 1 << 62)
    assert options.get_default_path() == Path(f"/elsewhere/pdserve-{os.getuid()}")


def test_a_path_that_is_a_file_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"cannot use path {path}: (File exists|Not a directory)"):
            SharedStorageConnector.build_worker(build_context(Role.PREFILL, {"path": path}))


def test_a_default_directory_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options, "get_default_path", lambda: tmp_path / "kv")
    context = build_context(Role.PREFILL, {})
    SharedStorageConnector.build_worker(context).close()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "kv").stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        SharedStorageConnector.build_worker(context)
    SharedStorageConnector.build_worker(build_context(Role.PREFILL, {"path": str(tmp_path / "kv")})).close()

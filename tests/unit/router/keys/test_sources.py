from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.router.keys.api_key import ApiKey, digest_of
from pdserve.router.keys.sources import read_keys

PLAIN = "s" * 40
ALICE = ApiKey("alice", digest_of(b"x"))


def test_file_and_environment_count_both(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{ALICE.format()}\n")
    bob, ops = ApiKey("bob", digest_of(PLAIN.encode())), ApiKey("ops", digest_of(b"z"), is_admin=True)
    assert read_keys(path, None) == [ALICE]
    assert read_keys(path, f"bob {PLAIN},{ops.format()}") == [ALICE, bob, ops]
    assert read_keys(None, f"bob {PLAIN}\n{ops.format()}\n") == [bob, ops]


def test_what_is_wrong_is_one_line_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for content, message in ((f"a {PLAIN}".encode(), "its digest is not sha256"), (b"\xff\xfe", "it is no text")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"--api-keys-file .*keys: .*{message}") as caught:
            read_keys(path, None)
        assert PLAIN not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none", None)
    with pytest.raises(ConfigError, match=r"^PDSERVE_API_KEYS: it holds no key"):
        read_keys(None, "")
    with pytest.raises(ConfigError, match=r"^PDSERVE_API_KEYS: entry 1: it is not of the form") as caught:
        read_keys(None, PLAIN)
    assert PLAIN not in str(caught.value)

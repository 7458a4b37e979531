from __future__ import annotations

import hashlib

import pytest

from pdserve.router.keys.api_key import ApiKey, digest_of, make_secret, parse_entries

DIGEST = "sha256:" + "ab" * 32
PLAIN = "k" * 32


def test_entry_written_is_the_one_that_is_read() -> None:
    keys = [ApiKey("alice", digest_of(b"x")), ApiKey("ops@example.org", digest_of(b"y"), is_admin=True)]
    assert parse_entries([key.format() for key in keys], takes_plain=False) == keys
    assert hashlib.sha256(b"x").hexdigest() in keys[0].format()


def test_fresh_keys_are_long_plain_text_and_never_the_same() -> None:
    made = {make_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(len(secret) == 47 and secret.isascii() and " " not in secret and "," not in secret for secret in made)
    assert [key.name for key in parse_entries([f"a {secret}" for secret in made], takes_plain=True)] == ["a"] * 100


def test_comments_and_empty_lines_are_passed_over() -> None:
    keys = parse_entries(["# who", "", "  ", f"a {DIGEST}", f"  # b {DIGEST}", f"a {DIGEST} admin"], takes_plain=False)
    assert [(key.name, key.is_admin) for key in keys] == [("a", False), ("a", True)]


@pytest.mark.parametrize(
    ("entries", "takes_plain", "message"),
    [
        ([], False, "it holds no key"),
        (["# only this"], False, "it holds no key"),
        ([f"a {DIGEST}", "b"], False, "entry 2: it is not of the form NAME DIGEST"),
        ([f"a {DIGEST} root"], False, "entry 1: it is not of the form"),
        ([f"a {DIGEST} admin more"], False, "entry 1: it is not of the form"),
        ([f"a/b {DIGEST}"], False, "entry 1: a key's name has"),
        ([f"a {DIGEST[:-1]}"], False, "entry 1: its digest is not sha256:"),
        ([f"a {DIGEST.upper()}"], False, "entry 1: its digest is not sha256:"),
        ([f"a {PLAIN}"], False, "entry 1: its digest is not sha256:"),
        ([f"a {PLAIN[1:]}"], True, "entry 1: its key must have 32 to 256"),
        ([f"a {PLAIN}é"], True, "entry 1: its key must have 32 to 256"),
    ],
)
def test_what_is_no_entry_is_named_and_not_repeated(entries: list[str], takes_plain: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_entries(entries, takes_plain=takes_plain)
    assert PLAIN[1:] not in str(caught.value)
    assert "abab" not in str(caught.value).lower()

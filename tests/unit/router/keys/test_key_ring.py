from __future__ import annotations

from pdserve.router.keys.api_key import ApiKey, digest_of
from pdserve.router.keys.key_ring import KeyRing


def test_only_valid_keys_are_found() -> None:
    alice, bob = ApiKey("alice", digest_of(b"one")), ApiKey("bob", digest_of(b"two"))
    ring = KeyRing([alice, bob])
    assert [ring.find(secret) for secret in (b"one", b"two", b"three", b"", b"One")] == [alice, bob, None, None, None]
    ring.replace([bob])
    assert ring.find(b"one") is None
    assert ring.find(b"two") is bob


def test_the_whole_digest_counts() -> None:
    digest = digest_of(b"one")
    ring = KeyRing([ApiKey("other", digest[:8] + bytes(24)), ApiKey("alice", digest)])
    found = ring.find(b"one")
    assert found is not None
    assert found.name == "alice"
    ring.replace([ApiKey("other", digest[:8] + bytes(24))])
    assert ring.find(b"one") is None

"""The keys that are valid now. Lives on the event loop."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from pdserve.router.keys.api_key import ApiKey, digest_of

_INDEX_BYTES = 8


class KeyRing:
    """Finds the key that a client sent.

    Keys are found by the first bytes of their digests and compared as a whole in constant time. What the time of the
    first step tells is about a digest, from which no key follows.

    Args:
        keys: those that are valid.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._by_index: dict[bytes, list[ApiKey]] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """From now on these are valid, and no others."""
        by_index: dict[bytes, list[ApiKey]] = {}
        for key in keys:
            by_index.setdefault(key.digest[:_INDEX_BYTES], []).append(key)
        self._by_index = by_index

    def find(self, secret: bytes) -> ApiKey | None:
        """The valid key that ``secret`` is; None where it is none."""
        digest = digest_of(secret)
        for key in self._by_index.get(digest[:_INDEX_BYTES], ()):
            if hmac.compare_digest(key.digest, digest):
                return key
        return None

"""What this router believes each instance has in its prefix cache, by block identity.

Exactly, where an instance sends cache events; approximately otherwise, by the prompts that were sent there: bounded
by the instance's own number of blocks, though it may have evicted any of them, and other routers may have sent it
more. It decides who computes a prompt, never what comes out.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence

from pdserve.kv_layout import BlockHasher, ModelIdentity
from pdserve.protocol import CacheEvents


class PrefixMode(enum.StrEnum):
    """How well an instance's cache is known."""

    EXACT = "exact"
    APPROXIMATE = "approximate"


class PrefixMemory:
    """Digests of full blocks by instance. Lives on the event loop."""

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[bytes, None]] = {}
        """Of instances that tell nothing: least recently sent first."""
        self._told: dict[str, set[bytes]] = {}

    def note(self, address: str, digests: Sequence[bytes], max_blocks: int) -> None:
        """A prompt goes to the instance at ``address``, which has room for ``max_blocks``."""
        if address in self._told:
            return
        known = self._sent.setdefault(address, OrderedDict())
        for digest in digests:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > max_blocks:
            known.popitem(last=False)

    def apply(self, address: str, events: CacheEvents) -> None:
        """The instance says what came and went."""
        if events.replaces_all or address not in self._told:
            self._told[address] = set()
            self._sent.pop(address, None)
        known = self._told[address]
        known.update(events.stored)
        known.difference_update(events.evicted)

    def mode(self, address: str) -> PrefixMode:
        """How well the instance's cache is known."""
        return PrefixMode.EXACT if address in self._told else PrefixMode.APPROXIMATE

    def count_known_blocks(self, address: str, digests: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the instance should hold."""
        known = self._told.get(address) or self._sent.get(address)
        if not known:
            return 0
        return next((index for index, digest in enumerate(digests) if digest not in known), len(digests))

    def forget(self, address: str) -> None:
        """The instance is gone, and its cache with it."""
        self._sent.pop(address, None)
        self._told.pop(address, None)


def hash_prompt(identity: ModelIdentity, prompt_token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
    """Digests of the prompt's full blocks, as the instances compute them."""
    size = identity.kv.block_size
    hasher = BlockHasher(identity.fingerprint, cache_salt=cache_salt)
    return [key.digest for key in hasher.block_keys(prompt_token_ids, size) if key.num_tokens == size]

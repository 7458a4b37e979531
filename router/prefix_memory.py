"""What this router believes each instance has in its prefix cache, by block identity.

Exactly, where an instance sends cache events, and besides what is on its way there: prompts that were sent a moment
ago, so that a burst with one prefix stays together. Approximately otherwise, by the prompts that were sent there:
bounded by the instance's own number of blocks, though it may have evicted any of them, and other routers may have sent
it more. It decides who computes a prompt, never what comes out.
"""

from __future__ import annotations

import enum
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from pdserve.kv_layout import BlockHasher, ModelIdentity
from pdserve.protocol import CacheEvents

UNCONFIRMED_S = 10.0
"""So long a prompt may take until an instance that tells what it has tells of its blocks."""


class PrefixMode(enum.StrEnum):
    """How well an instance's cache is known."""

    EXACT = "exact"
    APPROXIMATE = "approximate"


class PrefixMemory:
    """Digests of full blocks by instance. Lives on the event loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[str, OrderedDict[bytes, float]] = {}
        """What was sent and not told of, with the time: least recently sent first."""
        self._told: dict[str, set[bytes]] = {}

    def note(self, address: str, digests: Sequence[bytes], max_blocks: int) -> None:
        """A prompt goes to the instance at ``address``, which has room for ``max_blocks``."""
        sent = self._sent.setdefault(address, OrderedDict())
        told = self._told.get(address, ())
        now_s = self._clock()
        for digest in digests:
            if digest not in told:
                sent[digest] = now_s
                sent.move_to_end(digest)
        while len(sent) > max_blocks:
            sent.popitem(last=False)

    def apply(self, address: str, events: CacheEvents) -> None:
        """The instance says what came and went."""
        if events.replaces_all or address not in self._told:
            self._told[address] = set()
            self._sent.pop(address, None)
        known = self._told[address]
        known.update(events.stored)
        known.difference_update(events.evicted)
        sent = self._sent.get(address, OrderedDict())
        for digest in (*events.stored, *events.evicted):
            sent.pop(digest, None)

    def mode(self, address: str) -> PrefixMode:
        """How well the instance's cache is known."""
        return PrefixMode.EXACT if address in self._told else PrefixMode.APPROXIMATE

    def count_known_blocks(self, address: str, digests: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the instance should hold."""
        sent, told = self._sent.get(address, OrderedDict()), self._told.get(address)
        if told is None:
            return _count_leading(digests, sent.__contains__)
        since_s = self._clock() - UNCONFIRMED_S
        return _count_leading(digests, lambda digest: digest in told or sent.get(digest, -math.inf) >= since_s)

    def forget(self, address: str) -> None:
        """The instance is gone, and its cache with it."""
        self._sent.pop(address, None)
        self._told.pop(address, None)


def _count_leading(digests: Sequence[bytes], is_known: Callable[[bytes], bool]) -> int:
    return next((index for index, digest in enumerate(digests) if not is_known(digest)), len(digests))


def hash_prompt(identity: ModelIdentity, prompt_token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
    """Digests of the prompt's full blocks, as the instances compute them."""
    size = identity.kv.block_size
    hasher = BlockHasher(identity.fingerprint, cache_salt=cache_salt)
    return [key.digest for key in hasher.block_keys(prompt_token_ids, size) if key.num_tokens == size]

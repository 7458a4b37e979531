"""What this router believes each decode instance has in its prefix cache: the prompts it sent there.

An estimate, by block identity and bounded by the instance's own number of blocks; the instance may have evicted
any of it, and other routers may have sent it more. It decides who computes a prompt, never what comes out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pdserve.kv_layout import BlockHasher, ModelIdentity


class PrefixMemory:
    """Digests of full prompt blocks by instance, least recently sent first. Lives on the event loop."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[bytes, None]] = {}

    def note(self, address: str, digests: Sequence[bytes], max_blocks: int) -> None:
        """A prompt goes to the instance at ``address``, which has room for ``max_blocks``."""
        known = self._known.setdefault(address, OrderedDict())
        for digest in digests:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > max_blocks:
            known.popitem(last=False)

    def count_known_blocks(self, address: str, digests: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the instance should hold."""
        known = self._known.get(address)
        if known is None:
            return 0
        return next((index for index, digest in enumerate(digests) if digest not in known), len(digests))

    def forget(self, address: str) -> None:
        """The instance is gone, and its cache with it."""
        self._known.pop(address, None)


def hash_prompt(identity: ModelIdentity, prompt_token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
    """Digests of the prompt's full blocks, as the instances compute them."""
    size = identity.kv.block_size
    hasher = BlockHasher(identity.fingerprint, cache_salt=cache_salt)
    return [key.digest for key in hasher.block_keys(prompt_token_ids, size) if key.num_tokens == size]

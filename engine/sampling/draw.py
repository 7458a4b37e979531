"""One random number for each (seed, position): counter-based, so nothing has to be carried along.

A request gives the same tokens after a preemption, a hand-off or a migration because its draws depend on its
seed and on where in the sequence the token goes, on nothing else.
"""

from __future__ import annotations

import hashlib

_MASK_64 = (1 << 64) - 1


def draw_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: the request's seed; taken modulo 2**64.
        position: index in the sequence (prompt and output) of the token being chosen.
    """
    counter = (seed & _MASK_64).to_bytes(8, "little") + position.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8, person=b"pdserve-draw").digest(), "little")
    return (bits >> 11) * 2.0**-53

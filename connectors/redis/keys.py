"""Names of the values: readable for who looks into the server, complete in identity."""

from __future__ import annotations

from pdserve.kv_layout import ModelIdentity, Rank


class KeyNames:
    """``prefix:kv:fingerprint:digest``, and ``prefix:kv:fingerprint:rank:digest`` where there are several ranks.

    The digest alone identifies a block; the fingerprint in front lets an operator list or delete one model's.

    Args:
        prefix: chosen by the user.
        identity: the model's.
        rank: whose share of each block.
    """

    def __init__(self, prefix: str, identity: ModelIdentity, rank: Rank) -> None:
        share = f"{rank.label}:" if rank.label else ""
        self.prefix = f"{prefix}:kv:{identity.fingerprint}:{share}".encode()

    def of(self, digest: bytes) -> bytes:
        """The name of the block with this digest."""
        return self.prefix + digest.hex().encode()

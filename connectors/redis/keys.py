"""Names of the values: readable for who looks into the server, complete in identity."""

from __future__ import annotations

from pdserve.kv_layout import ModelIdentity


class KeyNames:
    """``prefix:kv:fingerprint:digest``.

    The digest alone identifies a block; the fingerprint in front lets an operator list or delete one model's.

    Args:
        prefix: chosen by the user.
        identity: the model's.
    """

    def __init__(self, prefix: str, identity: ModelIdentity) -> None:
        self.prefix = f"{prefix}:kv:{identity.fingerprint}:".encode()

    def of(self, digest: bytes) -> bytes:
        """The name of the block with this digest."""
        return self.prefix + digest.hex().encode()

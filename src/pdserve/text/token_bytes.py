"""The bytes a token stands for, for the two decoders that the Llama family has.

A byte-level token spells each byte with a printable character; a SentencePiece token is plain text in which
U+2581 is a space, or ``<0x41>`` for a single byte. Either way the text of many tokens is the UTF-8 decoding of
their bytes, one behind the other, which is what makes incremental detokenising exact.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import ConfigError

_SPM_SPACE = "\u2581"


class DecoderKind(enum.StrEnum):
    """How a token spells its bytes."""

    BYTE_LEVEL = "byte_level"
    SENTENCE_PIECE = "sentence_piece"


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """Bytes from a token's spelling.

    Attributes:
        kind: how tokens spell bytes.
        strips_first_space: the text's first character is dropped if it is a space (SentencePiece puts one in
            front of the first word).
    """

    kind: DecoderKind
    strips_first_space: bool = False

    def to_bytes(self, token: str) -> bytes:
        """The bytes of a token of the model's vocabulary (added tokens are plain text)."""
        if self.kind is DecoderKind.SENTENCE_PIECE:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    pass
            return token.replace(_SPM_SPACE, " ").encode()
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()


def build_token_decoder(decoder: Mapping[str, Any] | None) -> TokenDecoder:
    """The decoder that the ``decoder`` section of a tokenizer.json describes.

    Raises:
        ConfigError: it is of another kind.
    """
    steps = list(decoder.get("decoders", [decoder])) if decoder else []
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return TokenDecoder(DecoderKind.BYTE_LEVEL)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return TokenDecoder(DecoderKind.SENTENCE_PIECE, any(_strips_first_space(step) for step in steps))
    found = ", ".join(sorted(str(kind) for kind in kinds)) or "none"
    raise ConfigError(
        f"tokenizer.json has a decoder of kind {found};"
        " supported are ByteLevel and SentencePiece (Replace, ByteFallback)"
    )


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return step.get("content") == " " and step.get("start", 0) > 0
    if step["type"] == "Metaspace":
        scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
        return bool(scheme != "never")
    return False


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable character for each byte (``bytes_to_unicode`` of its published encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    mapping = {chr(byte): byte for byte in printable}
    mapping.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return mapping


_BYTE_OF_CHARACTER = _byte_characters()

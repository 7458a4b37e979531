"""Token ids to text as they come: whole characters only, each token's work independent of what came before."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from pdserve.text.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """One stream's detokenizer.

    What the pushes and the flush return, put together, is the text of all pushed tokens: what `Tokenizer.decode`
    gives for prompt and output, less what it gives for the prompt. Bytes that are no character come out as U+FFFD
    as soon as that is certain, and the beginning of a character at the stream's end with `flush`.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what the output continues: a character may begin in it, and the first word's space
            (SentencePiece) stays when there is text before it.
        skip_special_tokens: leave special tokens out.
        shown_special_ids: but for these.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._shown = shown_special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._prompt_tail(prompt_token_ids)
        self._decoder.decode(tail)
        self._at_start = tokenizer.strips_first_space and not tail

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that ``token_ids`` complete."""
        return self._emit(b"".join(map(self._bytes, token_ids)))

    def flush(self) -> str:
        """What is left at the stream's end: U+FFFD if it ends within a character, else nothing."""
        return self._emit(b"", final=True)

    def _emit(self, content: bytes, final: bool = False) -> str:
        text = self._decoder.decode(content, final)
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def _bytes(self, token_id: int) -> bytes:
        if self._skips and self._tokenizer.is_special(token_id) and token_id not in self._shown:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _prompt_tail(self, token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes: enough to hold the beginning of a character."""
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        return tail

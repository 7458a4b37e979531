"""One answer's way from token ids to shown text: detokenising and stop strings, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.protocol import SamplingParams
from pdserve.text.detokenizer import IncrementalDetokenizer
from pdserve.text.stop_strings import StopChecker
from pdserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added to an answer.

    Attributes:
        text: to show now; text that may turn out to be a stop string waits.
        num_tokens_used: how many of the pushed tokens count: up to the one that completed a stop string.
        stop_string: the one that ended the answer; the rest of the tokens, and later ones, are not part of it.
        text_offsets: for each token that counts, where its text begins in the answer, in characters. A token
            within a character begins where the character does.
    """

    text: str
    num_tokens_used: int
    stop_string: str | None
    text_offsets: tuple[int, ...]


class TextStream:
    """Text of one answer; it lives as long as the answer, wherever its tokens come from.

    Args:
        tokenizer: the model's.
        prompt_token_ids: the prompt.
        sampling: ``stop``, ``include_stop_str_in_output``, ``min_tokens`` and ``skip_special_tokens`` count.
        shown_special_ids: special tokens that are shown even where others are left out.

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, sampling.skip_special_tokens, shown_special_ids
        )
        self._include = sampling.include_stop_str_in_output
        self._checker = StopChecker(sampling.stop, self._include) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._num_characters = 0

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """The next tokens of the answer.

        Args:
            token_ids: in order.
            ends_with_stop_token: the last one ended the answer (EOS or a stop token id): it counts, but is not
                shown unless the request includes what stopped it.
        """
        shown: list[str] = []
        offsets: list[int] = []
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            offsets.append(self._num_characters)
            if ends_with_stop_token and not self._include and index == len(token_ids) - 1:
                break
            text = self._detokenizer.push((token_id,))
            self._num_characters += len(text)
            text, stop_string = self._check(text)
            shown.append(text)
            if stop_string is not None:
                return TextDelta("".join(shown), index + 1, stop_string, tuple(offsets))
        return TextDelta("".join(shown), len(token_ids), None, tuple(offsets))

    def flush(self) -> str:
        """What still waits; called once when the answer ends without a stop string."""
        last = self._detokenizer.flush()
        if self._checker is None:
            return last
        return self._checker.flush() + last

    def _check(self, text: str) -> tuple[str, str | None]:
        # Text of the first min_tokens tokens never counts towards a stop string, not even its beginning.
        if self._checker is None or self._num_tokens <= self._min_tokens or not text:
            return text, None
        return self._checker.push(text)

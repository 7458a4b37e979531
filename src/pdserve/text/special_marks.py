"""Telling a chat template's own special tokens from the same spelling in a user's text.

The template's strings are marked before it runs: every special token in them gets a secret number on either side.
User text passes through the template untouched, whatever the template does to it (trim, split, replace, JSON). In
what the template renders, only a marked spelling is a special token; an unmarked one is text. A user cannot mark
anything, because the numbers are drawn at random when the process starts and never leave it, so this holds also
for text that a template takes apart and joins anew.

Some templates assemble a token around a value, as in ``'<|' + role + '|>'``. So a template string that ends with a
token's beginning, or begins with a token's end, is marked there too, and the pieces count when they meet.

The marks are digits: case changes, trimming, JSON and Unicode normalisation leave digits alone.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

_MARK_DIGITS = 40


class SpecialMarks:
    """The secret marks of one tokenizer's special tokens.

    Args:
        tokens: the special tokens' texts.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._open, self._close = _random_mark(), _random_mark()
        self._tokens = frozenset(tokens)
        alternatives = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)"
        self._token_pattern = re.compile(alternatives)
        self._mark_pattern = re.compile(f"{self._open}({alternatives}){self._close}|{self._open}|{self._close}")
        self._prefixes = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._suffixes = frozenset(token[start:] for token in tokens for start in range(1, len(token)))
        self._max_len = max(map(len, tokens), default=0)

    def wrap(self, token: str) -> str:
        """``token`` with its marks, where it is special; otherwise as it is."""
        return f"{self._open}{token}{self._close}" if token in self._tokens else token

    def mark(self, text: str) -> str:
        """Mark the special tokens, and the parts of some at either end, in a template's own string."""
        pieces: list[str] = []
        at = 0
        for match in self._token_pattern.finditer(text):
            pieces += [text[at : match.start()], self.wrap(match.group())]
            at = match.end()
        pieces.append(text[at:])
        pieces[0] = self._mark_head(pieces[0])
        pieces[-1] = self._mark_tail(pieces[-1])
        return "".join(pieces)

    def keep_tokens(self, rendered: str) -> str:
        """``rendered`` with marks left only where they enclose a whole special token."""
        return self._mark_pattern.sub(lambda match: match.group() if match.group(1) else "", rendered)

    def remove(self, text: str) -> str:
        """``text`` without any mark."""
        return text.replace(self._open, "").replace(self._close, "")

    def _mark_head(self, text: str) -> str:
        for end in range(min(len(text), self._max_len), 0, -1):
            if text[:end] in self._suffixes:
                return text[:end] + self._close + text[end:]
        return text

    def _mark_tail(self, text: str) -> str:
        for start in range(max(0, len(text) - self._max_len), len(text)):
            if text[start:] in self._prefixes:
                return text[:start] + self._open + text[start:]
        return text


def _random_mark() -> str:
    return "".join(secrets.choice("0123456789") for _ in range(_MARK_DIGITS))

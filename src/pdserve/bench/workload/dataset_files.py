"""Reads prompts from files: one a line, JSON Lines, or ShareGPT's JSON, which may be cut off at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError

_HUMAN = ("human", "user")
_ASSISTANT = ("gpt", "assistant", "chatgpt", "bing", "bard")


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt of a file.

    Attributes:
        prompt: its text; None where ``messages`` stand.
        messages: a conversation for the chat endpoint.
        max_tokens: the answer's length, where the file says it.
        reply: the answer that the file has, where it has one.
    """

    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    max_tokens: int | None = None
    reply: str | None = None


def read_prompts(path: Path) -> list[PromptRecord]:
    """Prompts of a ``.jsonl`` file (objects with ``prompt`` or ``messages``, and maybe ``max_tokens``), else lines.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is none of these; names the line.
    """
    lines = [(number, line) for number, line in enumerate(_read(path).splitlines(), 1) if line.strip()]
    if path.suffix == ".jsonl":
        records = [_parse_line(path, number, line) for number, line in lines]
    else:
        records = [PromptRecord(prompt=line) for _, line in lines]
    if not records:
        raise ConfigError(f"--prompts-file {path} holds no prompts")
    return records


def read_sharegpt(path: Path) -> tuple[list[PromptRecord], bool]:
    """The first question and answer of each conversation, and whether the file is cut off at its end.

    Raises:
        ConfigError: the file cannot be read, is not JSON of this form, or has no conversation with both.
    """
    text = _read(path)
    reader = _ArrayReader(path, text)
    records = [record for item in reader.read_objects() if (record := _first_turn(item)) is not None]
    if not records:
        raise ConfigError(f"--sharegpt {path} holds no conversation with a question and an answer")
    return records, reader.is_cut_off


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None


def _parse_line(path: Path, number: int, line: str) -> PromptRecord:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}, is not JSON: {error}") from None
    if not isinstance(item, dict):
        raise ConfigError(f"{path}, line {number}, is not a JSON object with a prompt or messages")
    prompt, messages, max_tokens = item.get("prompt"), item.get("messages"), item.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise ConfigError(f"{path}, line {number}: max_tokens is {max_tokens!r}; it must be a number above 0")
    if isinstance(prompt, str) and prompt and messages is None:
        return PromptRecord(prompt=prompt, max_tokens=max_tokens)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages) and prompt is None:
        return PromptRecord(messages=tuple(messages), max_tokens=max_tokens)
    raise ConfigError(f"{path}, line {number}, needs either a prompt (text) or messages (a list of objects)")


def _first_turn(item: Any) -> PromptRecord | None:
    turns = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    question, answer = turns[0].get("value"), turns[1].get("value")
    if turns[0].get("from") not in _HUMAN or turns[1].get("from") not in _ASSISTANT:
        return None
    if not (isinstance(question, str) and question.strip() and isinstance(answer, str) and answer.strip()):
        return None
    return PromptRecord(prompt=question, reply=answer)


class _ArrayReader:
    """Decodes the elements of a JSON array one by one, so that what stands before a cut-off end is not lost."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text
        self.is_cut_off = False

    def read_objects(self) -> Iterator[Any]:
        """Each element; stops where the file is cut off.

        Raises:
            ConfigError: the text is no array, or wrong in its middle.
        """
        position = self._skip_space(0)
        if position == len(self._text) or self._text[position] != "[":
            raise ConfigError(f"{self._path} is not ShareGPT's JSON: it does not begin with [")
        position = self._skip_space(position + 1)
        decoder = json.JSONDecoder()
        while position < len(self._text) and self._text[position] != "]":
            try:
                item, position = decoder.raw_decode(self._text, position)
            except json.JSONDecodeError as error:
                if not self._is_open(position):
                    raise ConfigError(f"{self._path} is not JSON: {error}") from None
                self.is_cut_off = True
                return
            yield item
            position = self._skip_space(position)
            if self._text[position : position + 1] == ",":
                position = self._skip_space(position + 1)
            elif self._text[position : position + 1] not in ("]", ""):
                raise ConfigError(f"{self._path} is not JSON: expected , or ] at character {position}")
        self.is_cut_off = position == len(self._text)

    def _skip_space(self, position: int) -> int:
        while position < len(self._text) and self._text[position] in " \t\r\n":
            position += 1
        return position

    def _is_open(self, start: int) -> bool:
        """Whether the element that begins at ``start`` has no end: the file stops inside it."""
        depth, in_string, position = 0, False, start
        while position < len(self._text):
            character = self._text[position]
            if in_string:
                if character == "\\":
                    position += 1
                elif character == '"':
                    in_string = False
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if depth <= 0:
                    return False
            position += 1
        return depth > 0

"""A model's tokenizer: text to token ids and back, with special tokens parsed only where they are meant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pdserve.errors import ConfigError, RequestError
from pdserve.text.special_marks import SpecialMarks
from pdserve.text.token_bytes import TokenDecoder, build_token_decoder


class Tokenizer:
    """Wraps the ``tokenizers`` library; safe to use from several threads. Built by `load_tokenizer`.

    Args:
        definition: the content of tokenizer.json.
        tokenizer_config: of tokenizer_config.json.
        model_config: of config.json.
        generation_config: of generation_config.json.

    Attributes:
        config: the content of tokenizer_config.json.
        marks: tells special tokens of a chat template from text; see `encode_marked`.
        vocab_size: rows of the model's embedding: valid ids are below it.
        bos_token_id: the token that begins a text, where the model has one.
        eos_token_ids: the tokens that end an answer.
        strips_first_space: a text's first character is dropped if it is a space (SentencePiece).
    """

    def __init__(
        self,
        definition: str,
        tokenizer_config: Mapping[str, Any],
        model_config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
    ) -> None:
        self.config = tokenizer_config
        self._parsing = _load(definition)
        self._added = self._parsing.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.marks = SpecialMarks([self._added[i].content for i in self._special_ids])
        self._plain, self._id_of_alias = self._build_plain(definition)
        self._decoder: TokenDecoder = build_token_decoder(json.loads(definition).get("decoder"))
        self.strips_first_space = self._decoder.strips_first_space
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = int(model_config.get("vocab_size") or self._parsing.get_vocab_size())
        self.bos_token_id = self._special_token_id("bos_token", model_config, generation_config)
        self.eos_token_ids = _as_ids(generation_config, model_config)
        if not self.eos_token_ids:
            fallback = self._special_token_id("eos_token")
            self.eos_token_ids = [] if fallback is None else [fallback]
        self._prefix, self._suffix = self._surrounding_tokens()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text: what spells a special token stays text.

        Args:
            text: from a user.
            add_special_tokens: put BOS in front (and EOS behind) if the model's own configuration says so.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        ids = self._encode(self._plain, text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_with_special(self, text: str) -> list[int]:
        """Token ids of text whose special tokens are meant as such; adds none. Never for a user's text.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        return self._encode(self._parsing, text)

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of text in which only what ``marks`` marked is a special token; adds none.

        Equal to `encode_with_special` of the text without marks, where all special tokens in it are marked.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        ids = self._encode(self._plain, self.marks.keep_tokens(text))
        return [self._id_of_alias.get(token_id, token_id) for token_id in ids]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        content = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        text = content.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, perhaps part of a character; empty for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """One token as logprobs show it; part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without a token."""
        return self._parsing.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._parsing.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token (BOS, end of turn, ...) rather than text."""
        return token_id in self._special_ids

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self.id_to_token(token_id)
        return b"" if token is None else self._decoder.to_bytes(token)

    def _build_plain(self, definition: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer that parses no special token but the marked ones, and what those stand for.

        Each special token gets a marked alias with the same whitespace rules, so that the library itself cuts the
        text around it and words beside it come out as they do beside the token itself. (A token that only counts
        between spaces, ``single_word``, counts wherever a template writes it.)
        """
        plain = _load(definition)
        plain.encode_special_tokens = True
        id_of_alias: dict[int, int] = {}
        aliases = []
        for token_id in sorted(self._special_ids):
            token = self._added[token_id]
            aliases.append(
                tokenizers.AddedToken(
                    self.marks.wrap(token.content),
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
            )
        plain.add_tokens(aliases)
        for token_id, alias in zip(sorted(self._special_ids), aliases, strict=True):
            alias_id = plain.token_to_id(alias.content)
            if alias_id is not None:
                id_of_alias[alias_id] = token_id
        return plain, id_of_alias

    @staticmethod
    def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from error
        return tokenizer.encode(text, add_special_tokens=False).ids

    def _special_token_id(self, name: str, *configs: Mapping[str, Any]) -> int | None:
        """Id of ``bos_token`` and the like: as tokenizer_config.json spells it, else from the other files."""
        value = self.config.get(name)
        token = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(token, str):
            return self.token_to_id(token)
        ids = _as_ids(*configs, key=f"{name}_id")
        return ids[0] if ids else None

    def _surrounding_tokens(self) -> tuple[list[int], list[int]]:
        """What goes before and behind a text: the post-processor's tokens, unless the configuration says else."""
        bare = self._parsing.encode("a", add_special_tokens=False).ids
        full = self._parsing.encode("a", add_special_tokens=True).ids
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        prefix, suffix = full[:start], full[start + len(bare) :]
        for flag, name, place in (("add_bos_token", "bos_token", prefix), ("add_eos_token", "eos_token", suffix)):
            wanted, token_id = self.config.get(flag), self._special_token_id(name)
            if isinstance(wanted, bool) and token_id is not None:
                place[:] = [token_id] if wanted else [i for i in place if i != token_id]
        return prefix, suffix


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory (or one that `pdserve.checkpoint.prepare_tokenizer` made).

    Raises:
        ConfigError: tokenizer.json is missing, damaged, or of a kind that is not supported.
    """
    path = directory / "tokenizer.json"
    try:
        definition = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"model directory {directory} has no tokenizer.json: make one with transformers"
            " (`AutoTokenizer.from_pretrained(directory).save_pretrained(directory)`)"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    configs = [
        _read_json(directory / name) for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    ]
    try:
        return Tokenizer(definition, *configs)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def _load(definition: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:
        # The library raises the bare class for whatever it cannot read.
        raise ConfigError(f"the tokenizers library cannot read it: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; an absent file is an empty one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def _as_ids(*configs: Mapping[str, Any], key: str = "eos_token_id") -> list[int]:
    """All ids that ``configs`` have under ``key``, a number or a list of them, without repeats."""
    ids: list[int] = []
    for config in configs:
        value = config.get(key)
        ids += value if isinstance(value, Sequence) else [] if value is None else [value]
    return list(dict.fromkeys(ids))

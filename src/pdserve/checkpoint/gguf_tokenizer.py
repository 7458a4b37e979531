"""A GGUF file's vocabulary as ``tokenizer.json`` and ``tokenizer_config.json``.

Built from the file's own metadata: byte-level BPE (``gpt2``) with the pre-tokenizer the file names, and
SentencePiece BPE (``llama``) with byte fallback. Tokens of type CONTROL and UNKNOWN become special tokens, those
of type USER_DEFINED added tokens that plain text may spell.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pdserve.checkpoint.gguf_config import token_ids
from pdserve.checkpoint.gguf_file import GGUFFile
from pdserve.checkpoint.pre_tokenizers import SUPPORTED_PRE_TOKENIZERS, PreTokenizerKind, get_pre_tokenizer
from pdserve.checkpoint.spm_merges import build_spm_merges
from pdserve.errors import ConfigError

_log = logging.getLogger(__name__)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPM_SPACE = "\u2581"


@dataclass(frozen=True)
class _Vocabulary:
    """The file's tokens and their types, checked to be of one length."""

    tokens: list[str]
    types: list[int]

    def ids_of(self, *types: int) -> list[int]:
        """Token ids of these types, in order."""
        return [i for i, kind in enumerate(self.types) if kind in types]


def build_tokenizer(gguf: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and the content of ``tokenizer_config.json`` beside it.

    Raises:
        ConfigError: the tokenizer's model or pre-tokenizer is not supported, or the vocabulary is damaged.
    """
    vocabulary = _read_vocabulary(gguf)
    model = gguf.require("tokenizer.ggml.model", str)
    if model == "gpt2":
        kind = _pre_tokenizer_kind(gguf)
        tokenizer, adds_bos = _build_bpe(gguf, vocabulary, kind), kind.adds_bos
    elif model == "llama":
        tokenizer, adds_bos = _build_spm(gguf, vocabulary), True
    else:
        raise ConfigError(
            f"{gguf.path}: tokenizer {model!r} is not supported; supported are gpt2 (BPE) and llama (SPM)"
        )
    _add_tokens(tokenizer, vocabulary)
    config = _build_config(gguf, vocabulary, adds_bos)
    _set_post_processor(tokenizer, config)
    return tokenizer, config


def _read_vocabulary(gguf: GGUFFile) -> _Vocabulary:
    tokens = gguf.require("tokenizer.ggml.tokens", list)
    types = gguf.get("tokenizer.ggml.token_type", list) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"{gguf.path}: {len(tokens)} tokens and {len(types)} token types; the file is damaged")
    return _Vocabulary(tokens, types)


def _pre_tokenizer_kind(gguf: GGUFFile) -> PreTokenizerKind:
    name = gguf.get("tokenizer.ggml.pre", str)
    if name is None:
        _log.warning("%s does not name its pre-tokenizer; the default may cut words wrongly", gguf.path)
        name = "default"
    kind = get_pre_tokenizer(name)
    if kind is None:
        known = ", ".join(SUPPORTED_PRE_TOKENIZERS)
        raise ConfigError(f"{gguf.path}: pre-tokenizer {name!r} is not supported; supported are {known}")
    return kind


def _build_bpe(gguf: GGUFFile, vocabulary: _Vocabulary, kind: PreTokenizerKind) -> Tokenizer:
    merges = _read_merges(gguf, vocabulary)
    tokenizer = _new_bpe(vocabulary, merges, ignore_merges=kind.ignore_merges)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(gguf: GGUFFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    known = set(vocabulary.tokens)
    merges = []
    for merge in gguf.require("tokenizer.ggml.merges", list):
        left, _, right = str(merge).partition(" ")
        if not (left in known and right in known and left + right in known):
            raise ConfigError(f"{gguf.path}: merge {merge!r} does not fit its vocabulary; the file is damaged")
        merges.append((left, right))
    return merges


def _build_spm(gguf: GGUFFile, vocabulary: _Vocabulary) -> Tokenizer:
    scores = gguf.require("tokenizer.ggml.scores", list)
    if len(scores) != len(vocabulary.tokens):
        raise ConfigError(f"{gguf.path}: {len(vocabulary.tokens)} tokens and {len(scores)} scores; the file is damaged")
    # Control tokens and raw bytes stay out of the merges, so no text can spell its way into one.
    mergeable = vocabulary.ids_of(_NORMAL, _USER_DEFINED)
    merges = build_spm_merges({vocabulary.tokens[i]: scores[i] for i in mergeable})
    unknown = vocabulary.ids_of(_UNKNOWN)
    tokenizer = _new_bpe(
        vocabulary,
        merges,
        unk_token=vocabulary.tokens[unknown[0]] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    adds_space = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps: list[Any] = [normalizers.Prepend(_SPM_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPM_SPACE)])
    undo: list[Any] = [decoders.Replace(_SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _new_bpe(vocabulary: _Vocabulary, merges: list[Any], **options: Any) -> Tokenizer:
    # Where two ids spell the same token, the first one is the text's.
    vocab = {token: i for i, token in reversed(list(enumerate(vocabulary.tokens)))}
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    special = [
        AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in vocabulary.ids_of(_CONTROL, _UNKNOWN)
    ]
    plain = [
        AddedToken(vocabulary.tokens[i], special=False, normalized=False) for i in vocabulary.ids_of(_USER_DEFINED)
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _set_post_processor(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Let the tokenizer itself add BOS and EOS where ``config`` says so, for whoever loads it without us."""
    names = {name: config.get(f"{name}_token") if config[f"add_{name}_token"] else None for name in ("bos", "eos")}
    used = [token for token in names.values() if token is not None]
    if used:
        parts = [names["bos"], "$A", names["eos"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in parts if part is not None],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in used],
        )


def _build_config(gguf: GGUFFile, vocabulary: _Vocabulary, adds_bos: bool) -> dict[str, Any]:
    ids = token_ids(gguf)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": gguf.get("tokenizer.ggml.add_bos_token", bool, adds_bos),
        "add_eos_token": gguf.get("tokenizer.ggml.add_eos_token", bool, False),
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos", "eos", "pad"):
        token_id = ids[f"{name}_token_id"]
        first = token_id[0] if isinstance(token_id, list) else token_id
        if first is not None:
            config[f"{name}_token"] = vocabulary.tokens[first]
    template = gguf.get("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = _chat_templates(gguf, template)
    return config


def _chat_templates(gguf: GGUFFile, default: str) -> str | list[dict[str, str]]:
    """The template, or a list of named ones where the file has several."""
    names = gguf.get("tokenizer.chat_templates", list, [])
    named = {name: gguf.get(f"tokenizer.chat_template.{name}", str) for name in names if name != "default"}
    others = [{"name": name, "template": text} for name, text in named.items() if text is not None]
    return [{"name": "default", "template": default}, *others] if others else default

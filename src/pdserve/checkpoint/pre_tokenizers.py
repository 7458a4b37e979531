"""The pre-tokenizers that a GGUF file names: how text is cut into words before byte-pair merging.

A kind is a list of patterns applied one after the other; what lies between matches is a word too. The names are
those of llama.cpp's ``tokenizer.ggml.pre``; the patterns are the models' own published ones.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """How text becomes words.

    Attributes:
        patterns: applied in order, each to the words the one before left.
        ignore_merges: a word that is itself a token is taken whole.
        adds_bos: whether BOS begins a text where the file says nothing of it.
        nfc: whether the model's tokenizer composes characters first (NFC).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


_KINDS = {
    "default": PreTokenizerKind(_DEFAULT),
    "gpt-2": PreTokenizerKind((_GPT2,)),
    "smollm": PreTokenizerKind((r"\p{N}", _GPT2)),
    "llama-bpe": PreTokenizerKind((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "qwen2": PreTokenizerKind((_QWEN2,), nfc=True),
    "tekken": PreTokenizerKind((_TEKKEN,), ignore_merges=True, adds_bos=True),
}
_ALIASES = {
    "olmo": "gpt-2",
    "phi-2": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "pixtral": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}
SUPPORTED_PRE_TOKENIZERS = tuple(sorted((*_KINDS, *_ALIASES)))


def get_pre_tokenizer(name: str) -> PreTokenizerKind | None:
    """The kind that ``tokenizer.ggml.pre`` names, or None where it is not known."""
    return _KINDS.get(_ALIASES.get(name, name))

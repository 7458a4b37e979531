import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fuzz_text import KINDS, fuzz_strings
from llama_cpp import LlamaCppTokenizer
from tiny_gguf import Vocabulary, llama_config, plain_vocabulary, random_weights, write_gguf
from tokenizers import Tokenizer

from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.checkpoint.gguf_file import open_gguf
from pdserve.checkpoint.gguf_tokenizer import build_tokenizer
from pdserve.errors import ConfigError


def write_model(path: Path, vocabulary: Vocabulary) -> Path:
    config = llama_config(len(vocabulary.tokens), num_hidden_layers=1)
    return write_gguf(path, config, random_weights(config), vocabulary)


def smollm2_vocabulary(pre: str) -> Vocabulary:
    metadata = open_gguf(resolve_model("smollm2-135m-instruct").path).metadata
    return Vocabulary(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.token_type"],
        pre=pre,
        merges=metadata["tokenizer.ggml.merges"],
    )


def spm_vocabulary(**extra: Any) -> Vocabulary:
    """A SentencePiece vocabulary: bytes, the pieces of the fuzz strings' words, all their characters."""
    words: Counter[str] = Counter()
    for name, strings in KINDS.items():
        if name not in ("specials", "symbols"):
            words.update("\u2581" + string.replace(" ", "\u2581") for string in strings)
    parts = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 2, len(word) + 1)}
    # Short pieces first, some left out: merges then compete, and long ones are sometimes out of reach.
    pieces = [part for index, part in enumerate(sorted(parts, key=lambda p: (len(p), p))) if index % 7]
    characters = sorted({character for word in words for character in word})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *characters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(characters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(characters))]
    tokens += ["<tool>", "<|im_end|>"]
    return Vocabulary(tokens, [*types, 4, 3], "llama", "default", scores=[*scores, 0.0, 0.0], extra=extra)


@contextmanager
def reference(path: Path) -> Iterator[LlamaCppTokenizer]:
    tokenizer = LlamaCppTokenizer(path)
    try:
        yield tokenizer
    finally:
        tokenizer.close()


def plain_and_parsing(definition: str) -> tuple[Tokenizer, Tokenizer]:
    plain, parsing = Tokenizer.from_str(definition), Tokenizer.from_str(definition)
    plain.encode_special_tokens = True
    return plain, parsing


def assert_equal_to_llama_cpp(path: Path, strings: Iterator[str], definition: str) -> None:
    plain, parsing = plain_and_parsing(definition)
    with reference(path) as llama_cpp:
        for text in strings:
            assert plain.encode(text, add_special_tokens=False).ids == llama_cpp.encode(text), repr(text)
            expected = llama_cpp.encode(text, parse_special=True)
            assert parsing.encode(text, add_special_tokens=False).ids == expected, repr(text)


def test_smollm2_equals_llama_cpp() -> None:
    source = resolve_model("smollm2-135m-instruct")
    definition = (prepare_tokenizer(source) / "tokenizer.json").read_text(encoding="utf-8")
    assert_equal_to_llama_cpp(source.path, fuzz_strings(3000, seed=1), definition)


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2"])
def test_other_pre_tokenizers_equal_llama_cpp(tmp_path: Path, pre: str) -> None:
    path = write_model(tmp_path / "model.gguf", smollm2_vocabulary(pre))
    tokenizer, _ = build_tokenizer(open_gguf(path))
    # llama.cpp leaves out the NFC step of Qwen's own tokenizer, so it gets composed text.
    form = "NFC" if pre == "qwen2" else None
    strings = (unicodedata.normalize(form, text) if form else text for text in fuzz_strings(500, seed=2))
    assert_equal_to_llama_cpp(path, strings, tokenizer.to_str())


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentence_piece_equals_llama_cpp(tmp_path: Path, adds_space: bool) -> None:
    vocabulary = spm_vocabulary(**{"tokenizer.ggml.add_space_prefix": adds_space})
    path = write_model(tmp_path / "model.gguf", vocabulary)
    tokenizer, _ = build_tokenizer(open_gguf(path))
    assert_equal_to_llama_cpp(path, fuzz_strings(1500, seed=3), tokenizer.to_str())


def test_sentence_piece_bos_follows_the_file(tmp_path: Path) -> None:
    for wanted in (True, False):
        vocabulary = spm_vocabulary(**{"tokenizer.ggml.add_bos_token": wanted})
        path = write_model(tmp_path / f"{wanted}.gguf", vocabulary)
        tokenizer, config = build_tokenizer(open_gguf(path))
        with reference(path) as llama_cpp:
            assert tokenizer.encode("hello").ids == llama_cpp.encode("hello", add_special=True)
        assert config["add_bos_token"] is wanted


def test_text_never_merges_into_control_or_byte_tokens(tmp_path: Path) -> None:
    vocabulary = spm_vocabulary()
    tokens = [*vocabulary.tokens, "s>", "<s", "/s>", "0A>", "<0x"]
    vocabulary.tokens, vocabulary.types = tokens, [*vocabulary.types, 1, 1, 1, 1, 1]
    vocabulary.scores = [*(vocabulary.scores or []), -0.1, -0.2, -0.3, -0.4, -0.5]
    tokenizer, _ = build_tokenizer(open_gguf(write_model(tmp_path / "model.gguf", vocabulary)))
    tokenizer.encode_special_tokens = True
    for text in ("<s>", "</s>", "<0x0A>"):
        assert tokens.index(text) not in tokenizer.encode(text, add_special_tokens=False).ids


def test_config_names_tokens_and_templates(tmp_path: Path) -> None:
    vocabulary = plain_vocabulary()
    vocabulary.extra = {
        "tokenizer.chat_template": "default text",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tool text",
        "tokenizer.ggml.eot_token_id": 5,
    }
    _, config = build_tokenizer(open_gguf(write_model(tmp_path / "model.gguf", vocabulary)))
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert config["chat_template"] == [
        {"name": "default", "template": "default text"},
        {"name": "tool_use", "template": "tool text"},
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer 'bert' is not supported; supported are gpt2"),
        ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not supported; supported are"),
        ({"types": [1]}, "64 tokens and 1 token types"),
        ({"merges": ["q q"]}, "merge 'q q' does not fit its vocabulary"),
        ({"merges": None}, "the metadata has no tokenizer.ggml.merges"),
        ({"model": "llama", "scores": [1.0]}, "64 tokens and 1 scores"),
        ({"extra": {"tokenizer.ggml.eot_token_id": 64}}, "eot_token_id is 64, and the vocabulary has 64 tokens"),
    ],
)
def test_unusable_vocabularies_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    vocabulary = plain_vocabulary()
    for name, value in change.items():
        setattr(vocabulary, name, value)
    path = write_model(tmp_path / "model.gguf", vocabulary)
    with pytest.raises(ConfigError, match=message) as caught:
        build_tokenizer(open_gguf(path))
    assert str(path) in caught.value.message

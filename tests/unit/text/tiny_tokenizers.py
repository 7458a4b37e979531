"""Tokenizer directories of other kinds than SmolLM2's, small enough to read."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPM_SPACE = "\u2581"


def write_spm(directory: Path, **config: Any) -> Path:
    """Llama 2's kind: a space before the first word, byte fallback, BOS by the post-processor."""
    words = [f"{SPM_SPACE}hello", f"{SPM_SPACE}world", SPM_SPACE, *"helowrd", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPM_SPACE), normalizers.Replace(" ", SPM_SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:3]])
    return _write(directory, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", **config})


def write_byte_level(directory: Path, special: list[AddedToken], plain: list[AddedToken], **config: Any) -> Path:
    """Single bytes and the given added tokens."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return _write(directory, tokenizer, config)


def _write(directory: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    return directory

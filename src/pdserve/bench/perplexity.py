"""``pdserve bench perplexity``: how well a model predicts a text, and what quantised weights cost it.

Perplexity is the exponential of the mean negative log-likelihood of a token given those before it. The text is cut
into windows that know nothing of one another; a window's first token is not predicted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from pdserve.bench.show.results import check_writable, write_results
from pdserve.bench.show.settings import OutputSettings
from pdserve.bench.show.tables import MISSING, format_table
from pdserve.checkpoint import prepare_tokenizer, prepare_weights, resolve_model
from pdserve.engine.config import CacheSettings, ModelSettings
from pdserve.engine.kv_memory import TORCH_DTYPES
from pdserve.engine.models import CausalLM, load_model
from pdserve.errors import ConfigError
from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.registry import NOT_QUANTIZED, get_backend
from pdserve.settings import load_settings, section, setting
from pdserve.text import load_tokenizer

_LOGIT_ROWS = 128
"""Tokens whose logits stand in memory at once."""


@dataclass(frozen=True)
class TextSettings:
    """What is to be predicted."""

    text: str | None = setting(None, help="a plain text in UTF-8", metavar="PATH")
    window_tokens: int = setting(1024, help="tokens that are predicted from one another", minimum=2)
    max_windows: int = setting(16, help="windows to read, from the beginning of the text", minimum=1)


@dataclass(frozen=True)
class PerplexityConfig:
    """All settings of ``pdserve bench perplexity``."""

    text: TextSettings = field(default_factory=TextSettings)
    model: ModelSettings = section(
        ModelSettings,
        exclude=(
            *("served_model_name", "max_model_len", "device"),
            *("tensor_parallel_size", "pipeline_parallel_size", "worker_timeout_s"),
        ),
    )
    output: OutputSettings = field(default_factory=OutputSettings)


def run(argv: Sequence[str]) -> int:
    """Measure and print; quantised weights beside those that are not.

    Raises:
        ConfigError: a setting is wrong, the model is not there, or the text is too short.
    """
    config = load_settings(
        PerplexityConfig,
        prog="pdserve bench perplexity",
        description="How well a model predicts a text, and what quantised weights cost it.",
        examples=[
            "pdserve bench perplexity --text book.txt",
            "pdserve bench perplexity --text book.txt --quantization w8a8",
        ],
        argv=argv,
    )
    check_writable(config.output.output, "--output")
    windows = _read_windows(config)
    kinds = dict.fromkeys((NOT_QUANTIZED, config.model.quantization))
    results = {kind: _measure(dataclasses.replace(config.model, quantization=kind), windows, config) for kind in kinds}
    print(_render(config, windows, results))
    write_results(config.output.output, "perplexity", config, {"perplexity": results})
    return 0


def compute_negative_log_likelihood(model: CausalLM, window_T: Tensor) -> float:
    """The sum over all tokens of ``window_T`` [T] int64 but the first, in nats."""
    num_tokens, config, block_size = len(window_T), model.config, CacheSettings.block_size
    num_blocks = -(-num_tokens // block_size)
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
    metadata = AttentionMetadata.build([num_tokens], [num_tokens], [list(range(num_blocks))], block_size)
    hidden_TD = model.forward(window_T, metadata, torch.zeros(shape, dtype=model.backend.dtype))
    parts = zip(torch.split(hidden_TD[:-1], _LOGIT_ROWS), torch.split(window_T[1:], _LOGIT_ROWS), strict=True)
    return sum(
        float(functional.cross_entropy(model.compute_logits(rows), next_ids, reduction="sum"))
        for rows, next_ids in parts
    )


def _read_windows(config: PerplexityConfig) -> list[Tensor]:
    settings = config.text
    if settings.text is None:
        raise ConfigError("--text is missing: name a plain text file")
    try:
        text = Path(settings.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {settings.text} cannot be read: {error}") from error
    tokenizer = load_tokenizer(prepare_tokenizer(resolve_model(config.model.model)))
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
    windows = [part for part in torch.split(ids, settings.window_tokens) if len(part) == settings.window_tokens]
    if not windows:
        raise ConfigError(
            f"--text {settings.text} has {len(ids)} tokens; a window has {settings.window_tokens} (--window-tokens)"
        )
    return windows[: settings.max_windows]


def _measure(model: ModelSettings, windows: Sequence[Tensor], config: PerplexityConfig) -> float:
    torch.set_num_threads(model.num_threads or 1)
    dtype = TORCH_DTYPES[model.dtype]
    directory = prepare_weights(resolve_model(model.model), model.dtype)
    loaded = load_model(directory, dtype, get_backend(model.kernel_backend, dtype, model.quantization))
    longest = loaded.config.max_position_embeddings
    if config.text.window_tokens > longest:
        raise ConfigError(f"--window-tokens is {config.text.window_tokens}; this model takes up to {longest}")
    bar = tqdm(windows, desc=model.quantization, disable=None if config.output.progress else True)
    total = sum(compute_negative_log_likelihood(loaded, window) for window in bar)
    return math.exp(total / (len(windows) * (config.text.window_tokens - 1)))


def _render(config: PerplexityConfig, windows: Sequence[Tensor], results: dict[str, float]) -> str:
    plain = results[NOT_QUANTIZED]
    rows = [["quantization", "perplexity", "loss"]]
    for kind, value in results.items():
        rows.append([kind, f"{value:.4f}", MISSING if kind == NOT_QUANTIZED else f"{value / plain - 1:+.2%}"])
    title = (
        f"{config.model.model} in {config.model.dtype} on {len(windows)} windows of {config.text.window_tokens} tokens"
        f" of {config.text.text}:"
    )
    return f"{title}\n\n{format_table(rows)}"

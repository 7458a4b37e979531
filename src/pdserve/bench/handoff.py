"""``pdserve bench handoff``: what each connector takes to hand KV over, beside one memcpy of the same bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from pdserve.bench.measure.ratios import compare_rounds
from pdserve.bench.show.results import check_writable, write_results
from pdserve.bench.show.settings import OutputSettings
from pdserve.bench.show.tables import MISSING, format_number, format_table
from pdserve.bench.transfers.bench import HandOff, TransferBench
from pdserve.bench.transfers.engine import BareEngine, HandOffError
from pdserve.bench.transfers.producer import Producer
from pdserve.bench.transfers.surroundings import CONNECTORS, find_hindrance
from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.engine.config import CacheSettings, ModelSettings
from pdserve.engine.models.config import ModelConfig
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec
from pdserve.settings import load_settings, setting

_WARM_UPS = 2


@dataclass(frozen=True)
class HandoffSettings:
    """Which connectors, and what they move."""

    connectors: list[str] = setting(
        list(CONNECTORS), help=f"any of {', '.join(CONNECTORS)}; what cannot run here is left out", metavar="NAME"
    )
    prompt_tokens: list[str] = setting(["128", "1000", "4000"], help="lengths of prompts", metavar="TOKENS")
    repeats: int = setting(7, help="times that each connector hands over a prompt of each length", minimum=1)
    model: str = setting(ModelSettings.model, help="the model whose KV's shape is moved, as for pdserve up")
    dtype: str = setting("bfloat16", choices=("bfloat16", "float32"), help="dtype of the KV")
    block_size: int = setting(CacheSettings.block_size, help="tokens in a KV block", minimum=1)
    poll_ms: float = setting(
        0.1, help="pause between two steps in which an engine has nothing to compute", minimum=0, metavar="MS"
    )
    seed: int = setting(0, help="equal seeds give equal prompts", minimum=0)


@dataclass(frozen=True)
class HandoffConfig:
    """All settings of ``pdserve bench handoff``."""

    handoff: HandoffSettings = field(default_factory=HandoffSettings)
    output: OutputSettings = field(default_factory=OutputSettings)


def run(argv: Sequence[str]) -> int:
    """Measure and print.

    Raises:
        ConfigError: a setting is wrong, or something that a connector needs does not start.
    """
    config = load_settings(
        HandoffConfig,
        prog="pdserve bench handoff",
        description="Hand prompts' KV from one process to another with each connector, and compare with one memcpy.",
        examples=[
            "pdserve bench handoff",
            "pdserve bench handoff --connectors nixl redis --prompt-tokens 4000 --repeats 20",
        ],
        argv=argv,
    )
    check_writable(config.output.output, "--output")
    lengths = _read_lengths(config.handoff.prompt_tokens)
    names = _choose_connectors(config.handoff.connectors)
    spec = _build_spec(config.handoff)
    with contextlib.ExitStack() as stack:
        poll_s = config.handoff.poll_ms / 1000
        bench = TransferBench(spec, max(lengths), poll_s=poll_s, seed=config.handoff.seed)
        pairs = {name: stack.enter_context(bench.pair(name)) for name in names}
        results, lost = _measure(bench, pairs, lengths, config)
    for num_tokens in lengths:
        print(f"{_render(num_tokens, spec, {name: results[name, num_tokens] for name in names})}\n")
    for line in lost:
        print(line, file=sys.stderr)
    write_results(config.output.output, "handoff", config, _describe(results))
    return 1 if lost else 0


def _measure(
    bench: TransferBench,
    pairs: Mapping[str, tuple[Producer, BareEngine]],
    lengths: Sequence[int],
    config: HandoffConfig,
) -> tuple[dict[tuple[str, int], list[HandOff]], list[str]]:
    """Every connector in turn, again and again; what did not get through, in words."""
    results: dict[tuple[str, int], list[HandOff]] = {(name, length): [] for name in pairs for length in lengths}
    lost: list[str] = []
    repeats = config.handoff.repeats
    bar = tqdm(range(-_WARM_UPS, repeats), desc="handoff", disable=None if config.output.progress else True)
    for repeat in bar:
        for num_tokens in lengths:
            for name, (producer, consumer) in pairs.items():
                try:
                    result = bench.hand_over(producer, consumer, num_tokens)
                except HandOffError as error:
                    lost.append(f"lost: {name}, {num_tokens} tokens: {error}")
                    continue
                if repeat >= 0:
                    results[name, num_tokens].append(result)
    return results, lost


def _read_lengths(texts: Sequence[str]) -> list[int]:
    for text in texts:
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"--prompt-tokens: {text!r} is no number of tokens")
    if not texts:
        raise ConfigError("--prompt-tokens: give at least one length")
    return sorted({int(text) for text in texts})


def _choose_connectors(names: Sequence[str]) -> list[str]:
    """Those that can be measured here; says which others cannot, and why."""
    chosen = []
    for name in names:
        if name not in CONNECTORS:
            raise ConfigError(f"--connectors: {name!r} is none of {', '.join(CONNECTORS)}")
        hindrance = find_hindrance(name)
        if hindrance is None:
            chosen.append(name)
        else:
            print(f"{name} is left out: {hindrance}", file=sys.stderr)
    if not chosen:
        raise ConfigError("none of the connectors can be measured here")
    return chosen


def _build_spec(settings: HandoffSettings) -> KVCacheSpec:
    config = ModelConfig.from_directory(prepare_tokenizer(resolve_model(settings.model)))
    return KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        dtype=settings.dtype,
    )


def _render(num_tokens: int, spec: KVCacheSpec, results: Mapping[str, Sequence[HandOff]]) -> str:
    num_blocks = spec.num_blocks_for(num_tokens)
    num_bytes = num_blocks * spec.block_bytes
    rows = [["ms", "save", "load", "both", "memcpy", "both / memcpy", "at best", "GB/s"]]
    rows += [_render_row(name, num_bytes, hand_offs) for name, hand_offs in results.items() if hand_offs]
    title = f"{num_tokens} prompt tokens: {num_blocks} blocks, {format_number(num_bytes / 1e6)} MB"
    return f"{title}\n\n{format_table(rows)}"


def _render_row(name: str, num_bytes: int, hand_offs: Sequence[HandOff]) -> list[str]:
    """Medians; at best = the quickest hand-off over the quickest copy, which a busy machine disturbs least."""
    columns = [
        [one.save_s for one in hand_offs],
        [one.load_s for one in hand_offs],
        both := [one.both_s for one in hand_offs],
        copies := [one.memcpy_s for one in hand_offs],
    ]
    ratio = compare_rounds(copies, both, is_more_better=False)
    return [
        name,
        *(f"{statistics.median(column) * 1e3:.2f}" for column in columns),
        MISSING if ratio is None else f"{ratio.median:.1f} x",
        f"{min(both) / min(copies):.1f} x",
        format_number(num_bytes / statistics.median(both) / 1e9),
    ]


def _describe(results: Mapping[tuple[str, int], Sequence[HandOff]]) -> dict[str, Any]:
    return {
        "hand_offs": [
            {"connector": name, "num_prompt_tokens": num_tokens, **dataclasses.asdict(one)}
            for (name, num_tokens), hand_offs in results.items()
            for one in hand_offs
        ]
    }

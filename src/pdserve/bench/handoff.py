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
from pdserve.bench.transfers.engine import BareEngine, Chunks, HandOffError
from pdserve.bench.transfers.producer import Producer
from pdserve.bench.transfers.surroundings import CONNECTORS, find_hindrance
from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.engine.config import CacheSettings, ModelSettings, SchedulerSettings
from pdserve.engine.models.config import ModelConfig
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec
from pdserve.settings import load_settings, setting

_WARM_UPS = 2
_AS_SERVED = "as-served"
_AT_ONCE = "at-once"


@dataclass(frozen=True)
class HandoffSettings:
    """Which connectors, and what they move."""

    connectors: list[str] = setting(
        list(CONNECTORS), help=f"any of {', '.join(CONNECTORS)}; what cannot run here is left out", metavar="NAME"
    )
    prompt_tokens: list[str] = setting(["128", "1000", "4000"], help="lengths of prompts", metavar="TOKENS")
    ways: list[str] = setting(
        [_AS_SERVED, _AT_ONCE],
        help="as-served: prompts are computed in chunks, and saved beside computing; at-once: in one step, in no time",
        metavar="WAY",
    )
    chunk_tokens: int = setting(
        SchedulerSettings.max_num_batched_tokens,
        help="tokens of a chunk, as served: an engine's token budget",
        minimum=1,
    )
    prefill_tokens_per_s: float = setting(
        800.0, help="as served, how fast prompts are computed", minimum=1, metavar="TOKENS"
    )
    full_stores: bool = setting(
        True, help="stores are full and evict, as after a long time, instead of taking new memory for each block"
    )
    repeats: int = setting(7, help="times that each connector hands over a prompt of each length", minimum=1)
    model: str = setting(ModelSettings.model, help="the model whose KV's shape is moved, as for pdserve up")
    dtype: str = setting("bfloat16", choices=("bfloat16", "float32"), help="dtype of the KV")
    block_size: int = setting(CacheSettings.block_size, help="tokens in a KV block", minimum=1)
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
    ways = _read_ways(config.handoff.ways)
    names = _choose_connectors(config.handoff.connectors)
    spec = _build_spec(config.handoff)
    with contextlib.ExitStack() as stack:
        bench = TransferBench(
            spec,
            max(lengths),
            has_full_stores=config.handoff.full_stores,
            seed=config.handoff.seed,
        )
        pairs = {name: stack.enter_context(bench.pair(name)) for name in names}
        works = [_Work(num_tokens, way) for num_tokens in lengths for way in ways]
        results, lost = _measure(bench, pairs, works, config)
    for work in works:
        print(f"{_render(work, spec, {name: results[name, work] for name in names})}\n")
    for line in lost:
        print(line, file=sys.stderr)
    write_results(config.output.output, "handoff", config, _describe(results))
    return 1 if lost else 0


@dataclass(frozen=True, slots=True)
class _Work:
    """A length of prompts, and how they are computed."""

    num_tokens: int
    way: str

    def get_chunks(self, settings: HandoffSettings) -> Chunks:
        if self.way == _AT_ONCE:
            return Chunks(self.num_tokens)
        return Chunks(settings.chunk_tokens, settings.prefill_tokens_per_s)


_Results = dict[tuple[str, _Work], list[HandOff]]


def _measure(
    bench: TransferBench,
    pairs: Mapping[str, tuple[Producer, BareEngine]],
    works: Sequence[_Work],
    config: HandoffConfig,
) -> tuple[_Results, list[str]]:
    """Every connector in turn, again and again; what did not get through, in words."""
    results: _Results = {(name, work): [] for name in pairs for work in works}
    lost: list[str] = []
    repeats = config.handoff.repeats
    bar = tqdm(range(-_WARM_UPS, repeats), desc="handoff", disable=None if config.output.progress else True)
    for repeat in bar:
        for work in works:
            for name, (producer, consumer) in pairs.items():
                try:
                    result = bench.hand_over(producer, consumer, work.num_tokens, work.get_chunks(config.handoff))
                except HandOffError as error:
                    lost.append(f"lost: {name}, {work.num_tokens} tokens {work.way}: {error}")
                    continue
                if repeat >= 0:
                    results[name, work].append(result)
    return results, lost


def _read_ways(ways: Sequence[str]) -> list[str]:
    for way in ways:
        if way not in (_AS_SERVED, _AT_ONCE):
            raise ConfigError(f"--ways: {way!r} is none of {_AS_SERVED}, {_AT_ONCE}")
    if not ways:
        raise ConfigError("--ways: give at least one")
    return list(dict.fromkeys(ways))


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


def _render(work: _Work, spec: KVCacheSpec, results: Mapping[str, Sequence[HandOff]]) -> str:
    num_blocks = spec.num_blocks_for(work.num_tokens)
    num_bytes = num_blocks * spec.block_bytes
    rows = [["ms", "save", "load", "both", "memcpy", "both / memcpy", "at best", "GB/s"]]
    rows += [_render_row(name, num_bytes, hand_offs) for name, hand_offs in results.items() if hand_offs]
    title = f"{work.num_tokens} prompt tokens {work.way}: {num_blocks} blocks, {format_number(num_bytes / 1e6)} MB"
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


def _describe(results: _Results) -> dict[str, Any]:
    return {
        "hand_offs": [
            {"connector": name, "num_prompt_tokens": work.num_tokens, "way": work.way, **dataclasses.asdict(one)}
            for (name, work), hand_offs in results.items()
            for one in hand_offs
        ]
    }

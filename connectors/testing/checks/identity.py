"""R13, R14 and R16: whose KV it is."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import msgspec

from pdserve.connectors.base import ConnectorStats
from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Level, Need, check, collect_checks
from pdserve.connectors.testing.checks.recovery import require_recovery
from pdserve.connectors.testing.counters import copy_stats, get_growth
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec
from pdserve.protocol import KVTransferParams, Role

STORE = (*TRANSFER, Need.STORE)
DIRECT = (*TRANSFER, Need.DIRECT)
_NUM_KV_HEADS = 4


@check("R13")
def other_numbers_of_heads_are_exact_or_refused(bench: Bench) -> None:
    """Ranks of different tensor-parallel sizes hold other heads: no KV crosses, and a load that fails says why."""
    for family, (size_there, size_here) in enumerate(itertools.permutations((1, 2, 4), 2)):
        there = msgspec.structs.replace(bench.spec, num_kv_heads=_NUM_KV_HEADS // size_there)
        here = msgspec.structs.replace(bench.spec, num_kv_heads=_NUM_KV_HEADS // size_here)
        difference = f"tensor-parallel size {size_there} there and {size_here} here"
        _require_strangers(bench, there, here, family, difference)


@check("R13")
def every_pair_is_exact_or_refused(bench: Bench) -> None:
    """Twelve shapes, block sizes by dtypes by tensor-parallel sizes: equal ones exchange KV, all others refuse."""
    specs = [
        msgspec.structs.replace(
            bench.spec, block_size=block_size, dtype=dtype, num_kv_heads=_NUM_KV_HEADS // tensor_parallel_size
        )
        for block_size in (4, 8)
        for dtype in ("bfloat16", "float32")
        for tensor_parallel_size in (1, 2, 4)
    ]
    consumers = [_build_unless_refused(bench, Role.DECODE, spec) for spec in specs]
    for there, spec in enumerate(specs):
        producer = _build_unless_refused(bench, Role.PREFILL, spec)
        for here, consumer in enumerate(consumers):
            if producer is not None and consumer is not None:
                _exchange(bench, producer, consumer, family=len(specs) * there + here)
        if producer is not None:
            bench.stop(producer)


@check("R13", needs=(*TRANSFER, Need.RANKS))
def every_pair_of_parallel_sizes_is_exact_or_refused(bench: Bench) -> None:
    """Ranks that share the heads by 1, 2 or 3, or the layers by 2: equal sizes exchange KV, all others refuse."""
    spec = msgspec.structs.replace(bench.spec, num_kv_heads=6)
    sizes = ((1, 1), (2, 1), (3, 1), (1, 2))
    consumers = [_build_unless_refused(bench, Role.DECODE, spec, parallel) for parallel in sizes]
    for there, parallel in enumerate(sizes):
        producer = _build_unless_refused(bench, Role.PREFILL, spec, parallel)
        for here, consumer in enumerate(consumers):
            if producer is not None and consumer is not None:
                _exchange(bench, producer, consumer, family=len(sizes) * there + here)
        if producer is not None:
            bench.stop(producer)


@check("R14")
def other_shapes_never_meet(bench: Bench) -> None:
    """Other dtypes, block sizes, layers, head sizes or layout versions are other identities."""
    changes: tuple[dict[str, Any], ...] = (
        {"dtype": "float32"},
        {"block_size": 8},
        {"block_size": 2},
        {"num_layers": 3},
        {"head_dim": 8},
        {"layout_version": bench.spec.layout_version + 1},
    )
    for family, change in enumerate(changes):
        other = msgspec.structs.replace(bench.spec, **change)
        _require_strangers(bench, bench.spec, other, family, f"another {next(iter(change))} here")


@check("R14", level=Level.FAULTS)
def other_versions_of_the_connector_are_exact_or_refused(bench: Bench) -> None:
    """A producer of another version, for consumers of its shape and of others: exact or refused; one's own works on."""
    holds = Need.HOLD.is_met(bench.target.features, composes=bench.target.composes)
    changes: tuple[dict[str, Any], ...] = ({}, {"dtype": "float32"}, {"block_size": 8}, {"num_kv_heads": 1})
    producer = bench.build_producer()
    consumers = [bench.build_consumer(spec=msgspec.structs.replace(bench.spec, **change)) for change in changes]
    for family, consumer in enumerate(consumers):
        prompt = bench.make_prompt(3 * bench.block_size + 1, family)
        with bench.blaming():
            with bench.target.other_version():
                params = bench.hand_over(producer, prompt)
                if holds:
                    bench.fetch(consumer, prompt, params)
            if not holds:
                bench.fetch(consumer, prompt, params)
    require_recovery(bench, producer, consumers[0], "another version was met")


@check("R14")
def other_weights_never_meet(bench: Bench) -> None:
    """Two models, or two revisions of one, share a store and know nothing of each other."""
    producer = bench.build_producer(weights="revision-1")
    consumer = bench.build_consumer(weights="revision-2")
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    _require_nothing(bench, consumer, prompt, bench.hand_over(producer, prompt), "other weights here")


@check("R14")
def salts_and_adapters_never_meet(bench: Bench) -> None:
    """Equal prompts with another cache salt or adapter are other prompts."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt, salt="mine")
    for salt, adapter in (("", ""), ("yours", ""), ("", "mine"), ("mine", "another")):
        with bench.blaming():
            found = bench.fetch(consumer, prompt, None, salt=salt, adapter=adapter)
        bench.require(found == 0, f"KV with salt 'mine' went to a request with salt {salt!r}, adapter {adapter!r}")
    found = bench.fetch(consumer, prompt, params, salt="mine")
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived under the same salt", "R2")


@check("R14", needs=DIRECT)
def parameters_are_good_for_one_prompt(bench: Bench) -> None:
    """Parameters that come with another prompt, or another salt, than they were made for bring no KV."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(3 * size)
    other = [*prompt[: 2 * size], *bench.make_prompt(size, family=3)]
    for token_ids, salt in ((other, ""), (prompt, "yours")):
        params = bench.hand_over(producer, prompt)
        with bench.blaming():
            request_id, promised = bench.start_load(consumer, token_ids, params, salt=salt)
            good = bench.wait_for_load(consumer, request_id) if promised else 0
            consumer.finish(request_id)
        shared = 2 * size if token_ids is other else 0
        bench.require(good <= shared, f"{good} tokens are said to be good, {shared} are shared")


@check("R16")
def equal_request_ids_do_not_collide(bench: Bench) -> None:
    """Two engines, and one after a restart, may use one request id for different prompts."""
    engines = [bench.build_producer("first"), bench.build_producer("second")]
    consumer = bench.build_consumer()
    offers: list[tuple[list[int], KVTransferParams]] = []
    for family, engine in enumerate(engines):
        _offer(bench, engine, family, offers)
    for (prompt, params), engine in zip(offers, engines, strict=True):
        with bench.blaming():
            found = bench.fetch(consumer, prompt, params)
        bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived from {engine.context.engine_id}")
    bench.stop(engines[0])
    _offer(bench, bench.build_producer("first"), 2, offers)
    with bench.blaming():
        bench.fetch(consumer, *offers[-1])
    transfer_ids = [params.transfer_id for _, params in offers]
    bench.require(len(set(transfer_ids)) == len(offers), f"transfer ids repeat: {transfer_ids}")


@check("R16", needs=DIRECT)
def a_transfer_is_good_for_one_load(bench: Bench) -> None:
    """Parameters that were used before bring nothing."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size + 1)
    name = bench.make_name()
    params = bench.hand_over(producer, prompt, name=name)
    bench.fetch(consumer, prompt, params)
    bench.wait_for_send(producer, name)
    with bench.blaming(covers_garbage=True):
        request_id, promised = bench.start_load(consumer, prompt, params)
        good = bench.wait_for_load(consumer, request_id) if promised else 0
    bench.require(good == 0, f"a spent transfer brought {good} tokens")


def _offer(bench: Bench, engine: EngineHarness, family: int, offers: list[tuple[list[int], KVTransferParams]]) -> None:
    prompt = bench.make_prompt(2 * bench.block_size + 1, family)
    params = bench.hand_over(engine, prompt, name="same-id")
    bench.require(params is not None, "a hand-off was computed, but nothing is offered", "R10")
    if params is not None:
        offers.append((prompt, params))


def _build_unless_refused(
    bench: Bench, role: Role, spec: KVCacheSpec, parallel: tuple[int, int] = (1, 1)
) -> EngineHarness | None:
    """None, and a reason, when the connector will have nothing to do with the shape."""
    try:
        return bench.build_engine(role, f"{role.value}-{spec}-{parallel}", spec=spec, parallel=parallel)
    except ConfigError as refusal:
        bench.require(bool(refusal.message), f"refused at start without a reason: {spec}, {parallel}")
        return None


def _exchange(bench: Bench, producer: EngineHarness, consumer: EngineHarness, family: int) -> None:
    """One cell of the matrix, with a prompt of its own."""
    there, here = producer.context, consumer.context
    difference = here.identity.explain_difference(there.identity)
    prompt = bench.make_prompt(19, family)
    params = bench.hand_over(producer, prompt)
    if not difference:
        rule = "R2" if here.rank.size == 1 else "R12"
        with contextlib.nullcontext() if here.rank.size == 1 else bench.blaming(rule):
            found = bench.fetch(consumer, prompt, params)
        bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens went between two of {here.spec}", rule)
        return
    is_same_share = there.spec.num_kv_heads == here.spec.num_kv_heads and there.rank == here.rank
    rule = "R14" if is_same_share else "R13"
    before = copy_stats(consumer.stats)
    consumer.received.clear()
    with bench.blaming(rule, covers_garbage=True):
        found = bench.fetch(consumer, prompt, params)
    bench.require(found == 0, f"{found} tokens went to a stranger: {difference}", rule)
    _require_reason(bench, consumer, before, difference)


def _require_strangers(bench: Bench, there: KVCacheSpec, here: KVCacheSpec, family: int, difference: str) -> None:
    producer, consumer = (
        _build_unless_refused(bench, role, spec) for role, spec in ((Role.PREFILL, there), (Role.DECODE, here))
    )
    if producer is None or consumer is None:
        return
    prompt = bench.make_prompt(33, family)
    _require_nothing(bench, consumer, prompt, bench.hand_over(producer, prompt), difference)
    _require_reason(bench, consumer, ConnectorStats(), difference)
    bench.stop(producer)
    bench.stop(consumer)


def _require_reason(bench: Bench, consumer: EngineHarness, before: ConnectorStats, difference: str) -> None:
    """A load that fails counts why. Where KV goes by keys there is none: other keys are a plain miss."""
    has_reason = bool(get_growth(before, consumer.stats).failures)
    bench.require(
        has_reason or not consumer.received, f"a load failed, and no kind of failure was counted: {difference}", "R13"
    )


def _require_nothing(
    bench: Bench, consumer: EngineHarness, prompt: list[int], params: KVTransferParams | None, difference: str
) -> None:
    """With the parameters and without: nothing arrives, and nothing hangs."""
    for given in (params, None):
        with bench.blaming(covers_garbage=True):
            found = bench.fetch(consumer, prompt, given)
        bench.require(found == 0, f"{found} tokens were taken from a stranger: {difference}")


CHECKS = collect_checks(globals())

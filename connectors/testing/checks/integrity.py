"""R21 and R22: bytes that were damaged, and messages that came from outside."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Level, Need, check, collect_checks
from pdserve.connectors.testing.checks.recovery import require_recovery
from pdserve.connectors.testing.faults.link import Damage
from pdserve.connectors.testing.faults.peer_process import PeerProcess
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.connectors.testing.violations import RuleViolationError
from pdserve.kv_layout import BlockKey
from pdserve.protocol import KVTransferParams

STORE = (*TRANSFER, Need.STORE)
DIRECT = (*TRANSFER, Need.DIRECT)
_BAD = 2
_MAX_PARAMS_BYTES = 64 << 10
_NUM_OFFSETS = 12


@check("R21", needs=STORE, level=Level.FAULTS)
def a_truncated_entry_is_a_miss(bench: Bench) -> None:
    """Cut anywhere, an entry counts as absent, unless its KV comes exact all the same; the next save replaces it."""
    _require_no_harm(bench, [("cut to {} bytes", lambda data, at: data[:at])])


@check("R21", needs=STORE, level=Level.FAULTS)
def a_flipped_bit_is_a_miss(bench: Bench) -> None:
    """One wrong bit anywhere, in the KV or in what stands around it, never reaches an engine."""
    _require_no_harm(bench, [("a bit flipped at byte {}", _flip)])


@check("R21", needs=STORE, level=Level.FAULTS)
def a_torn_entry_is_a_miss(bench: Bench) -> None:
    """An entry whose end is zeros, as after a crash of the machine, or that is too long, brings exact KV or none."""
    _require_no_harm(
        bench,
        [
            ("zeros from byte {} on", lambda data, at: data[:at] + bytes(len(data) - at)),
            ("junk behind its end ({})", lambda data, at: data + b"junk" * (1 + at % 3)),
        ],
    )


@check("R21", needs=STORE, level=Level.FAULTS)
def another_blocks_entry_is_a_miss(bench: Bench) -> None:
    """A whole, sound entry of another key, or of another model, in the place of one brings no KV."""
    producer, stranger = bench.build_producer(), bench.build_producer("stranger", weights="other")
    consumer = bench.build_consumer()
    prompt = bench.make_prompt(4 * bench.block_size + 1)
    bench.hand_over(stranger, prompt)
    for engine, index in ((producer, 1), (stranger, _BAD)):
        bench.hand_over(producer, prompt)
        other = bench.blocks.read(bench.build_keys(engine, prompt)[index])
        key = bench.build_keys(producer, prompt)[_BAD]
        _load_damaged(bench, consumer, prompt, key, other or b"", "another entry's content")


@check("R21", needs=STORE)
def a_half_written_entry_is_never_seen(bench: Bench) -> None:
    """Looked for at every moment of a save, an entry is absent or whole: no load of it ever fails."""
    producer, consumer = bench.build_producer(num_blocks=128), bench.build_consumer(num_blocks=128)
    prompt = bench.make_prompt(16 * bench.block_size)
    request_id = bench.make_name()
    producer.submit(request_id, prompt)
    producer.admit(request_id, 0)
    for _ in range(8):
        producer.step({request_id: 2 * bench.block_size})
        _require_whole_loads(bench, consumer, prompt)
    decision = producer.finish(request_id, handoff=True)
    for _ in range(20):
        producer.step()
        _require_whole_loads(bench, consumer, prompt)
    if decision.expects_sent:
        bench.wait_for_send(producer, request_id)
    _require_whole_loads(bench, consumer, prompt)


@check("R21", needs=STORE, level=Level.FAULTS)
def a_writer_killed_half_way_leaves_no_damage(bench: Bench) -> None:
    """A producer's process is killed while it saves: what is promised afterwards is whole."""
    consumer = bench.build_consumer(num_blocks=256)
    prompt = bench.make_prompt(200 * bench.block_size)
    with PeerProcess(bench, "peer", num_blocks=256) as peer:
        peer.begin(prompt)
        peer.kill()
    with bench.blaming():
        request_id, promised = bench.start_load(consumer, prompt, None)
        good = bench.wait_for_load(consumer, request_id) if promised else 0
    bench.require(good == promised, f"{promised} tokens are promised, {good} of them are good")


@check("R21", level=Level.FAULTS)
def bytes_damaged_on_their_way_are_refused(bench: Bench) -> None:
    """KV that arrives with a flipped bit is a reported failure, and the next transfer is sound."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt)
    with bench.target.bad_link(Damage.FLIP), bench.blaming():
        found = bench.fetch(consumer, prompt, params)
    bench.require(found < len(prompt), f"all {found} tokens passed although bits were flipped")
    with bench.blaming():
        require_recovery(bench, producer, consumer, "bits were flipped")


@check("R22", needs=(Need.SAVE,))
def messages_are_plain_data(bench: Bench) -> None:
    """A step's message and a hand-off's parameters go through msgpack, and the parameters are small."""
    producer, consumer = bench.build_producer(num_blocks=512), bench.build_consumer(num_blocks=256)
    prompt = bench.make_prompt(200 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt)
    num_bytes = len(_require_plain(params, "a hand-off's parameters"))
    saved = bench.make_name()
    producer.submit(saved, prompt)
    producer.admit(saved, 0)
    _require_plain(producer.build_metadata({saved: len(prompt)}), "a saving step's message")
    bench.start_load(consumer, prompt[:-1], params)
    _require_plain(consumer.build_metadata({}), "a loading step's message")
    bench.stop(producer)
    bench.stop(consumer)
    bench.require(num_bytes <= _MAX_PARAMS_BYTES, f"parameters for 201 blocks take {num_bytes} bytes")


@check("R22")
def nothing_is_pickled(bench: Bench) -> None:
    """No transfer pickles or unpickles anything."""
    with _pickle_forbidden():
        producer, consumer = bench.build_producer(), bench.build_consumer()
        prompt = bench.make_prompt(3 * bench.block_size + 1)
        bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))


@check("R22", level=Level.FAULTS)
def made_up_parameters_bring_no_foreign_kv(bench: Bench) -> None:
    """Whatever stands in the parameters, a consumer gets exact KV or none, and lives."""
    producer, consumer = bench.build_producer(num_blocks=512), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    bench.hand_over(producer, bench.make_prompt(len(prompt), family=9))
    bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))
    for forge in _build_forgeries(bench.hand_over(producer, prompt)):
        params = bench.hand_over(producer, prompt)
        with bench.blaming(covers_garbage=True):
            bench.fetch(consumer, prompt, None if params is None else forge(params))
    with bench.blaming():
        found = bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrive after forged parameters")


def _require_no_harm(bench: Bench, damages: list[tuple[str, Callable[[bytes, int], bytes]]]) -> None:
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(4 * bench.block_size + 1)
    key = bench.build_keys(producer, prompt)[_BAD]
    bench.hand_over(producer, prompt)
    size = len(bench.blocks.read(key) or b"")
    offsets = sorted({0, 1, size - 1, *range(0, size, max(size // _NUM_OFFSETS, 1))})
    for words, damage in damages:
        for offset in offsets:
            entry = bench.blocks.read(key) or b""
            _load_damaged(bench, consumer, prompt, key, damage(entry, offset), words.format(offset))
            bench.hand_over(producer, prompt)
            with bench.blaming():
                found = bench.fetch(consumer, prompt, None)
            bench.require(found == len(prompt), "a damaged entry was not replaced by the next save")


def _load_damaged(
    bench: Bench, consumer: EngineHarness, prompt: list[int], key: BlockKey, data: bytes, words: str
) -> None:
    """Damage one entry between lookup and load.

    The harness compares every token that is said to be good with the model's. That a store did not see the damage, or
    has mended it from a tier of its own, is its good right.
    """
    request_id, promised = bench.start_load(consumer, prompt, None)
    bench.blocks.write(key, data)
    try:
        with bench.blaming():
            if promised:
                bench.wait_for_load(consumer, request_id)
    except RuleViolationError as violation:
        raise RuleViolationError(violation.rule, f"an entry with {words} passed: {violation.message}") from violation
    consumer.finish(request_id)


def _require_whole_loads(bench: Bench, consumer: EngineHarness, prompt: list[int]) -> None:
    request_id, promised = bench.start_load(consumer, prompt, None)
    with bench.blaming():
        good = bench.wait_for_load(consumer, request_id, [consumer]) if promised else 0
    bench.require(good == promised, f"{promised} tokens were promised during a save, {good} arrived")
    consumer.finish(request_id)


def _flip(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :]


def _require_plain(message: Any, words: str) -> bytes:
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise RuleViolationError("R22", f"{words} is not plain data: {error}") from error


def _build_forgeries(params: KVTransferParams | None) -> list[Callable[[KVTransferParams], KVTransferParams]]:
    """Ways to change one value in parameters like these."""
    changes: list[dict[str, Any]] = [
        {"transfer_id": "made-up"},
        {"engine_id": "made-up"},
        {"connector": "made-up"},
        {"num_tokens": 1 << 40, "num_bytes": -1},
        {"payload": {}},
    ]
    forgeries: list[Callable[[KVTransferParams], KVTransferParams]] = [
        functools.partial(msgspec.structs.replace, **change) for change in changes
    ]
    for name, value in (params.payload if params else {}).items():
        forgeries += [functools.partial(_forge_payload, name, index) for index in range(len(_forge_value(value)))]
    return forgeries


def _forge_payload(name: str, index: int, params: KVTransferParams) -> KVTransferParams:
    forged = _forge_value(params.payload[name])
    return msgspec.structs.replace(params, payload={**params.payload, name: forged[min(index, len(forged) - 1)]})


def _forge_value(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value, None]
        case int() | float():
            return [value + 1, -1, 1 << 40, None]
        case str():
            return ["", value[1:], value + value, None]
        case bytes():
            return [b"", value[1:], value + value, None]
        case list():
            return [[], value + value, value[::-1], [[1 << 40]], None]
        case _:
            return [None, "made-up"]


@contextmanager
def _pickle_forbidden() -> Iterator[None]:
    """Inside, pickling in this process is a breach, whichever way the module was imported."""
    is_watching = [True]

    def watch(event: str, _: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" and is_watching:
            raise RuleViolationError("R22", "something was unpickled")

    def refuse(*_: Any, **__: Any) -> None:
        raise RuleViolationError("R22", "something was pickled")

    sys.addaudithook(watch)  # stays for good, so it goes blind at the end
    try:
        with mock.patch.multiple(pickle, dumps=refuse, loads=refuse, dump=refuse, load=refuse):
            yield
    finally:
        is_watching.clear()


CHECKS = collect_checks(globals())

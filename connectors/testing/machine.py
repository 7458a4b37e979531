"""Any order of events, with a dictionary as the model: a Hypothesis state machine over a connector's whole lifecycle.

The model knows which blocks a store must hold, which of them were damaged, and which hand-offs are still good for one
load. A composition of a store with something direct is held to its hand-offs, and may know the rest: nobody waits for
its store's writes. The harness watches what is left by itself: foreign bytes, reports that nobody waits for, writes to
free blocks.
Hypothesis looks for the shortest sequence of events that breaks something, and tells it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.target import ConformanceTarget, StoredBlocks
from pdserve.connectors.testing.violations import RuleViolationError
from pdserve.kv_layout import BlockKey
from pdserve.protocol import KVTransferParams

RULE = "R9"

_FAMILIES = st.integers(0, 1)
_LENGTHS = st.integers(1, 18)
_NUMBERS = st.integers(0, 99)
_NUM_BLOCKS = 512


@dataclass
class _Offer:
    """A hand-off that a consumer may come for."""

    prompt: list[int]
    params: KVTransferParams | None


class LifecycleMachine(RuleBasedStateMachine):
    """Two engines and the events between them.

    Args:
        target: the connector under test.
        patience: how long to wait for what should come.
    """

    def __init__(self, target: ConformanceTarget, patience: Patience) -> None:
        super().__init__()
        self._bench = Bench(target, RULE, patience)
        self._is_store = target.features.is_store
        self._is_direct = self._bench.is_direct
        self._stored_blocks: StoredBlocks | None = target.blocks
        self._producer = self._bench.build_producer(num_blocks=_NUM_BLOCKS)
        self._consumer = self._bench.build_consumer(num_blocks=_NUM_BLOCKS)
        self._is_good: dict[BlockKey, bool] = {}
        self._offers: list[_Offer] = []
        self._prompts: list[list[int]] = []

    # --- events ---------------------------------------------------------------------------------------------

    @rule(family=_FAMILIES, length=_LENGTHS, chunk=st.integers(1, 20))
    def hand_over(self, family: int, length: int, chunk: int) -> None:
        """A prompt is computed in chunks and offered."""
        prompt = self._bench.make_prompt(length, family)
        self._note_offer(prompt, self._bench.hand_over(self._producer, prompt, chunk=chunk))

    @rule(family=_FAMILIES, length=_LENGTHS, num_computed=st.integers(0, 18), preempts=st.booleans())
    def abort_a_prefill(self, family: int, length: int, num_computed: int, preempts: bool) -> None:
        """A prompt's computation is broken off, perhaps after a preemption."""
        prompt = self._bench.make_prompt(length, family)
        request_id = self._start_prefill(prompt, min(num_computed, length))
        if preempts:
            self._producer.step(preempted=[request_id])
        self._producer.finish(request_id)
        self._note_saved(prompt, min(num_computed, length), is_announced=False)

    @rule(family=_FAMILIES, length=_LENGTHS, num_computed=st.integers(1, 18))
    def preempt_a_prefill(self, family: int, length: int, num_computed: int) -> None:
        """A prompt loses its blocks half way, is computed again and offered."""
        prompt = self._bench.make_prompt(length, family)
        request_id = self._start_prefill(prompt, min(num_computed, length))
        self._producer.step(preempted=[request_id])
        self._producer.lookup(request_id)
        self._producer.admit(request_id, 0)
        self._producer.step({request_id: length})
        decision = self._producer.finish(request_id, handoff=True)
        if decision.announce_when_sent:
            self._bench.wait_for_send(self._producer, request_id)
        self._note_offer(prompt, decision.kv_transfer_params)

    @precondition(lambda self: self._offers)
    @rule(number=_NUMBERS, num_local=st.integers(0, 4), num_failed=st.integers(0, 2), keeps=st.integers(0, 9))
    def fetch_an_offer(self, number: int, num_local: int, num_failed: int, keeps: int) -> None:
        """A consumer comes for a hand-off; allocation may fail first, and less than promised may be taken."""
        offer = self._offers.pop(number % len(self._offers))
        self._fetch(offer.prompt, offer.params, num_local, num_failed, keeps)

    @rule(family=_FAMILIES, length=_LENGTHS, num_local=st.integers(0, 4))
    def fetch_without_an_offer(self, family: int, length: int, num_local: int) -> None:
        """A prompt arrives that perhaps nobody handed over."""
        self._fetch(self._bench.make_prompt(length, family), None, num_local, 0, 0)

    @precondition(lambda self: self._prompts)
    @rule(number=_NUMBERS, num_local=st.integers(0, 2))
    def fetch_again(self, number: int, num_local: int) -> None:
        """A prompt arrives that was handed over before, without parameters."""
        self._fetch(self._prompts[number % len(self._prompts)], None, num_local, 0, 0)

    @precondition(lambda self: self._offers)
    @rule(number=_NUMBERS, num_steps=st.integers(-1, 2))
    def abort_a_load(self, number: int, num_steps: int) -> None:
        """A consumer's request ends before its load does, or before it began."""
        offer = self._offers.pop(number % len(self._offers))
        request_id = self._bench.submit(self._consumer, offer.prompt, offer.params).request_id
        if num_steps >= 0:
            self._consumer.admit(request_id, self._bench.look_up(self._consumer, request_id))
            for _ in range(num_steps):
                self._bench.step_all()
        self._consumer.finish(request_id)
        self._wait_for_loads()
        self._note_damage_found(self._keys(offer.prompt))

    @precondition(lambda self: self._stored_blocks is not None and self._is_good)
    @rule(number=_NUMBERS)
    def evict(self, number: int) -> None:
        """A block goes from the store."""
        key = list(self._is_good)[number % len(self._is_good)]
        del self._is_good[key]
        self._delete(key)

    @precondition(lambda self: self._stored_blocks is not None and any(self._is_good.values()))
    @rule(number=_NUMBERS, share=st.integers(0, 999))
    def damage(self, number: int, share: int) -> None:
        """A bit of a stored block flips."""
        sound = [key for key, is_good in self._is_good.items() if is_good]
        key = sound[number % len(sound)]
        data = self._stored_blocks.read(key) if self._stored_blocks else None
        if data and self._stored_blocks:
            offset = len(data) * share // 1000
            self._stored_blocks.write(key, data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :])
            self._is_good[key] = False

    @rule()
    def restart_the_consumer(self) -> None:
        """The decode engine is replaced; hand-offs stay good."""
        self._bench.stop(self._consumer)
        self._consumer = self._bench.build_consumer(num_blocks=_NUM_BLOCKS)

    @rule()
    def restart_the_producer(self) -> None:
        """The prefill engine is replaced; what it held is gone, what it stored is not."""
        self._bench.stop(self._producer)
        self._producer = self._bench.build_producer(num_blocks=_NUM_BLOCKS)
        if not self._is_store:
            self._offers.clear()

    @rule(num_steps=st.integers(1, 5))
    def idle(self, num_steps: int) -> None:
        """Nothing is computed for a while."""
        self._bench.pass_steps(num_steps)

    # --- what must hold -------------------------------------------------------------------------------------

    @invariant()
    def held_blocks_are_transfers_under_way(self) -> None:
        """No engine keeps blocks that no transfer needs."""
        self._wait_for_loads()
        self._bench.require(self._consumer.num_used_blocks == 0, "the consumer keeps blocks of ended requests")
        if self._is_store:
            self._bench.require(self._producer.num_used_blocks == 0, "the producer keeps blocks of ended requests")

    def teardown(self) -> None:
        """Called by Hypothesis at an example's end."""
        self._bench.close()

    # --- the model ------------------------------------------------------------------------------------------

    def _keys(self, prompt: Sequence[int]) -> list[BlockKey]:
        return self._bench.build_keys(self._producer, prompt)

    def _note_offer(self, prompt: list[int], params: KVTransferParams | None) -> None:
        self._offers.append(_Offer(prompt, params))
        self._prompts.append(prompt)
        self._note_saved(prompt, len(prompt), is_announced=True)

    def _note_saved(self, prompt: list[int], num_computed: int, *, is_announced: bool) -> None:
        """What is there is not written again, damaged or not."""
        if self._is_direct:
            return
        ends = itertools.accumulate(key.num_tokens for key in self._keys(prompt))
        saved = [key for key, end in zip(self._keys(prompt), ends, strict=True) if end <= num_computed]
        if not is_announced:
            self._bench.run_until(
                lambda: self._producer.owed_sends <= self._producer.held_request_ids,
                "a report is owed for an aborted request",
                "R9",
            )
            self._wait_for_unheard_writes(saved)
        for key in saved:
            self._is_good.setdefault(key, True)

    def _wait_for_unheard_writes(self, keys: Sequence[BlockKey]) -> None:
        """Nobody is told when an aborted request's writes end: look until they have."""
        if self._stored_blocks is None:
            self._bench.pass_steps(3)
            return
        is_saved = self._bench.target.is_saved
        self._bench.run_until(lambda: all(map(is_saved, keys)), "a block was never saved", "R6")

    def _start_prefill(self, prompt: list[int], num_computed: int) -> str:
        request_id = self._bench.make_name()
        self._producer.submit(request_id, prompt)
        self._producer.admit(request_id, 0)
        if num_computed:
            self._producer.step({request_id: num_computed})
        return request_id

    def _fetch(
        self, prompt: list[int], params: KVTransferParams | None, num_local_blocks: int, num_failed: int, keeps: int
    ) -> None:
        size = self._bench.block_size
        num_local = min(num_local_blocks, len(prompt) // size) * size
        request_id = self._bench.submit(self._consumer, prompt, params).request_id
        for _ in range(num_failed + 1):
            promised = self._bench.look_up(self._consumer, request_id, num_local)
        self._require_promise(prompt, params, num_local, promised)
        taken = max(promised - keeps % size, 0)
        self._consumer.admit(request_id, taken, num_local)
        good = self._bench.wait_for_load(self._consumer, request_id) if taken else 0
        self._require_good(prompt, num_local, taken, good)
        self._consumer.finish(request_id)
        self._note_damage_found(self._keys(prompt)[num_local // size :])

    def _require_promise(
        self, prompt: list[int], params: KVTransferParams | None, num_local: int, promised: int
    ) -> None:
        whole = len(prompt) - num_local
        if not self._is_store and (self._is_direct or params is not None):
            expected = 0 if params is None else whole
            self._bench.require(promised == expected, f"{promised} tokens are promised instead of {expected}")
            return
        keys = self._keys(prompt)[num_local // self._bench.block_size :]
        present = _count_run(keys, self._is_good.keys())
        self._bench.require(promised <= present, f"{promised} tokens are promised, {present} are there")
        if self._is_store and all(self._is_good.get(key, True) for key in keys):
            self._bench.require(promised == present, f"{promised} tokens are promised of {present} that are there")

    def _require_good(self, prompt: list[int], num_local: int, taken: int, good: int) -> None:
        keys = self._keys(prompt)[num_local // self._bench.block_size :]
        limit = taken
        if not self._is_direct:
            limit = min(taken, _count_run(keys, {key for key, is_good in self._is_good.items() if is_good}))
        self._bench.require(good == limit, f"{good} tokens of {taken} arrived, {limit} are sound")

    def _note_damage_found(self, keys: Sequence[BlockKey]) -> None:
        """Whether a load that met damage removed it is the connector's own affair: the next event starts clean."""
        for key in itertools.takewhile(self._is_good.__contains__, keys):
            if not self._is_good[key]:
                del self._is_good[key]
                self._delete(key)

    def _delete(self, key: BlockKey) -> None:
        if self._stored_blocks is not None and self._stored_blocks.read(key) is not None:
            self._stored_blocks.delete(key)

    def _wait_for_loads(self) -> None:
        self._bench.run_until(lambda: not self._consumer.loading_request_ids, "a load was never reported", "R9")


def run_machine(
    target: ConformanceTarget, patience: Patience, *, num_examples: int, num_steps: int, shrinks: bool = True
) -> None:
    """Try many sequences of events.

    Args:
        target: the connector under test.
        patience: how long to wait for what should come.
        num_examples: sequences to try.
        num_steps: events in each.
        shrinks: look for the shortest sequence; otherwise the first is told.

    Raises:
        RuleViolationError: one of them breaks something; the message ends with such a sequence.
    """
    how = settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )

    class Machine(LifecycleMachine):
        def __init__(self) -> None:
            super().__init__(target, patience)

    try:
        run_state_machine_as_test(Machine, settings=how)
    except RuleViolationError as violation:
        notes = " ".join(getattr(violation, "__notes__", []))
        raise RuleViolationError(violation.rule, f"{violation.message}; after: {notes}") from violation


def _count_run(keys: Sequence[BlockKey], present: Container[BlockKey]) -> int:
    return sum(key.num_tokens for key in itertools.takewhile(present.__contains__, keys))

"""The scheduler's whole life as a state machine: whatever happens in whatever order, blocks add up, each
transfer ends once, and a request's tokens do not depend on what happened to it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted import BLOCK_SIZE, EOS, SchedulerHarness

from pdserve.connectors.base import ConnectorOutput, FinishDecision, MatchResult
from pdserve.engine.block_accounting import build_report
from pdserve.protocol import FinishReason, KVTransferParams

PARAMS = KVTransferParams(connector="scripted", transfer_id="t")


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, loads, sends, aborts and steps over a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.h = SchedulerHarness(num_blocks=12, max_num_batched_tokens=8, max_num_seqs=4, policy="priority")
        self.count = 0
        self.loading: set[str] = set()
        self.sending: set[str] = set()
        self.ended: dict[str, FinishReason | None] = {}
        self.added: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.lengths: dict[str, int] = {}
        self.wanting: set[str] = set()
        """Who is still to get its prompt's logprobs."""
        self.loads_now: set[str] = set()

    @rule(
        length=st.integers(1, 24),
        start=st.integers(0, 2),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 2),
        kind=st.sampled_from(["plain", "leg", "leg_held", "leg_stored", "loads", "loads_now"]),
        external=st.integers(1, 24),
        patience=st.integers(0, 2),
        wants_prompt_logprobs=st.booleans(),
    )
    def add(
        self,
        length: int,
        start: int,
        max_tokens: int,
        priority: int,
        kind: str,
        external: int,
        patience: int,
        wants_prompt_logprobs: bool,
    ) -> None:
        self.count += 1
        name = f"r{self.count}"
        prompt = [10 + (start * 7 + i) % 50 for i in range(length)]
        loads = kind.startswith("loads")
        output = [99] if loads else []
        if kind == "loads_now":
            self.loads_now.add(name)
        if loads:
            found = MatchResult(min(external, length), is_async=kind == "loads")
            self.h.connector.matches[name] = [MatchResult(None)] * patience + [found]
        if kind == "leg_held":
            self.h.connector.decisions[name] = FinishDecision(hold_blocks=True, kv_transfer_params=PARAMS)
        if kind == "leg_stored":
            self.h.connector.decisions[name] = FinishDecision(kv_transfer_params=PARAMS, announce_when_sent=True)
        self.h.add(
            name,
            prompt,
            output=output,
            handoff=kind.startswith("leg"),
            priority=priority,
            max_tokens=max_tokens + len(output),
            params=PARAMS if loads else None,
            prompt_logprobs=0 if wants_prompt_logprobs else None,
        )
        self.lengths[name] = length
        if wants_prompt_logprobs and not loads:
            self.wanting.add(name)
        self.added[name] = max_tokens
        self.tokens[name] = []

    @rule(
        ends=st.sets(st.integers(0, 5)),
        good=st.booleans(),
        kept=st.integers(0, 24),
        noise=st.booleans(),
        unfilled=st.sets(st.integers(0, 6), max_size=3),
    )
    def step(self, ends: set[int], good: bool, kept: int, noise: bool, unfilled: set[int]) -> None:
        report = ConnectorOutput()
        self.h.connector.unfilled = unfilled
        for i, name in enumerate(sorted(self.loading)):
            if i in ends:
                self.loading.discard(name)
                if good:
                    report.finished_receiving.add(name)
                else:
                    report.failed_receiving[name] = kept
        for i, name in enumerate(sorted(self.sending)):
            if i in ends:
                self.sending.discard(name)
                report.finished_sending.add(name)
        if noise:
            report.finished_receiving.add("never")
            report.finished_sending.add("never")
        self._take(self.h.step(report))

    @precondition(lambda self: self.added)
    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        name = sorted(self.added)[index % len(self.added)]
        self.h.scheduler.abort_requests([name])
        if name not in self.ended:
            self.aborted.add(name)
        self._note_started()

    def _take(self, outputs: list) -> None:
        for output in outputs:
            assert output.request_id not in self.ended or self.ended[output.request_id] is None
            self.tokens[output.request_id] += output.new_token_ids
            assert output.num_external_tokens <= output.num_cached_tokens <= self.lengths[output.request_id]
            if output.prompt_logprobs is not None:
                found = [entry.token_id for entry in output.prompt_logprobs]
                assert found == list(range(1, self.lengths[output.request_id]))
                self.wanting.remove(output.request_id)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
        self._note_started()

    def _note_started(self) -> None:
        for name, _blocks, count in self.h.connector.allocated:
            if count and name not in self.loads_now:
                self.loading.add(name)
        self.h.connector.allocated.clear()
        for name, _computed, handoff in self.h.connector.finished:
            decision = self.h.connector.decisions.get(name)
            if decision is not None:
                self.sending.add(name)
            del handoff
        self.h.connector.finished.clear()

    @invariant()
    def blocks_add_up(self) -> None:
        pool = self.h.kv_cache.pool
        pool.check()
        assert build_report(pool, self.h.scheduler.get_holdings()).mistakes == []

    @invariant()
    def nobody_gets_too_many_tokens(self) -> None:
        assert all(len(self.tokens[name]) <= limit for name, limit in self.added.items())

    def teardown(self) -> None:
        """Everything ends, and nothing is held."""
        for _ in range(400):
            report = ConnectorOutput(finished_receiving=set(self.loading), finished_sending=set(self.sending))
            self.loading.clear()
            self.sending.clear()
            self._take(self.h.step(report))
            if not self.h.scheduler.has_work and not self.h.scheduler.has_transfers:
                break
        assert self.h.scheduler.live_request_ids == []
        assert self.h.num_used_blocks == 0
        assert self.wanting <= self.aborted
        for name, limit in self.added.items():
            if name not in self.aborted:
                expected = 1 if self.ended[name] is FinishReason.HANDOFF else limit
                assert self.tokens[name] == [7] * expected


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = SchedulerMachine.TestCase
assert EOS != 7
assert BLOCK_SIZE == 4

"""What a check works with: engines that exchange KV, stepped side by side, and words for what is expected.

Every check gets a bench of its own. Its engines serve a model that nobody served before, with prompts that nobody
used before, so checks that share one store never see each other's blocks, even if the connector confuses models.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pdserve.connectors.base import CancelsSends, ConnectorContext, KVRequest
from pdserve.connectors.messages import MessageTypes, ServesRanks
from pdserve.connectors.testing.check import Need
from pdserve.connectors.testing.harness import EngineHarness, WorkerWrapper
from pdserve.connectors.testing.kv_content import TINY_SPEC, build_context
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.target import ConformanceTarget, StoredBlocks
from pdserve.connectors.testing.violations import Blame, NotOfferedError, RuleViolationError
from pdserve.kv_layout import BlockHasher, BlockKey, KVCacheSpec, Rank
from pdserve.protocol import KVTransferParams, Role

_PAUSE_S = 0.0003
_LEAST_STEPS = 200
_NUM_FILLER_STEPS = 100


class Bench:
    """Engines around the connector under test.

    Args:
        target: the connector and its surroundings.
        rule: the rule that the check tests; breaches that the harness cannot tell apart count as this one.
        patience: how long to wait for what should come.
    """

    def __init__(self, target: ConformanceTarget, rule: str, patience: Patience) -> None:
        self.target = target
        self.rule = rule
        self.spec = TINY_SPEC
        self.block_size = TINY_SPEC.block_size
        self.patience = patience
        self._run = secrets.token_hex(4)
        self._first_token = secrets.randbelow(1 << 31)
        self._engines: list[EngineHarness] = []
        self._num_started = 0
        self._num_requests = 0
        self._blame: Blame | None = None

    # --- engines --------------------------------------------------------------------------------------------

    def build_engine(
        self,
        role: Role,
        name: str,
        *,
        spec: KVCacheSpec = TINY_SPEC,
        weights: str = "weights",
        num_blocks: int = 64,
        wrap_worker: WorkerWrapper | None = None,
        lease_s: float | None = None,
        parallel: tuple[int, int] = (1, 1),
    ) -> EngineHarness:
        """Start an engine.

        Args:
            role: what it is used for.
            name: engines of one name are incarnations of one process.
            spec: shape of its blocks, over all ranks.
            weights: of its model; engines with equal ones serve the same model.
            num_blocks: size of its pool.
            wrap_worker: puts something between the engine and the worker half.
            lease_s: how long it holds blocks for a consumer; None = as the target has it.
            parallel: its tensor-parallel and its pipeline-parallel size.
        """
        context = self.build_context(role, name, spec=spec, weights=weights, lease_s=lease_s, parallel=parallel)
        engine = EngineHarness(
            self.target.connector,
            context,
            num_blocks=num_blocks,
            wrap_worker=wrap_worker,
            message_types=self._get_message_types(context),
        )
        engine.blame = self._blame
        self._engines.append(engine)
        return engine

    def build_context(
        self,
        role: Role,
        name: str,
        *,
        spec: KVCacheSpec = TINY_SPEC,
        weights: str = "weights",
        lease_s: float | None = None,
        parallel: tuple[int, int] = (1, 1),
    ) -> ConnectorContext:
        """What the halves of one engine are built with; see `build_engine`."""
        self._num_started += 1
        options = self.target.build_options(name, role)
        return build_context(
            role,
            options if lease_s is None else self.target.set_lease(options, lease_s),
            spec=spec,
            weights=f"{weights}-{self._run}",
            engine_id=f"{name}-{self._run}-{self._num_started}",
            parallel=parallel,
        )

    def build_producer(self, name: str = "producer", **parts: Any) -> EngineHarness:
        """Start a prefill engine; see `build_engine`."""
        return self.build_engine(Role.PREFILL, name, **parts)

    def build_consumer(self, name: str = "consumer", **parts: Any) -> EngineHarness:
        """Start a decode engine; see `build_engine`."""
        return self.build_engine(Role.DECODE, name, **parts)

    def stop(self, engine: EngineHarness) -> None:
        """Close an engine as at the end of its process, and step it no more."""
        self._engines.remove(engine)
        engine.close()

    # --- prompts --------------------------------------------------------------------------------------------

    def make_prompt(self, num_tokens: int, family: int = 0) -> list[int]:
        """A prompt; those of one family are prefixes of each other, others and those of other benches share nothing."""
        start = self._first_token + 1000 * family
        return list(range(start, start + num_tokens))

    def make_name(self) -> str:
        """A request id that this bench has not used."""
        self._num_requests += 1
        return f"r{self._num_requests}"

    def build_keys(
        self, engine: EngineHarness, token_ids: Sequence[int], *, salt: str = "", adapter: str = ""
    ) -> list[BlockKey]:
        """Identity of each block of a prompt."""
        hasher = BlockHasher(engine.context.identity.fingerprint, cache_salt=salt, adapter=adapter)
        return hasher.block_keys(token_ids, engine.context.spec.block_size)

    @property
    def blocks(self) -> StoredBlocks:
        """The store, for damage.

        Raises:
            NotOfferedError: the target does not let checks at it.
        """
        return self.target.get_share(Rank())

    @property
    def is_direct(self) -> bool:
        """Whether a producer's blocks are all that a consumer can get, once."""
        return Need.DIRECT.is_met(self.target.features, composes=self.target.composes)

    # --- transfers ------------------------------------------------------------------------------------------

    def hand_over(
        self,
        producer: EngineHarness,
        token_ids: Sequence[int],
        *,
        name: str | None = None,
        chunk: int | None = None,
        salt: str = "",
        adapter: str = "",
    ) -> KVTransferParams | None:
        """Compute a prompt and give it to whoever comes; the parameters, once they are good.

        None when the connector offers nothing or could not save all of it.
        """
        name = name or self.make_name()
        decision = producer.prefill(name, token_ids, chunk=chunk, salt=salt, adapter=adapter)
        if not decision.hold_blocks and decision.expects_sent:
            is_whole = self.wait_for_send(producer, name)
            if not is_whole:
                return None
            keys = self.build_keys(producer, token_ids, salt=salt, adapter=adapter)
            self._require_stored(producer, keys, name, rule_of_loss="R6" if chunk else "R10")
        return decision.kv_transfer_params

    def cancel_send(self, producer: EngineHarness, request_id: str) -> None:
        """Tell a producer that nobody will come for what it holds."""
        scheduler = producer.scheduler
        if not isinstance(scheduler, CancelsSends):
            raise RuleViolationError("R18", "cancels_sends is declared, but the scheduler half has no cancel_send")
        scheduler.cancel_send(request_id)

    def look_up(self, consumer: EngineHarness, request_id: str, num_local_tokens: int = 0) -> int:
        """Ask, and ask again where the connector wants it; tokens beyond the local ones."""
        found: list[int] = []

        def has_answer() -> bool:
            num_tokens = consumer.lookup(request_id, num_local_tokens).num_tokens
            if num_tokens is not None:
                found.append(num_tokens)
            return bool(found)

        self.run_until(has_answer, f"the lookup of {request_id} never came to an answer", "R3")
        return found[0]

    def submit(
        self, consumer: EngineHarness, token_ids: Sequence[int], params: KVTransferParams | None, **identity: str
    ) -> KVRequest:
        """A request with a name of its own arrives; ``identity`` is its salt and adapter."""
        return consumer.submit(self.make_name(), token_ids, params=params, **identity)

    def start_load(
        self,
        consumer: EngineHarness,
        token_ids: Sequence[int],
        params: KVTransferParams | None,
        *,
        num_local_tokens: int = 0,
        **identity: str,
    ) -> tuple[str, int]:
        """Submit, look up and allocate; the request's id and the number of tokens that are promised."""
        request_id = self.submit(consumer, token_ids, params, **identity).request_id
        num_tokens = self.look_up(consumer, request_id, num_local_tokens)
        consumer.admit(request_id, num_tokens, num_local_tokens)
        return request_id, num_tokens

    def fetch(
        self,
        consumer: EngineHarness,
        token_ids: Sequence[int],
        params: KVTransferParams | None,
        *,
        num_local_tokens: int = 0,
        **identity: str,
    ) -> int:
        """Load what is promised and end the request; tokens that arrived, each compared with the model's."""
        request_id, num_tokens = self.start_load(
            consumer, token_ids, params, num_local_tokens=num_local_tokens, **identity
        )
        num_good = self.wait_for_load(consumer, request_id) if num_tokens else 0
        consumer.finish(request_id)
        return num_good

    # --- waiting --------------------------------------------------------------------------------------------

    def step_all(self, engines: Sequence[EngineHarness] | None = None) -> None:
        """One idle step of every engine, or of some, and a moment for the connectors' threads."""
        for engine in self._engines if engines is None else engines:
            engine.step()
        time.sleep(_PAUSE_S)

    def run_until(
        self,
        condition: Callable[[], bool],
        message: str,
        rule: str,
        *,
        engines: Sequence[EngineHarness] | None = None,
        extra_s: float = 0.0,
    ) -> None:
        """Idle steps until ``condition`` holds.

        Args:
            condition: what must come.
            message: what is wrong when it does not.
            rule: the rule that is broken then.
            engines: those that are stepped; all, unless others have to stand still.
            extra_s: what the wait may take on top of the usual.

        Raises:
            RuleViolationError: it never comes: of R20 if steps with tokens help, else of ``rule``.
        """
        deadline = time.monotonic() + self.patience.timeout_s + extra_s
        num_steps = 0
        while not condition():
            num_steps += 1
            if num_steps > _LEAST_STEPS and time.monotonic() > deadline:
                self.patience.note_hang()
                if self._compute_until(condition, self._engines if engines is None else engines):
                    raise RuleViolationError("R20", f"{message} until a step computed tokens")
                raise RuleViolationError(rule, message)
            self.step_all(engines)

    def wait_for_load(
        self, consumer: EngineHarness, request_id: str, engines: Sequence[EngineHarness] | None = None
    ) -> int:
        """Until the load is reported; tokens of it that are good."""
        message = f"the load of {request_id} was never reported"
        rule = self._blame.rule if self._blame and not self.target.composes else "R9"
        self.run_until(lambda: request_id in consumer.received, message, rule, engines=engines)
        return consumer.received[request_id]

    def wait_for_send(self, producer: EngineHarness, request_id: str) -> bool:
        """Until the send is reported; whether it was saved whole."""
        self.run_until(lambda: request_id in producer.sent, f"the send of {request_id} was never reported", "R10")
        return producer.sent[request_id]

    def pass_steps(self, num_steps: int = 20) -> None:
        """Some idle steps in which nothing is to happen."""
        for _ in range(num_steps):
            self.step_all()

    def _require_stored(
        self, producer: EngineHarness, keys: Sequence[BlockKey], name: str, *, rule_of_loss: str
    ) -> None:
        """What is reported sent is there, where the target lets us look: at once, not a little later."""
        for rank in producer.context.rank.all_ranks if self.target.features.is_store else ():
            try:
                blocks = self.target.get_share(rank)
            except NotOfferedError:
                return
            missing = [index for index, key in enumerate(keys) if blocks.read(key) is None]
            if missing:
                self.pass_steps()
                rule = rule_of_loss if blocks.read(keys[missing[0]]) is None else "R10"
                raise RuleViolationError(rule, f"{name} was reported sent, but its block {missing[0]} is not stored")

    def settle(self) -> None:
        """End every request; all loads, and all sends that nobody has to fetch, must come to their end.

        Raises:
            RuleViolationError: one does not, or blocks are in use afterwards.
        """
        for engine in self._engines:
            for request_id in engine.live_request_ids:
                engine.finish(request_id)
        for engine in self._engines:
            self.run_until(lambda e=engine: not e.loading_request_ids, "a load was never reported", "R9")  # type: ignore[misc]
            self.run_until(lambda e=engine: e.owed_sends <= e.held_request_ids, "a send was never reported", "R10")  # type: ignore[misc]
        self.pass_steps(3)

    def close(self) -> None:
        """Close all engines, whatever one of them does."""
        with contextlib.ExitStack() as stack:
            while self._engines:
                stack.callback(self._engines.pop().close)

    # --- expectations ---------------------------------------------------------------------------------------

    def require(self, condition: bool, message: str, rule: str | None = None) -> None:
        """Fail the rule under test, or another one, unless ``condition`` holds."""
        if not condition:
            raise RuleViolationError(rule or self.rule, message)

    @contextmanager
    def blaming(self, rule: str | None = None, *, covers_garbage: bool = False) -> Iterator[None]:
        """Inside, loads that hang and wrong bytes count as breaches of the rule under test, or of ``rule``.

        ``covers_garbage``: also bytes of memory that was not computed, or free already.
        """
        before = self._blame
        self._set_blame(Blame(rule or self.rule, covers_garbage))
        try:
            yield
        finally:
            self._set_blame(before)

    def _get_message_types(self, context: ConnectorContext) -> MessageTypes | None:
        if not self.target.features.ranks:
            return None
        connector = self.target.connector
        if not isinstance(connector, ServesRanks):
            raise RuleViolationError("R12", "ranks is declared, but the connector's class has no message_types")
        return connector.message_types(context.options)

    def _set_blame(self, blame: Blame | None) -> None:
        self._blame = blame
        for engine in self._engines:
            engine.blame = blame

    def _compute_until(self, condition: Callable[[], bool], engines: Sequence[EngineHarness]) -> bool:
        """Whether steps that compute tokens make ``condition`` hold."""
        for _ in range(_NUM_FILLER_STEPS):
            for engine in engines:
                name = self.make_name()
                engine.submit(name, self.make_prompt(1, family=900 + self._num_requests))
                engine.admit(name, 0)
                engine.step({name: 1})
                engine.finish(name)
            self.step_all(engines)
            if condition():
                return True
        return False

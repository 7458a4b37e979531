"""A request's way through the pools, as one stream of tokens.

1. A prefill instance is chosen and gets the prompt; its first token goes to the client at once.
2. Its last output says HANDOFF and where the KV waits; if the first token ended the request, that was all.
3. A decode instance is chosen and gets prompt, first token and the KV's whereabouts; its tokens follow.
4. Whatever is lost on the way, an instance before, during or after the hand-off, the next leg starts behind the
   last token that went to the client. Seed and position fix each draw, so the tokens are the ones that would
   have come anyway.

With no prefill pool, a short prompt, or a prefill pool that is gone, steps 1 and 2 fall away and decode does all.
A request fails only by its own fault, after ``max_tries`` instances have failed it, when nobody can take it, or by
its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import (
    EngineError,
    OverloadedError,
    PdserveError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from pdserve.kv_layout import ModelIdentity
from pdserve.protocol import (
    FinishReason,
    KVTransferParams,
    RequestOutput,
    Role,
    TimelineEvent,
    TokenLogprobs,
    WireError,
)
from pdserve.router.config import HandoffSettings
from pdserve.router.fleet import Fleet
from pdserve.router.instance import Instance
from pdserve.router.leg import InstanceLostError, Leg
from pdserve.router.legs import GenerationRequest, Progress, build_leg
from pdserve.router.policies import RoutedRequest
from pdserve.router.prefix_memory import hash_prompt

_BUSY_PAUSE_S = 0.1


@dataclass(slots=True)
class TokenBatch:
    """Tokens that one engine step made for a request.

    Attributes:
        token_ids: the tokens, oldest first.
        logprobs: one entry for each, where asked for.
        prompt_logprobs: the prompt's, once, where asked for.
        num_cached_tokens: prompt tokens that were reused, in whole blocks; set on the request's first tokens only.
        finish_reason: STOP or LENGTH on the last batch.
        stop_token_id: the client's stop token that ended it.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class FlowObserver(Protocol):
    """Who hears of a request's way: its timeline and the metrics."""

    def leg_started(self, role: Role, instance: Instance) -> None:
        """A leg was sent."""
        ...

    def leg_events(self, role: Role, instance: Instance, events: list[TimelineEvent]) -> None:
        """What the instance tells of the request."""
        ...

    def handed_off(self, params: KVTransferParams | None) -> None:
        """The prefill leg is done."""
        ...

    def handoff_arrived(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The decode instance made its first token after a hand-off; it computed what is not cached."""
        ...

    def retried(self, reason: str) -> None:
        """A leg failed and the request goes on."""
        ...

    def fell_back(self) -> None:
        """The prefill pool is gone: decode does all of it."""
        ...


class RequestFlow:
    """One request on its way. Use once; lives on the event loop.

    Args:
        request: the request.
        fleet: where to.
        settings: how.
        observer: hears of it.
    """

    def __init__(
        self, request: GenerationRequest, fleet: Fleet, settings: HandoffSettings, observer: FlowObserver
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._settings = settings
        self._observer = observer
        self._progress = Progress()
        self._identity: ModelIdentity | None = None
        """Of the instances that all legs run at."""
        self._num_failures = 0
        self._is_handing_off = False
        self._handoff_source: tuple[Instance, str] | None = None
        """The prefill leg whose KV waits to be fetched."""
        self._passed_over: set[str] = set()
        """Incarnations that others go before: those that failed it, or know less of a short prompt's prefix."""
        self._routed = RoutedRequest(
            num_prompt_tokens=len(request.prompt_token_ids),
            session_id=request.session_id,
            hash_prompt=self._hash_prompt,
            count_known_blocks=fleet.prefix_memory.count_known_blocks,
        )
        self._refused_by: set[str] = set()
        """Incarnations that answered that they are full or draining."""
        self._full_since_s: float | None = None

    async def run(self) -> AsyncGenerator[TokenBatch, None]:
        """The request's tokens, each exactly once; closing the iterator aborts whatever leg runs.

        Raises:
            RequestError: an instance says that the request is wrong.
            OverloadedError: every instance is full.
            UnavailableError: there is no instance.
            RequestTimeoutError: the deadline passed.
            EngineError: ``max_tries`` instances failed it.
        """
        try:
            async with aclosing(self._run_legs()) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._release_handoff()

    async def _run_legs(self) -> AsyncGenerator[TokenBatch, None]:
        role = await self._first_role()
        while True:
            try:
                instance = await self._choose(role)
                async with aclosing(self._run_leg(role, instance)) as batches:
                    async for batch in batches:
                        yield batch
                        if batch.finish_reason is not None:
                            return
                if role is Role.PREFILL:
                    role = Role.DECODE
                    self._refused_by.clear()
            except _TryElsewhere as failure:
                self._note_failure(failure)
                if self._is_complete():
                    yield TokenBatch([], finish_reason=FinishReason.LENGTH)
                    return
                role = await self._next_role(role)

    # --- where to -------------------------------------------------------------------------------------

    async def _first_role(self) -> Role:
        if not self._fleet.decode.usable:
            # A new request is not kept waiting for a pool that may never come.
            raise UnavailableError(self._fleet.decode.explain_absence())
        if self._is_below_threshold():
            return Role.DECODE
        return await self._next_role(Role.PREFILL)

    def _is_below_threshold(self) -> bool:
        """Whether so little of the prompt is uncached at some decode instance that it is not worth a hand-off.

        The whole request then goes to that instance.
        """
        threshold = self._settings.disaggregation_threshold_tokens
        identity = self._fleet.identity
        if not threshold or identity is None or not self._fleet.prefill.instances:
            return False
        known = {
            instance.incarnation: self._routed.num_known_blocks(instance) for instance in self._fleet.decode.usable
        }
        most = max(known.values())
        if self._routed.num_prompt_tokens - most * identity.kv.block_size >= threshold:
            return False
        if most:
            self._passed_over = {name for name, num_blocks in known.items() if num_blocks < most}
        return True

    def _hash_prompt(self) -> list[bytes]:
        identity = self._fleet.identity
        if identity is None:
            return []
        return hash_prompt(identity, self._request.prompt_token_ids, self._request.cache_salt)

    async def _next_role(self, role: Role) -> Role:
        """Prefill while no token was made and the pool is there; decode otherwise."""
        if role is Role.DECODE or self._progress.output_token_ids or not self._fleet.prefill.instances:
            return Role.DECODE
        if self._fleet.prefill.usable:
            return Role.PREFILL
        if await self._fleet.wait_for_usable(
            Role.PREFILL, self._fleet.prefill_patience_s(self._settings.prefill_wait_s)
        ):
            return Role.PREFILL
        self._observer.fell_back()
        return Role.DECODE

    async def _choose(self, role: Role) -> Instance:
        """An instance for the next leg; waits for one where the request has something to lose by an error."""
        pool = self._fleet.pool(role)
        while True:
            instance = pool.choose(self._routed, self._refused_by | self._passed_over) or pool.choose(
                self._routed, self._refused_by
            )
            if instance is not None:
                self._check_identity(instance)
                return instance
            if pool.usable:
                await self._wait_out_full_pool(role)
                continue
            wait_s = self._settings.failover_wait_s if self._has_begun or self._num_failures else 0.0
            wait_s = min(wait_s, self._request.deadline_s - asyncio.get_running_loop().time())
            if not await self._fleet.wait_for_usable(role, wait_s):
                raise UnavailableError(pool.explain_absence())

    def _check_identity(self, instance: Instance) -> None:
        """Refuse to go on at another model, which may have become the pool meanwhile."""
        identity = None if instance.ready is None else instance.ready.identity
        if self._identity is not None and identity != self._identity:
            raise UnavailableError("the instances that began this answer are gone, and others serve another model now")
        self._identity = identity

    async def _wait_out_full_pool(self, role: Role) -> None:
        """Every instance said that it is full: ask again in a moment, but only if the answer has begun."""
        now_s = asyncio.get_running_loop().time()
        self._full_since_s = self._full_since_s or now_s
        if not self._has_begun or now_s - self._full_since_s > self._settings.failover_wait_s:
            raise OverloadedError(f"every {role} instance is full; try again later")
        await asyncio.sleep(_BUSY_PAUSE_S)
        self._refused_by.clear()

    @property
    def _has_begun(self) -> bool:
        return bool(self._progress.output_token_ids)

    # --- one leg --------------------------------------------------------------------------------------

    async def _run_leg(self, role: Role, instance: Instance) -> AsyncGenerator[TokenBatch, None]:
        """The leg's tokens; ends at the hand-off, or after the batch with a finish reason."""
        self._observer.leg_started(role, instance)
        leg = self._start_leg(role, instance)
        deadline = asyncio.get_running_loop().call_at(self._request.deadline_s, leg.expire)
        try:
            while True:
                output = await self._next_output(leg, instance)
                if output.events:
                    self._observer.leg_events(role, instance, output.events)
                if output.finish_reason in _BAD_ENDS:
                    self._raise_for(output, instance)
                self._note_handoff(role, output, instance)
                batch = self._accept(output)
                if batch is not None:
                    yield batch
                if output.finish_reason is not None:
                    return
        finally:
            deadline.cancel()
            leg.close()

    def _start_leg(self, role: Role, instance: Instance) -> Leg:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._request.deadline_s:
            raise RequestTimeoutError("the request took longer than it may")
        message = build_leg(self._request, self._progress, role=role, now_s=now_s)
        self._progress.num_legs += 1
        try:
            leg = instance.start_leg(message)
        except InstanceLostError as error:
            raise _TryElsewhere("not_connected", error, instance, taken=False) from None
        if self._routed.has_digests and instance.ready is not None:
            self._fleet.prefix_memory.note(instance.address, self._routed.digests, instance.ready.limits.num_blocks)
        return leg

    def _note_handoff(self, role: Role, output: RequestOutput, instance: Instance) -> None:
        if output.finish_reason is FinishReason.HANDOFF:
            self._handoff_source = (instance, output.request_id)
            self._is_handing_off = True
            self._progress.kv_transfer_params = output.kv_transfer_params
            self._observer.handed_off(output.kv_transfer_params)
        elif role is Role.DECODE and self._is_handing_off and output.new_token_ids:
            self._is_handing_off = False
            self._handoff_source = None
            self._progress.kv_transfer_params = None
            self._observer.handoff_arrived(len(self._request.prompt_token_ids), output.num_cached_tokens)

    def _release_handoff(self) -> None:
        """Tell the prefill instance that nobody will fetch the KV it holds, where that has become certain."""
        if self._handoff_source is not None:
            instance, request_id = self._handoff_source
            self._handoff_source = None
            instance.release(request_id)

    async def _next_output(self, leg: Leg, instance: Instance) -> RequestOutput:
        try:
            return await leg.next_output()
        except InstanceLostError as error:
            raise _TryElsewhere("instance_lost", error, instance) from None

    def _accept(self, output: RequestOutput) -> TokenBatch | None:
        """The output as the client's part of the stream; None when there is nothing in it for the client."""
        finish_reason = None if output.finish_reason is FinishReason.HANDOFF else output.finish_reason
        if not output.new_token_ids and finish_reason is None and output.prompt_logprobs is None:
            return None
        is_first = not self._has_begun
        self._progress.output_token_ids.extend(output.new_token_ids)
        return TokenBatch(
            token_ids=output.new_token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=self._count_reused(output.num_cached_tokens) if is_first else 0,
            finish_reason=finish_reason,
            stop_token_id=output.stop_token_id,
        )

    def _count_reused(self, num_cached_tokens: int) -> int:
        """Cached tokens as usage tells them: whole blocks, and never the token that is always computed.

        A store also keeps a prompt's last, partial block, which a prefix cache does not; clients shall not see by
        which way their request went.
        """
        identity = self._fleet.identity
        size = 1 if identity is None else identity.kv.block_size
        return min(num_cached_tokens, self._routed.num_prompt_tokens - 1) // size * size

    # --- what goes wrong ------------------------------------------------------------------------------

    def _raise_for(self, output: RequestOutput, instance: Instance) -> None:
        """The leg ended badly: raise what the client hears, or that the request goes on elsewhere."""
        error = output.error
        if output.finish_reason is FinishReason.TIMEOUT:
            raise RequestTimeoutError(error.message if error else "the request took longer than it may")
        if error is None:
            raise _TryElsewhere("aborted", EngineError(f"instance {instance.name} dropped the request"), instance)
        if not error.retryable:
            raise error_from_wire(error)
        taken = error.http_status not in (429, 503)
        raise _TryElsewhere(error.code if taken else "refused", error_from_wire(error), instance, taken=taken)

    def _note_failure(self, failure: _TryElsewhere) -> None:
        if failure.taken:
            # The KV's whereabouts are good for one instance that took them, however it ended.
            self._progress.kv_transfer_params = None
            self._is_handing_off = False
            self._release_handoff()
            self._passed_over.add(failure.incarnation)
        elif failure.reason == "refused":
            self._refused_by.add(failure.incarnation)
        self._num_failures += failure.reason != "refused"
        if self._num_failures >= self._settings.max_tries:
            raise EngineError(
                f"{self._num_failures} instances failed the request; the last one: {failure.error.message}"
            ) from failure
        self._observer.retried(failure.reason)

    def _is_complete(self) -> bool:
        """Whether the lost leg had sent all tokens and only its last word is missing."""
        max_tokens = self._request.sampling.max_tokens
        return max_tokens is not None and len(self._progress.output_token_ids) >= max_tokens


_BAD_ENDS = (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR)


class _TryElsewhere(Exception):
    """A leg failed in a way that another instance may not.

    ``taken`` says whether the instance may have begun with it.
    """

    def __init__(self, reason: str, error: PdserveError, instance: Instance, *, taken: bool = True) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error
        self.incarnation = instance.incarnation
        self.taken = taken


def error_from_wire(error: WireError) -> PdserveError:
    """The error an instance reported, with the status and code it gave."""
    if error.http_status == 429:
        return OverloadedError(error.message)
    if 400 <= error.http_status < 500:
        return RequestError(error.message, param=error.param, code=error.code, http_status=error.http_status)
    if error.http_status == 503:
        return UnavailableError(error.message)
    failure = EngineError(error.message)
    failure.code = error.code
    return failure

"""A request inside one engine: its tokens, how far they are computed, and its timeline.

The scheduler owns requests and is the only one to change them. No tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Sequence

from pdserve.connectors.base import KVRequest
from pdserve.kv_layout import BlockHasher
from pdserve.protocol import AddRequest, FinishReason, TimelineEvent, TokenLogprobs


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    """In the queue; it may already hold blocks that a connector filled."""
    WAITING_FOR_REMOTE_KV = enum.auto()
    """Blocks are allocated and a connector fills them."""
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One leg of a request.

    Args:
        message: what the router sent; validated.
        hasher: chain hasher with the request's salt.
        block_size: S.
        max_total_tokens: prompt and output together end here.
        arrival_order: rises with each request.
        now_s: monotonic time of receipt.

    Attributes:
        token_ids: prompt and output, oldest first.
        num_computed_tokens: leading tokens whose KV stands in the request's blocks.
        block_digests: identity of each full block of ``token_ids``.
        num_cached_tokens: prompt tokens that this engine has not computed, whatever became of their blocks.
        num_external_tokens: the part of them that a connector loaded.
    """

    def __init__(
        self,
        message: AddRequest,
        *,
        hasher: BlockHasher,
        block_size: int,
        max_total_tokens: int,
        arrival_order: int,
        now_s: float,
    ) -> None:
        self.request_id = message.request_id
        self.sampling = message.sampling
        self.handoff = message.handoff
        self.priority = message.priority
        self.arrival_order = arrival_order
        self.deadline_s = None if message.timeout_s is None else now_s + message.timeout_s
        self.max_total_tokens = max_total_tokens

        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        self.num_prior_tokens = len(self.token_ids)

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self._max_cached_tokens = self.num_prompt_tokens
        self.received_s = now_s
        self.admitted_s = now_s
        self.first_scheduled_s: float | None = None
        self.last_token_s: float | None = None

        self._hasher = hasher
        self._block_size = block_size
        keys = hasher.block_keys(message.prompt_token_ids, block_size)
        self.block_digests = [key.digest for key in keys if key.num_tokens == block_size]
        self.kv = KVRequest(self.request_id, self.num_prompt_tokens, tuple(keys), message.kv_transfer_params)
        self._extend_digests()

        self.prompt_logprobs: list[TokenLogprobs] = []
        self.wants_prompt_logprobs = self.sampling.prompt_logprobs is not None and not message.output_token_ids
        self._events: list[TimelineEvent] = []
        self.add_event("queued")

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those of earlier legs included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Output tokens that this engine sampled."""
        return len(self.token_ids) - self.num_prior_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it ended in any way."""
        return self.status is RequestStatus.FINISHED

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Output tokens, those of earlier legs included."""
        return self.token_ids[self.num_prompt_tokens :]

    def find_finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the token just appended ends the request, or None when it goes on."""
        token_id, sampling, num_tokens = self.token_ids[-1], self.sampling, len(self.token_ids)
        # A grammar that allows nothing more goes before min_tokens; until then the sampler holds the end back.
        if num_tokens - self.num_prompt_tokens >= sampling.min_tokens or sampling.grammar is not None:
            if token_id in eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP
        if num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        return FinishReason.HANDOFF if self.handoff else None

    def get_stop_token_id(self, reason: FinishReason, eos_token_ids: frozenset[int]) -> int | None:
        """The client's stop token that ended the request; None when EOS or something else did."""
        token_id = self.token_ids[-1]
        is_eos = token_id in eos_token_ids and not self.sampling.ignore_eos
        return token_id if reason is FinishReason.STOP and not is_eos else None

    def note_admission(self, num_local_tokens: int, now_s: float) -> None:
        """Blocks are allocated; the first ``num_local_tokens`` tokens are prefix hits."""
        self.admitted_s = now_s
        self.num_computed_tokens = num_local_tokens
        self.num_cached_tokens = min(num_local_tokens, self._max_cached_tokens)
        self.num_external_tokens = 0

    def note_loaded(self, num_tokens: int) -> None:
        """A connector filled the blocks of the next ``num_tokens`` tokens."""
        self.num_computed_tokens += num_tokens
        num_local_tokens = self.num_cached_tokens
        self.num_cached_tokens = min(num_local_tokens + num_tokens, self._max_cached_tokens)
        self.num_external_tokens = self.num_cached_tokens - num_local_tokens

    def note_lost(self, num_good_tokens: int) -> None:
        """Blocks behind the first ``num_good_tokens`` tokens were not filled after all: nothing of them was cached."""
        num_local_tokens = self.num_cached_tokens - self.num_external_tokens
        self.num_computed_tokens = min(self.num_computed_tokens, num_good_tokens)
        self.num_cached_tokens = min(self.num_cached_tokens, num_good_tokens)
        self.num_external_tokens = max(self.num_cached_tokens - num_local_tokens, 0)

    def note_released(self) -> None:
        """Its blocks were taken: it starts again from its tokens. Those computed once are not cached when hit later."""
        self._max_cached_tokens = self.num_cached_tokens
        self.num_computed_tokens = 0
        self.prompt_logprobs = []

    def note_scheduled(self, num_tokens: int) -> None:
        """The next step computes ``num_tokens`` tokens.

        After a hand-off, the step that gives the first token here is noted when it begins: until then KV moved.
        """
        is_up_to_date = self.num_computed_tokens + num_tokens == len(self.token_ids)
        if is_up_to_date and self.num_new_tokens == 0 and self.num_output_tokens:
            self.add_event("first_decode_step")

    def note_chunk(self, num_computed_tokens: int, num_tokens: int) -> None:
        """A step computed ``num_tokens`` tokens behind ``num_computed_tokens``, some of them of the prompt."""
        self.add_event("prefill_chunk", num_tokens=num_tokens, num_computed_tokens=num_computed_tokens + num_tokens)

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """The prompt's logprobs, once they are complete; None where nobody asked or they were taken."""
        if not self.wants_prompt_logprobs:
            return None
        self.wants_prompt_logprobs = False
        return self.prompt_logprobs

    def append_token(self, token_id: int) -> None:
        """A token was sampled."""
        self.token_ids.append(token_id)
        if len(self.token_ids) % self._block_size == 0:
            self._extend_digests()
        if self.num_output_tokens == 1:
            self.add_event("first_token")

    def spend_transfer_params(self) -> None:
        """A hand-off's parameters are good for one load: after a preemption the connector must not see them again."""
        if self.kv.kv_transfer_params is not None:
            self.kv = dataclasses.replace(self.kv, kv_transfer_params=None)

    def add_event(self, name: str, **detail: float) -> None:
        """Note a moment of the request's timeline, now."""
        self._events.append(TimelineEvent(name, time.time_ns(), detail))

    def take_events(self) -> list[TimelineEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def _extend_digests(self) -> None:
        """Hash the blocks that have become full."""
        size = self._block_size
        while (start := len(self.block_digests) * size) + size <= len(self.token_ids):
            parent = self.block_digests[-1] if self.block_digests else self._hasher.root
            self.block_digests.append(self._hasher.hash_block(parent, self.token_ids[start : start + size]))

"""What the model runner knows of each request, so that known ones travel as a difference."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.request import Request
from pdserve.engine.scheduler_output import NewRequest, ScheduledRequest


class RunnerView:
    """The scheduler's record of the runner's record."""

    def __init__(self) -> None:
        self._num_known_blocks: dict[str, int] = {}
        self._dropped: list[str] = []

    @property
    def has_news(self) -> bool:
        """Whether the runner is still to hear that a request is gone."""
        return bool(self._dropped)

    def drop(self, request_id: str) -> None:
        """The runner is to forget the request; nothing to tell if it never knew it."""
        if self._num_known_blocks.pop(request_id, None) is not None:
            self._dropped.append(request_id)

    def take_dropped(self) -> tuple[str, ...]:
        """Requests dropped since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def describe(
        self, request: Request, block_ids: Sequence[int], num_tokens: int
    ) -> tuple[NewRequest | None, ScheduledRequest]:
        """The request's part of a step's message: whole if the runner does not know it, and what it computes."""
        num_known = self._num_known_blocks.get(request.request_id)
        self._num_known_blocks[request.request_id] = len(block_ids)
        new = None
        if num_known is None:
            num_known = len(block_ids)
            new = NewRequest(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=tuple(block_ids),
                sampling=request.sampling,
                wants_prompt_logprobs=request.wants_prompt_logprobs,
            )
        new_block_ids = tuple(block_ids[num_known:]) if num_known < len(block_ids) else ()
        return new, ScheduledRequest(request.request_id, request.num_computed_tokens, num_tokens, new_block_ids)

"""Which blocks of the prompts under way are filled, as the scheduler half sees it: counts and block ids only.

::

    tokens     0          512         1024   1200
    step 1     |── 512 ───|                          first seen: its first blocks may be those that a store loads now
    step 2     |··········|── 512 ────|              blocks of 0 to 512 are filled: told
    step 3     |··········|···········|── 176 ──|    blocks of 512 to 1024: told; the rest is offered with the prompt
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.connectors.base import StepPlan
from pdserve.connectors.nixl.messages import FilledBlocks


class FilledBlockWatch:
    """Tells of each filled block once.

    Args:
        block_size: S.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_told: dict[str, int] = {}

    def find_new(self, plan: StepPlan) -> Iterator[FilledBlocks]:
        """Full blocks that earlier steps have filled, of the prompts that this step goes on with."""
        for item in plan.scheduled:
            request_id = item.request.request_id
            if item.num_computed_tokens >= item.request.num_prompt_tokens:
                continue
            first = self._num_told.get(request_id)
            end = 0 if first is None else max(item.num_computed_tokens // self._block_size, first)
            self._num_told[request_id] = end
            if first is not None and end > first:
                yield FilledBlocks(request_id, first, list(item.block_ids[first:end]))

    def forget(self, request_id: str) -> bool:
        """The request has ended or loses its blocks; whether blocks of it were told of."""
        return bool(self._num_told.pop(request_id, 0))

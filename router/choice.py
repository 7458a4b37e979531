"""A choice of an answer: the flow's tokens as text, up to the stop string, token limit or end token.

`run_choices` merges the choices of one answer as their tokens come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pdserve.protocol import FinishReason, TokenLogprobs
from pdserve.router.flow import RequestFlow, TokenBatch
from pdserve.router.record import ChoiceRecord
from pdserve.text.text_stream import TextStream


@dataclass(slots=True)
class ChoiceDelta:
    """What one step added to a choice.

    Attributes:
        index: of the choice.
        text: to show.
        token_ids: the tokens that count.
        text_offsets: where each token's text begins in the answer, in characters.
        logprobs: one entry for each token, where asked for.
        prompt_logprobs: the prompt's, once, where asked for.
        finish_reason: ``stop`` or ``length`` on the last delta.
        stop_reason: the stop string or stop token id that ended it; None for EOS and length.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    text_offsets: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """One choice. Use once; lives on the event loop.

    Args:
        index: its place in the answer.
        flow: where its tokens come from.
        stream: makes text of them.
        record: hears of each step.

    Attributes:
        num_output_tokens: tokens that count, so far.
        num_cached_tokens: prompt tokens that were reused.
    """

    def __init__(self, index: int, flow: RequestFlow, stream: TextStream, record: ChoiceRecord) -> None:
        self.index = index
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._flow = flow
        self._stream = stream
        self._record = record

    async def run(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Deltas up to the one with a finish reason; errors as in `RequestFlow.run`.

        When a stop string ends the choice, the leg that still runs is aborted.
        """
        async with aclosing(self._flow.run()) as batches:
            async for batch in batches:
                delta = self._take(batch)
                yield delta
                if delta.finish_reason is not None:
                    return

    def _take(self, batch: TokenBatch) -> ChoiceDelta:
        ends_with_stop_token = batch.finish_reason is FinishReason.STOP and bool(batch.token_ids)
        pushed = self._stream.push(batch.token_ids, ends_with_stop_token=ends_with_stop_token)
        num_tokens = pushed.num_tokens_used
        self.num_output_tokens += num_tokens
        self.num_cached_tokens += batch.num_cached_tokens
        if num_tokens:
            self._record.note_tokens(num_tokens)
        delta = ChoiceDelta(
            self.index,
            pushed.text,
            batch.token_ids[:num_tokens],
            pushed.text_offsets,
            logprobs=None if batch.logprobs is None else batch.logprobs[:num_tokens],
            prompt_logprobs=batch.prompt_logprobs,
        )
        if pushed.stop_string is not None:
            delta.finish_reason, delta.stop_reason = "stop", pushed.stop_string
        elif batch.finish_reason is not None:
            delta.text += self._stream.flush()
            delta.finish_reason, delta.stop_reason = batch.finish_reason.value, batch.stop_token_id
        return delta


async def run_choices(choices: Sequence[Choice]) -> AsyncGenerator[ChoiceDelta, None]:
    """The choices' deltas as they come; the first error ends all of them.

    One choice runs in the caller's task; several have a task each.
    """
    if len(choices) == 1:
        async with aclosing(choices[0].run()) as deltas:
            async for delta in deltas:
                yield delta
        return
    # Bounded by the choices' own token limits; a bound here would make one choice wait for another.
    arrived: asyncio.Queue[ChoiceDelta | asyncio.Task[None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(choice, arrived)) for choice in choices]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    num_running = len(tasks)
    try:
        while num_running:
            item = await arrived.get()
            if isinstance(item, ChoiceDelta):
                yield item
            else:
                num_running -= 1
                item.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(choice: Choice, arrived: asyncio.Queue[ChoiceDelta | asyncio.Task[None]]) -> None:
    async with aclosing(choice.run()) as deltas:
        async for delta in deltas:
            arrived.put_nowait(delta)

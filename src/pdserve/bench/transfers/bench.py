"""One connector between two engines without a model, and one memcpy of the same bytes right before each hand-off."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdserve.bench.transfers.engine import BareEngine, Chunks, HandOffError
from pdserve.bench.transfers.pool import BlockRing
from pdserve.bench.transfers.producer import Producer, ProducerProcess, ProducerStart
from pdserve.bench.transfers.surroundings import surroundings
from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.registry import load_connector
from pdserve.kv_layout import KVCacheSpec, ModelIdentity
from pdserve.protocol import Role

_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class HandOff:
    """One hand-off, and the copy made right before it.

    Attributes:
        num_bytes: of the prompt's KV.
        save_s: from the end of the last forward pass until the KV could be fetched.
        load_s: from the first look for it until all of it was there and verified.
        memcpy_s: one copy of as many bytes.
    """

    num_bytes: int
    save_s: float
    load_s: float
    memcpy_s: float

    @property
    def both_s(self) -> float:
        """Saving and loading."""
        return self.save_s + self.load_s


class TransferBench:
    """The consumer's side, and the memory that all copies go to.

    Args:
        spec: shape of a block.
        max_tokens: of the longest prompt.
        has_full_stores: stores hold twice as much and evict, as after a long time, instead of growing.
        seed: equal seeds give equal prompts.
    """

    def __init__(self, spec: KVCacheSpec, max_tokens: int, *, has_full_stores: bool, seed: int) -> None:
        self._has_full_stores = has_full_stores
        self._identity = ModelIdentity("bench", "bench", spec.dtype, "exact", spec)
        self._num_blocks = 2 * spec.num_blocks_for(max_tokens)
        self._source = BlockRing(spec, self._num_blocks)
        self._source.fill()
        self._target = BlockRing(spec, self._num_blocks)
        self._random = random.Random(seed)
        self._run_id = f"{os.getpid()}-{secrets.token_hex(4)}"

    @contextlib.contextmanager
    def pair(self, connector: str) -> Iterator[tuple[Producer, BareEngine]]:
        """A prefill and a decode engine with the connector; in one process only where it cannot do more."""
        with contextlib.ExitStack() as stack:
            store_bytes = self._target.rows.nbytes if self._has_full_stores else None
            options = stack.enter_context(surroundings(connector, store_bytes))
            engine_id = f"bench-{connector}-{self._run_id}"
            start = ProducerStart(connector, options, f"{engine_id}-prefill", self._identity, self._num_blocks)
            producer: Producer = start.build() if connector == "memory" else ProducerProcess(start)
            stack.callback(producer.close)
            context = ConnectorContext(f"{engine_id}-decode", Role.DECODE, self._identity, self._identity.kv, options)
            consumer = BareEngine(load_connector(connector), context, self._target)
            stack.callback(consumer.close)
            yield producer, consumer

    def hand_over(self, producer: Producer, consumer: BareEngine, num_tokens: int, chunks: Chunks) -> HandOff:
        """Copy as many bytes once, then compute a new prompt and hand it over; afterwards, compare what arrived.

        Raises:
            HandOffError: it did not get through, or other bytes did.
        """
        token_ids = [self._random.randrange(_VOCABULARY) for _ in range(num_tokens)]
        num_blocks = self._identity.kv.num_blocks_for(num_tokens)
        memcpy_s = self._copy(num_blocks)
        offered = producer.offer(token_ids, chunks)
        loaded = consumer.load(token_ids, offered.params)
        self._compare(offered.blocks, loaded.blocks, num_tokens)
        num_bytes = num_blocks * self._identity.kv.block_bytes
        return HandOff(num_bytes, offered.fetchable_s - offered.computed_s, loaded.seconds, memcpy_s)

    def _copy(self, num_blocks: int) -> float:
        source, target = self._source.take(num_blocks), self._target.take(num_blocks)
        began_s = time.monotonic()
        np.copyto(self._target.rows[target], self._source.rows[source])
        return time.monotonic() - began_s

    def _compare(self, sent: slice, loaded: slice, num_tokens: int) -> None:
        self._source.clear_behind(sent, num_tokens)
        found = self._target.rows[loaded]
        if not np.array_equal(found, self._source.rows[sent]):
            raise HandOffError("other bytes arrived than were sent")
        found.fill(0)

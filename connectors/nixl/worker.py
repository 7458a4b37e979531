"""The half beside a model runner: hands wishes to the transfer thread and collects what ended."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

import torch

from pdserve.connectors.base import ConnectorContext, ConnectorOutput
from pdserve.connectors.blocks.failures import WarningLimiter
from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl.agent import TransferAgent
from pdserve.connectors.nixl.channels import ProducerChannels
from pdserve.connectors.nixl.consumer import Consumer
from pdserve.connectors.nixl.leases import LeaseTable
from pdserve.connectors.nixl.messages import Endpoint, Listening, Load, StepMetadata
from pdserve.connectors.nixl.options import NixlOptions
from pdserve.connectors.nixl.pool_memory import PoolMemory
from pdserve.connectors.nixl.producer import Producer
from pdserve.connectors.nixl.report import TransferReport
from pdserve.connectors.nixl.side_channel import ProducerSocket, Sockets
from pdserve.connectors.nixl.transfer_thread import ProducerSide, TransferThread
from pdserve.connectors.nixl.wake_up import WakeUp
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec
from pdserve.peers.addresses import AllowedPeers
from pdserve.protocol import Role

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class NixlWorker:
    """Lives on the forward thread; everything that takes time happens on the transfer thread.

    Args:
        context: the engine.
        options: the connector's settings.
    """

    def __init__(self, context: ConnectorContext, options: NixlOptions) -> None:
        self._context = context
        self._rank = context.rank.index
        self._options = options
        self._block_size = context.spec.block_size
        self._report = TransferReport()
        self._warnings = WarningLimiter(logger, time.monotonic)
        self._wake_up = WakeUp()
        # Not the engine's id alone: an agent's name must never come back, whoever chooses engine ids.
        self._generation = f"{context.engine_id}/{self._rank}-{secrets.token_hex(4)}"
        self._memory: PoolMemory | None = None
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._thread: TransferThread | None = None

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """Register the memory with NIXL, begin to listen, and start the transfer thread.

        Raises:
            ConfigError: the memory is of a wrong kind, NIXL does not start, or the address cannot be listened on.
        """
        memory = PoolMemory(kv_cache, spec)
        sockets = Sockets()
        try:
            socket = ProducerSocket(sockets, self._options) if self._context.role is Role.PREFILL else None
            agent = TransferAgent(self._generation, memory.region, self._options.ucx_devices)
        except ConfigError:
            sockets.context.destroy(linger=0)
            raise
        channels = ProducerChannels(sockets, AllowedPeers(self._options.allowed_peers), self._options.curve)
        self._memory = memory
        self._consumer = Consumer(
            self._context,
            agent,
            memory,
            self._report,
            self._warnings,
            open_channel=channels.open,
            timeout_s=self._options.answer_timeout_s,
            clock=time.monotonic,
        )
        self._thread = TransferThread(
            sockets,
            self._wake_up,
            agent=agent,
            consumer=self._consumer,
            channels=channels,
            side=None if socket is None else self._build_side(agent, memory, socket),
            report=self._report,
            clock=time.monotonic,
        )
        self._thread.start(self._options.reader_nice if socket is None else 0)

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, on the transfer thread, when a load or a sending has ended."""
        self._report.wake = wake

    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Pass the step's wishes on.

        Held blocks are cleaned of what others left behind the prompt's end while they are still this thread's.
        """
        if self._memory is None or self._consumer is None:
            return
        if metadata.computes:
            self._consumer.pace.begin_step()
        if metadata.is_empty:
            return
        for offer in metadata.offers:
            self._report.start_sending(offer.request_id)
            num_tokens_in_last = offer.num_tokens % self._block_size
            if num_tokens_in_last:
                self._memory.clear_behind(offer.block_ids[-1], num_tokens_in_last)
        # A message that comes twice may find its load at an end already, and the blocks full.
        loads = [load for load in metadata.loads if self._report.start_load(load.request_id)]
        self._wake_up.run_soon(lambda: self._apply(metadata, loads))

    def wait_for_layer_load(self, layer: int) -> None:
        """Loads are asynchronous and move whole blocks: there is nothing to wait for."""

    def save_kv_layer(self, layer: int) -> None:
        """Blocks stay where they are until a consumer fetches them."""

    def wait_for_save(self) -> None:
        """Blocks are held, not copied."""

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """What ended since the last call."""
        if self._consumer is not None:
            self._consumer.pace.end_step()
        return self._report.take(finished_request_ids)

    def close(self) -> None:
        """Stop the transfer thread, so that nothing reads or writes the memory any more. Idempotent."""
        self._memory = None
        thread, self._thread = self._thread, None
        if thread is not None and not thread.close(_CLOSE_TIMEOUT_S):
            logger.warning("a KV transfer did not end within %g s", _CLOSE_TIMEOUT_S)
        self._wake_up.close()

    def _build_side(self, agent: TransferAgent, memory: PoolMemory, socket: ProducerSocket) -> ProducerSide:
        self._report.tell_scheduler(Listening(self._rank, Endpoint(socket.address, self._generation)))
        identity, metadata = self._context.identity, agent.get_metadata()
        self._producer = Producer(
            wire.Welcome(self._generation, identity, metadata, memory.region, self._rank),
            LeaseTable(self._generation, self._options.lease_s, time.monotonic),
            memory,
            self._report,
            self._warnings,
            reply=socket.send,
            clock=time.monotonic,
        )
        return ProducerSide(self._producer, socket)

    def _apply(self, metadata: StepMetadata, loads: Sequence[Load]) -> None:
        """On the transfer thread. Loads before cancellations: a load may be cancelled in the step it begins in."""
        assert self._consumer is not None, "the thread runs only when there is one"
        if self._producer is not None:
            for request_id in metadata.forgotten:
                self._producer.forget(request_id)
            for filled in metadata.filled:
                self._producer.fill(filled)
            for offer in metadata.offers:
                self._producer.offer(offer.in_rank(self._generation))
            for request_id in metadata.cancelled_offers:
                self._producer.cancel_request(request_id)
        for load in loads:
            self._consumer.start(load.in_rank(self._rank))
        for request_id in metadata.cancelled_loads:
            self._consumer.cancel(request_id)
        for reference in metadata.queued:
            self._consumer.keep(reference.in_rank(self._rank))
        for reference in metadata.releases:
            self._consumer.release(reference.in_rank(self._rank))

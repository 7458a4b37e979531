"""The thread on which everything moves: it owns sockets, agent, leases and loads, and sleeps when nothing is to do.

::

    forward thread ── run_soon ──┐
    consumers' messages ─────────┼──> producer, consumer, agent ──> report
    producers' answers ──────────┤
    the next deadline ───────────┘

Nothing else touches these objects while the thread runs.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from pdserve.connectors.blocks.task_threads import step_back
from pdserve.connectors.nixl.agent import TransferAgent
from pdserve.connectors.nixl.channels import ProducerChannels
from pdserve.connectors.nixl.consumer import Consumer
from pdserve.connectors.nixl.producer import Producer
from pdserve.connectors.nixl.report import TransferReport
from pdserve.connectors.nixl.side_channel import ProducerSocket, Sockets
from pdserve.connectors.nixl.wake_up import WakeUp

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 1.0
_POLL_UNIT_S = 0.001
# Until a read that goes on in the background is looked at again.
_READ_PAUSE_S = 20e-6


@dataclass(frozen=True, slots=True)
class ProducerSide:
    """What an engine has that hands KV out."""

    producer: Producer
    socket: ProducerSocket


class TransferThread:
    """Runs the loop.

    Args:
        sockets: the poller has those of the two sides.
        wake_up: wakes the loop.
        agent: moves blocks.
        consumer: loads.
        channels: the consumer's connections.
        side: hands out; None in an engine that does not.
        report: counts what is wrong.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sockets: Sockets,
        wake_up: WakeUp,
        *,
        agent: TransferAgent,
        consumer: Consumer,
        channels: ProducerChannels,
        side: ProducerSide | None,
        report: TransferReport,
        clock: Callable[[], float],
    ) -> None:
        self._sockets = sockets
        self._wake_up = wake_up
        self._agent = agent
        self._consumer = consumer
        self._channels = channels
        self._side = side
        self._report = report
        self._clock = clock
        self._nice = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        sockets.poller.register(wake_up.fd, zmq.POLLIN)

    def start(self, nice: int = 0) -> None:
        """Begin.

        Args:
            nice: how far it steps back for others, see `pdserve.connectors.blocks.task_threads.step_back`.
        """
        self._nice = nice
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop; whether it ended in time. A read under way is stopped first. Idempotent."""
        self._wake_up.run_soon(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        step_back(self._nice)
        try:
            while not self._is_stopping:
                self._turn()
        finally:
            self._clean_up()

    def _turn(self) -> None:
        """One round. An error that nobody foresaw costs the loads under way, not the ones to come."""
        try:
            has_messages = self._wait(self._get_wait_s())
            self._wake_up.run_all()
            if self._side is not None:
                self._serve(self._side, has_messages)
            if has_messages:
                self._channels.receive_into(self._consumer)
            self._consumer.advance()
            if self._consumer.is_waiting_for_word:  # it has mostly come during the read
                self._channels.receive_into(self._consumer)
        except Exception:
            logger.exception("KV transfers failed in an unforeseen way; those under way are given up")
            self._report.count_failure("internal")
            self._consumer.drop_all("an internal error")

    def _serve(self, side: ProducerSide, has_messages: bool) -> None:
        for reader, message in side.socket.receive() if has_messages else ():
            if message is None:
                self._report.count_failure("protocol")
            else:
                side.producer.receive(reader, message)
        side.producer.advance()
        if side.producer.progress_interval_s is not None:
            self._agent.progress()

    def _wait(self, wait_s: float) -> bool:
        """Until something comes or the time is up; whether a message may have come.

        To look for one costs more than most tasks: a load begins the sooner. ZMQ counts whole milliseconds; what its
        sockets offer for shorter waits may miss a message that came while they were used, but never for longer than
        such a wait, and does not tell what came.
        """
        if wait_s >= _POLL_UNIT_S:
            ready = self._sockets.poller.poll(math.ceil(wait_s / _POLL_UNIT_S))
            return any(source != self._wake_up.fd for source, _ in ready)
        try:
            select.select([source for source, _ in self._sockets.poller.sockets], [], [], wait_s)
        except ValueError:  # a descriptor beyond what select takes, in a process with very many files
            time.sleep(wait_s)
        return True

    def _get_wait_s(self) -> float:
        """Until something is due."""
        if self._consumer.wants_to_run:
            return max(_READ_PAUSE_S if self._consumer.is_waiting_for_read else 0.0, self._consumer.pause_s)
        wait_s = _LONGEST_WAIT_S
        dues = [self._consumer.next_due]
        if self._side is not None:
            dues.append(self._side.producer.next_due)
            wait_s = self._side.producer.progress_interval_s or wait_s
        now = self._clock()
        waits_s = [due - now for due in dues if due is not None]
        return max(min([wait_s, *waits_s]), 0.0)

    def _clean_up(self) -> None:
        self._wake_up.close()
        self._consumer.drop_all("the connector is being closed")
        if self._side is not None:
            self._side.socket.close()
        self._agent.close()
        self._sockets.context.term()

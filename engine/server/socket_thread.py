"""The thread that owns the socket to the routers.

It decodes what comes, keeps the sessions, sends heartbeats also while a long step runs, and hands requests to
the engine's thread through an `Inbox`. It knows nothing of the engine but its last load.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping

import msgspec
import zmq

from pdserve.engine.server.counters import RateLimitedWarning, ServerCounters
from pdserve.engine.server.inbox import Abort, Add, Inbox, Listen, SessionClosed, SocketFailed
from pdserve.engine.server.sessions import Session, SessionTable
from pdserve.engine.server.settings import InstanceSettings
from pdserve.engine.server.wire_errors import error_output
from pdserve.errors import OverloadedError, PdserveError, UnavailableError
from pdserve.protocol import (
    MAX_FRAME_BYTES,
    AbortRequests,
    AddRequest,
    CacheEvents,
    Goodbye,
    Heartbeat,
    Hello,
    InstanceLoad,
    InstanceMessage,
    Ready,
    Refused,
    RequestOutput,
    StepOutputs,
    decode_router_message,
    encode,
)

logger = logging.getLogger(__name__)

_MAX_FRAMES_A_TURN = 512


class SocketThread:
    """Owns the ROUTER socket from `start` to `close`.

    Args:
        socket: the bound socket; this thread closes it.
        ready: the answer to a Hello; session and load are filled in.
        inbox: where requests go.
        settings: timeouts and intervals.
        counters: what to count with.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        ready: Ready,
        inbox: Inbox,
        settings: InstanceSettings,
        counters: ServerCounters,
    ) -> None:
        self._socket = socket
        self._ready = ready
        self._inbox = inbox
        self._settings = settings
        self._counters = counters
        self._max_pending = ready.limits.max_queue_len
        self._load = ready.load
        self._sessions = SessionTable()
        self._by_number: dict[int, Session] = {}
        self._outbox: collections.deque[tuple[int, StepOutputs | CacheEvents]] = collections.deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._closing = threading.Event()
        self._heartbeat_now = threading.Event()
        self._next_tick_s = 0.0
        self._warnings = RateLimitedWarning(logger)
        self._thread = threading.Thread(target=self._run, name="pdserve-socket", daemon=True)

    def start(self) -> None:
        """Begin to answer routers."""
        self._thread.start()

    # --- the engine's thread ------------------------------------------------------------------------

    def send(self, outputs: Mapping[int, StepOutputs], load: InstanceLoad) -> None:
        """Send a step's outputs to each session that has some; heartbeats carry ``load`` from now on.

        What belongs to a session that has ended is dropped. That the instance drains is told at once.
        """
        news = load.draining != self._load.draining
        self._load = load
        self._outbox.extend(outputs.items())
        if news:
            self._heartbeat_now.set()
        if outputs or news:
            self._wake()

    def send_cache_events(self, sessions: Iterable[int], events: CacheEvents) -> None:
        """Send cache events to these sessions, behind what was sent before."""
        self._outbox.extend((session, events) for session in sessions)
        self._wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left and end the thread. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _wake(self) -> None:
        # A full pipe wakes the thread already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    # --- the socket thread --------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        self._next_tick_s = time.monotonic()
        try:
            while not self._closing.is_set():
                wait_s = max(self._next_tick_s - time.monotonic(), 0.0)
                poller.poll(math.ceil(wait_s * 1000))
                self._turn()
            self._send_outbox()
        except Exception:
            logger.exception("the socket thread failed")
            self._inbox.put(SocketFailed())
        finally:
            self._socket.close()

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        self._send_outbox()
        self._receive()
        now_s = time.monotonic()
        if now_s >= self._next_tick_s:
            self._tick(now_s)
        elif self._heartbeat_now.is_set():
            self._send_heartbeats()

    def _send_outbox(self) -> None:
        while self._outbox:
            number, message = self._outbox.popleft()
            session = self._by_number.get(number)
            if session is not None:
                self._send(session, message)

    def _send(self, session: Session, message: InstanceMessage) -> None:
        """Send to a session; one that cannot take the message has lost it, so it ends."""
        try:
            self._socket.send_multipart([session.routing_id, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            slow = error.errno == zmq.EAGAIN
            self._end_session(session, "slow" if slow else "disconnected")

    def _receive(self) -> None:
        for _ in range(_MAX_FRAMES_A_TURN):
            try:
                routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle_frames(routing_id, frames)

    def _handle_frames(self, routing_id: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1:
            self._drop("malformed", f"a message of {len(frames)} frames instead of 1")
            return
        frame = frames[0]
        if len(frame) > MAX_FRAME_BYTES:
            self._drop("oversize", f"a frame of {len(frame)} bytes; {MAX_FRAME_BYTES} are allowed")
            return
        try:
            message = decode_router_message(frame)
        except msgspec.DecodeError as error:
            self._drop("malformed", f"a frame that is no message of the protocol: {error}")
            return
        if isinstance(message, Hello):
            self._hello(routing_id, message)
            return
        session = self._sessions.get(routing_id)
        if session is None:
            self._without_session(routing_id, message)
        else:
            session.last_seen_s = time.monotonic()
            self._in_session(session, message)

    def _hello(self, routing_id: bytes, hello: Hello) -> None:
        result = self._sessions.hello(routing_id, hello, time.monotonic())
        for closed in result.closed:
            self._forget(closed, "replaced")
        if result.refused is not None:
            self._reply(routing_id, Refused(session=hello.session, reason=result.refused))
            self._warnings.warn("refused", "router %s refused: %s", hello.router_id, result.refused)
        if result.opened is not None:
            self._by_number[result.opened.number] = result.opened
            self._counters.sessions_opened.inc()
            self._counters.sessions.set(len(self._sessions))
            logger.info("router %s connected", hello.router_id)
            self._send(result.opened, msgspec.structs.replace(self._ready, session=hello.session, load=self._load))
            if hello.wants_cache_events:
                self._inbox.put(Listen(result.opened.number))

    def _in_session(self, session: Session, message: AddRequest | AbortRequests | Goodbye) -> None:
        match message:
            case AddRequest() if len(self._inbox) >= self._max_pending:
                error = OverloadedError(
                    f"{self._max_pending} requests wait for the engine's next step, which is max_queue_len"
                )
                self._send(session, self._refusal(message, error))
            case AddRequest():
                self._inbox.put(Add(session.number, message))
            case AbortRequests():
                self._inbox.put(Abort(session.number, message.request_ids))
            case Goodbye():
                self._end_session(session, "goodbye")

    def _without_session(self, routing_id: bytes, message: AddRequest | AbortRequests | Goodbye) -> None:
        self._drop("no_session", f"{type(message).__name__} on a connection without a session")
        if isinstance(message, AddRequest):
            error = UnavailableError("this connection has no session; send Hello first")
            self._reply(routing_id, self._refusal(message, error))

    def _refusal(self, request: AddRequest, error: PdserveError) -> StepOutputs:
        self._counters.refused_requests.labels(error.code).inc()
        outputs: list[RequestOutput] = [error_output(request.request_id, error)]
        return StepOutputs(outputs=outputs, load=self._load)

    def _reply(self, routing_id: bytes, message: InstanceMessage) -> None:
        """Answer a peer that has no session; if it is gone already, nobody misses the answer."""
        try:
            self._socket.send_multipart([routing_id, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("no answer to a peer without a session: %s", error)

    def _drop(self, kind: str, what: str) -> None:
        self._counters.dropped_frames.labels(kind).inc()
        self._warnings.warn(kind, "dropped %s", what)

    # --- time ---------------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        late_s = now_s - self._next_tick_s
        self._next_tick_s = now_s + self._settings.heartbeat_interval_s
        if late_s > self._settings.heartbeat_interval_s:
            # The process was stopped or starved: routers' messages may wait unread.
            self._sessions.excuse(late_s)
        for session in self._sessions.expire(now_s - self._settings.session_timeout_s):
            self._forget(session, "silent")
        self._send_heartbeats()

    def _send_heartbeats(self) -> None:
        self._heartbeat_now.clear()
        heartbeat = Heartbeat(generation=self._ready.generation, load=self._load)
        for session in self._sessions:
            self._send(session, heartbeat)

    def _end_session(self, session: Session, reason: str) -> None:
        self._sessions.close(session)
        self._forget(session, reason)

    def _forget(self, session: Session, reason: str) -> None:
        self._by_number.pop(session.number, None)
        self._counters.sessions_ended.labels(reason).inc()
        self._counters.sessions.set(len(self._sessions))
        self._inbox.put(SessionClosed(session.number))
        logger.info("router %s left: %s", session.router_id, reason)

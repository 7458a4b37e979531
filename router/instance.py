"""One instance as the router sees it: its session, its load, and the legs that run there.

A session is one socket, one TCP connection and one session id. It begins when the connection stands (Hello),
serves once the instance has answered (Ready) and the fleet has admitted it, and ends at the first sign of loss:
the connection breaks, heartbeats stop, or the instance's generation changes. What ran there is told at once;
then a fresh socket and session are tried until the router closes. ZMQ's own reconnecting stays off, because
a connection replaced under a session would lose messages without a trace.

Everything here lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pdserve.errors import OverloadedError
from pdserve.peers.curve import Curve, UnknownPeerError
from pdserve.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    CacheEvents,
    Goodbye,
    Heartbeat,
    Hello,
    InstanceLoad,
    Ready,
    Refused,
    Role,
    RouterMessage,
    StepOutputs,
    decode_instance_message,
    encode,
)
from pdserve.router.config import endpoint_of
from pdserve.router.connection import build_socket, find_refusal, watch
from pdserve.router.health import HealthSettings, InstanceHealth
from pdserve.router.instance_tally import InstanceTally
from pdserve.router.leg import InstanceLostError, Leg

logger = logging.getLogger(__name__)

RECONNECT_PAUSE_S = 0.25


class SessionEndedError(Exception):
    """The session is over; the text says why."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How sessions are kept.

    Attributes:
        heartbeat_interval_s: how often a Hello goes out.
        heartbeat_timeout_s: silence that counts as loss.
        wants_cache_events: ask the instance to tell what its prefix cache holds.
        health: when it is trusted with work.
        curve: keys; None = connections are not encrypted.
    """

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    wants_cache_events: bool = False
    health: HealthSettings = field(default_factory=HealthSettings)
    curve: Curve | None = None


class InstanceObserver(Protocol):
    """Who hears of an instance's comings and goings: the fleet."""

    def instance_ready(self, instance: Instance) -> None:
        """A session got its Ready; ``instance.ready`` holds it."""
        ...

    def instance_lost(self, instance: Instance) -> None:
        """A session that had its Ready is over."""
        ...

    def instance_load_changed(self, instance: Instance) -> None:
        """A load report came."""
        ...

    def instance_cache_changed(self, instance: Instance, events: CacheEvents) -> None:
        """It tells what came into its prefix cache and what went."""
        ...

    def wire_error(self, instance: Instance) -> None:
        """A frame could not be decoded."""
        ...


class Instance:
    """One instance's session.

    Args:
        address: where it listens, as the operator wrote it.
        role: the pool it belongs to.
        router_id: this router.
        context: shared ZMQ context.
        observer: hears of changes.
        settings: how the session is kept.

    Attributes:
        ready: the instance's own description; None while there is no session.
        refusal: why the fleet does not use it; None when it does.
        load: the latest report.
        num_unreported: legs sent since then, so that a burst between two reports is spread.
        tally: what it did in this session.
        health: its record of faults.
        is_leaving: it gets no new work and is given up once its legs have ended.
        last_problem: why the last session ended or was not begun; empty while one stands.
    """

    def __init__(
        self,
        address: str,
        role: Role,
        *,
        router_id: str,
        context: zmq.asyncio.Context,
        observer: InstanceObserver,
        settings: SessionSettings,
    ) -> None:
        self.address = address
        self.role = role
        self.ready: Ready | None = None
        self.refusal: str | None = None
        self.load = InstanceLoad()
        self.num_unreported = 0
        self.tally = InstanceTally()
        self.health = InstanceHealth(settings.health)
        self.is_leaving = False
        self.last_problem = ""
        self._router_id = router_id
        self._context = context
        self._observer = observer
        self._settings = settings
        self._legs: dict[str, Leg] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._session = ""
        self._last_heard = 0.0
        self._refused_reason: str | None = None
        self._is_cut = False
        """A frame found no connection; the session ends as soon as its monitor is read."""

    @property
    def is_usable(self) -> bool:
        """Whether new work may go there."""
        may_be_used = self.refusal is None and not self.load.draining and not self.is_leaving
        return self.ready is not None and may_be_used and not self._is_cut

    @property
    def is_trusted(self) -> bool:
        """Whether it is one of those that new work goes to first; see `InstanceHealth.may_take`."""
        return self.health.may_take(self.num_legs, asyncio.get_running_loop().time())

    @property
    def name(self) -> str:
        """The instance's own name, else its address."""
        return self.ready.instance_id if self.ready else self.address

    @property
    def incarnation(self) -> str:
        """Names this start of this instance."""
        return f"{self.address}/{self.ready.generation if self.ready else ''}"

    @property
    def num_legs(self) -> int:
        """Legs of this router that run there."""
        return len(self._legs)

    @property
    def silence_s(self) -> float | None:
        """How long ago the last message came; None while there is no session."""
        return None if self.ready is None else asyncio.get_running_loop().time() - self._last_heard

    # --- work -----------------------------------------------------------------------------------------

    def start_leg(self, request: AddRequest) -> Leg:
        """Send a leg to the instance.

        Raises:
            InstanceLostError: there is no session.
            OverloadedError: the request does not fit into one frame's bound together with its fellows.
        """
        frame = encode(request)
        if len(frame) > MAX_FRAME_BYTES:
            raise OverloadedError(f"the request takes {len(frame)} bytes on the wire, {MAX_FRAME_BYTES} at most")
        if self.ready is None or not self._send_frame(frame):
            raise InstanceLostError(f"{self.role} instance {self.address} is not connected")
        leg = Leg(request.request_id, self._abort_leg)
        self._legs[request.request_id] = leg
        self.num_unreported += 1
        self.tally.note_sent(request)
        return leg

    def release(self, request_id: str) -> None:
        """Nobody will fetch the KV of this leg, which ended with its hand-off."""
        self._send(AbortRequests([request_id]))

    def _abort_leg(self, request_id: str) -> None:
        if self._legs.pop(request_id, None) is not None:
            self.tally.note_aborted(request_id)
            self._send(AbortRequests([request_id]))

    def _send(self, message: RouterMessage) -> bool:
        return self._send_frame(encode(message))

    def _send_frame(self, frame: bytes) -> bool:
        """Whether the frame went out; without a connection it does not, and nothing is queued for later."""
        if self._socket is None:
            return False
        sending = self._socket.send(frame, zmq.NOBLOCK)
        assert isinstance(sending, asyncio.Future)
        # A non-blocking send of zmq.asyncio is done when it returns.
        is_sent = sending.exception() is None
        self._is_cut = self._is_cut or not is_sent
        return is_sent

    # --- the session's life ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a session with the instance until cancelled."""
        try:
            while True:
                try:
                    await self._run_session()
                except* SessionEndedError as ended:
                    reason = str(ended.exceptions[0])
                    if self.ready is not None:
                        logger.warning("%s instance %s at %s is lost: %s", self.role, self.name, self.address, reason)
                    self._end_session(reason)
                await asyncio.sleep(RECONNECT_PAUSE_S)
        finally:
            self._end_session("the router's session with it ended")

    async def _run_session(self) -> None:
        socket = self._open_socket()
        monitor: zmq.asyncio.Socket | None = None
        try:
            monitor = watch(socket)
            self._socket = socket
            self._session = uuid.uuid4().hex
            socket.connect(endpoint_of(self.address))
            connected = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_connection(monitor, connected))
                tasks.create_task(self._keep_alive(connected))
                tasks.create_task(self._read(socket))
        finally:
            if self.ready is not None:
                self._send(Goodbye())
            self._socket = None
            if monitor is not None:
                socket.disable_monitor()
                monitor.close(linger=0)
            # Lets the Goodbye leave when the connection still stands.
            socket.close(linger=100)

    def _open_socket(self) -> zmq.asyncio.Socket:
        address = endpoint_of(self.address).removeprefix("tcp://")
        try:
            return build_socket(self._context, self._settings.curve, address)
        except UnknownPeerError as error:
            self._log_refused(str(error))
            raise SessionEndedError(str(error)) from None

    def _end_session(self, reason: str) -> None:
        self.last_problem = reason
        legs, self._legs = self._legs, {}
        if legs and not self.is_leaving:
            self.health.note_fault(asyncio.get_running_loop().time())
        for leg in legs.values():
            leg.lose(f"{self.role} instance {self.name} was lost: {reason}")
        was_ready = self.ready is not None
        self.ready, self.refusal, self.load, self.num_unreported = None, None, InstanceLoad(), 0
        self.tally = InstanceTally()
        if was_ready:
            self._observer.instance_lost(self)

    async def _watch_connection(self, monitor: zmq.asyncio.Socket, connected: asyncio.Event) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connected.set()
                continue
            reason = find_refusal(event)
            if reason is not None:
                self._log_refused(reason)
                raise SessionEndedError(reason)
            raise SessionEndedError("the connection broke" if connected.is_set() else "no connection")

    async def _keep_alive(self, connected: asyncio.Event) -> None:
        """Say Hello, first and at intervals; end the session when nothing has come for too long."""
        loop = asyncio.get_running_loop()
        await connected.wait()
        self._last_heard = loop.time()
        hello = Hello(
            router_id=self._router_id, session=self._session, wants_cache_events=self._settings.wants_cache_events
        )
        while True:
            self._send(hello)
            due = loop.time() + self._settings.heartbeat_interval_s
            await asyncio.sleep(self._settings.heartbeat_interval_s)
            # When this loop itself was held up, the instance's messages may lie unread: look again next time.
            held_up = loop.time() - due > self._settings.heartbeat_interval_s
            silence_s = loop.time() - self._last_heard
            if silence_s > self._settings.heartbeat_timeout_s and not held_up:
                raise SessionEndedError(f"nothing came from it for {silence_s:.1f} s")

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await socket.recv()
            self._last_heard = loop.time()
            try:
                self._handle(frame)
            except msgspec.DecodeError as error:
                logger.warning("%s instance %s sent a frame that is no message: %s", self.role, self.name, error)
                self._observer.wire_error(self)
            # recv does not yield while messages are waiting; the requests' tasks must get their turn.
            await asyncio.sleep(0)

    def _handle(self, frame: bytes) -> None:
        message = decode_instance_message(frame)
        match message:
            case StepOutputs():
                self._take_outputs(message)
            case Heartbeat():
                if self.ready is not None and message.generation != self.ready.generation:
                    raise SessionEndedError("it was restarted")
                self._take_load(message.load)
            case CacheEvents():
                if self.ready is not None:
                    self._observer.instance_cache_changed(self, message)
            case Ready():
                if message.session == self._session and self.ready is None:
                    self._take_ready(message)
            case Refused():
                if message.session == self._session:
                    self._log_refused(message.reason)
                    raise SessionEndedError(message.reason)

    def _take_outputs(self, message: StepOutputs) -> None:
        self._take_load(message.load)
        for output in message.outputs:
            leg = self._legs.get(output.request_id)
            if leg is None:
                continue  # aborted here; the instance had not heard of it yet
            self.tally.note_output(output)
            if output.finish_reason is not None:
                del self._legs[output.request_id]
                self.health.note_output(output, self._last_heard)
            leg.put(output)

    def _take_load(self, load: InstanceLoad) -> None:
        changed = load.draining != self.load.draining
        self.load = load
        self.num_unreported = 0
        if changed:
            self._observer.instance_load_changed(self)

    def _take_ready(self, ready: Ready) -> None:
        self._refused_reason = None
        if ready.protocol_version != PROTOCOL_VERSION:
            reason = f"it speaks protocol version {ready.protocol_version}, this router {PROTOCOL_VERSION}"
            self._log_refused(reason)
            raise SessionEndedError(reason)
        self.ready = ready
        self._is_cut = False
        self.last_problem = ""
        self.load = ready.load
        self.health.note_ready(self._last_heard, ready.limits.max_num_seqs)
        self._observer.instance_ready(self)

    def _log_refused(self, reason: str) -> None:
        """Once for each reason, not once for each try."""
        if reason != self._refused_reason:
            self._refused_reason = reason
            logger.warning("%s instance at %s is refused: %s", self.role, self.address, reason)

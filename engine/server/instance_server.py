"""The busy loop: what routers ask for goes into the engine, what its steps make goes back.

Runs on the main thread, the only one that touches the engine::

    socket thread ── Inbox ──> add, abort ── step ── one message a session ──> socket thread

A request with a grammar is added once another thread has compiled it, so that no step waits for that.
"""

from __future__ import annotations

import concurrent.futures
import enum
import logging
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from pdserve.engine.server.counters import RateLimitedWarning, ServerCounters
from pdserve.engine.server.inbox import (
    Abort,
    Add,
    Command,
    Compiled,
    Drain,
    Inbox,
    Listen,
    Page,
    Scrape,
    SessionClosed,
    SocketFailed,
)
from pdserve.engine.server.served_engine import ServedEngine
from pdserve.engine.server.socket_thread import SocketThread
from pdserve.engine.server.watchdog import BlockWatchdog
from pdserve.engine.server.wire_errors import error_output
from pdserve.engine.transfer_poll import get_transfer_poll_s
from pdserve.errors import EngineError, PdserveError, UnavailableError
from pdserve.protocol import AddRequest, RequestOutput, StepOutputs

logger = logging.getLogger(__name__)


class Phase(enum.StrEnum):
    """What an instance is doing, for its HTTP port."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


class InstanceServer:
    """Serves one engine until it is drained or fails.

    Args:
        engine: the engine; the caller closes it.
        socket_thread: the routers' side; `run` starts and closes it.
        inbox: what the socket thread, the HTTP port and signal handlers put in.
        drain_timeout_s: running requests have this long once draining began.
        counters: what to count with.
        pages: what the HTTP port serves from the engine; called on this thread.
        watchdog: looks after the KV blocks between steps.
    """

    def __init__(
        self,
        engine: ServedEngine,
        socket_thread: SocketThread,
        inbox: Inbox,
        *,
        drain_timeout_s: float,
        counters: ServerCounters,
        pages: Mapping[Page, Callable[[], bytes]],
        watchdog: BlockWatchdog | None = None,
    ) -> None:
        self.phase = Phase.STARTING
        self._engine = engine
        self._socket_thread = socket_thread
        self._inbox = inbox
        self._drain_timeout_s = drain_timeout_s
        self._counters = counters
        self._pages = pages
        self._watchdog = watchdog
        self._grammar_thread = concurrent.futures.ThreadPoolExecutor(1, "grammars")
        """One: grammars wait for each other, not requests without one."""
        self._live: dict[str, tuple[int, str]] = {}
        """Session and the router's own id of every request that has not ended, by the engine's id."""
        self._listeners: set[int] = set()
        """Sessions that hear how the prefix index changes."""
        self._load = engine.get_load()
        self._busy_s = time.monotonic()
        """When something last happened but waiting for transfers."""
        self._was_busy = False
        """Whether it happened in the last turn."""
        self._drain_deadline_s: float | None = None
        self._warnings = RateLimitedWarning(logger)

    def run(self) -> int:
        """Serve. Returns the process's exit status: 0 after a drain, 1 when the engine failed."""
        self._socket_thread.start()
        self.phase = Phase.READY
        try:
            while not self._is_drained():
                self._turn()
        except Exception:
            logger.exception("the engine failed; its requests are given back and this process ends")
            self._end_live_requests(EngineError("the engine failed; the request may be tried elsewhere"))
            return 1
        else:
            self._end_live_requests(UnavailableError("the instance ended before the request did"))
            return 0
        finally:
            self.phase = Phase.ENDED
            self._grammar_thread.shutdown(cancel_futures=True)
            self._socket_thread.close()

    def _turn(self) -> None:
        commands = self._inbox.take(self._wait_s())
        for command in commands:
            self._handle(command)
        outputs: list[RequestOutput] = []
        self._was_busy = bool(commands) or self._engine.has_work()
        if self._engine.has_work() or self._engine.has_transfers():
            outputs = self._engine.step()
        if self._was_busy:
            self._busy_s = time.monotonic()
        if self._watchdog is not None:
            self._watchdog.poll()
        if outputs or commands:
            self._load = self._engine.get_load()
            self._publish(outputs)
        self._publish_cache_events()

    def _wait_s(self) -> float | None:
        """How long the loop may wait for commands: not at all with work, for ever with nothing to do."""
        if self._engine.has_work():
            return 0
        if self._engine.has_transfers():
            # A busy turn may leave something to be told to the connector: a sending that is due. It hears at once.
            return 0 if self._was_busy else get_transfer_poll_s(time.monotonic() - self._busy_s)
        waits_s = [] if self._watchdog is None else [self._watchdog.get_wait_s()]
        if self._drain_deadline_s is not None:
            waits_s.append(max(self._drain_deadline_s - time.monotonic(), 0))
        return min(waits_s, default=None)

    # --- in -------------------------------------------------------------------------------------------

    def _handle(self, command: Command) -> None:
        match command:
            case Add(session, request):
                self._add(session, request)
            case Compiled(request, compiling):
                if request.request_id in self._live:
                    self._take(request, compiling)
            case Abort(session, request_ids):
                self._abort(_engine_request_id(session, request_id) for request_id in request_ids)
            case SessionClosed(session):
                self._abort([key for key, (owner, _) in self._live.items() if owner == session])
                self._listeners.discard(session)
                if not self._listeners:
                    self._engine.ignore_cache()
            case Listen(session):
                self._publish_cache_events()
                self._listeners.add(session)
                self._socket_thread.send_cache_events([session], self._engine.listen_to_cache())
            case Drain(reason):
                self._start_drain(reason)
            case Scrape(page, answer):
                if answer.set_running_or_notify_cancel():
                    answer.set_result(self._pages[page]())
            case SocketFailed():
                raise EngineError("the socket to the routers failed")

    def _add(self, session: int, request: AddRequest) -> None:
        key = _engine_request_id(session, request.request_id)
        if key in self._live:
            # Any answer would be taken for the answer of the request that has this id already.
            self._counters.refused_requests.labels("duplicate_request_id").inc()
            self._warnings.warn("duplicate", "a router used the id of a live request again; dropped")
            return
        self._live[key] = (session, request.request_id)
        request = msgspec.structs.replace(request, request_id=key)
        if request.sampling.grammar is None:
            self._take(request)
            return
        compiling = self._grammar_thread.submit(self._engine.compile_grammar, request.sampling.grammar)
        compiling.add_done_callback(lambda done: self._inbox.put(Compiled(request, done)))

    def _take(self, request: AddRequest, compiling: concurrent.futures.Future[None] | None = None) -> None:
        """Give the engine a request under its own id; ``compiling`` is done."""
        key = request.request_id
        try:
            if compiling is not None:
                compiling.result()
            if self._drain_deadline_s is not None:
                raise UnavailableError("the instance is draining and takes no new requests")
            self._engine.add_request(request)
        except PdserveError as error:
            self._refuse(key, error)
        except Exception:
            # One request must not cost the others their engine.
            logger.exception("the engine failed to take a request")
            self._engine.abort_requests([key])
            self._refuse(key, EngineError("the engine failed to take the request"))

    def _refuse(self, key: str, error: PdserveError) -> None:
        self._counters.refused_requests.labels(error.code).inc()
        self._publish([error_output(key, error)])

    def _abort(self, keys: Iterable[str]) -> None:
        """Also those that have ended here: their KV may wait for a consumer that will not come."""
        aborted = list(keys)
        for key in aborted:
            self._live.pop(key, None)
        if aborted:
            self._engine.abort_requests(aborted)

    # --- out ------------------------------------------------------------------------------------------

    def _publish(self, outputs: Iterable[RequestOutput]) -> None:
        """Send outputs, named as each router knows its requests, in one message for each session."""
        by_session: dict[int, list[RequestOutput]] = {}
        for output in outputs:
            owner = self._live.get(output.request_id)
            if owner is None:
                continue
            if output.finish_reason is not None:
                del self._live[output.request_id]
            session, request_id = owner
            named = msgspec.structs.replace(output, request_id=request_id)
            by_session.setdefault(session, []).append(named)
        load = msgspec.structs.replace(self._load, draining=self._drain_deadline_s is not None)
        self._socket_thread.send(
            {session: StepOutputs(outputs=named, load=load) for session, named in by_session.items()}, load
        )

    def _publish_cache_events(self) -> None:
        events = self._engine.take_cache_events() if self._listeners else None
        if events is not None:
            self._socket_thread.send_cache_events(list(self._listeners), events)

    def _end_live_requests(self, error: PdserveError) -> None:
        self._publish([error_output(key, error) for key in self._live])

    # --- the end --------------------------------------------------------------------------------------

    def _start_drain(self, reason: str) -> None:
        if self._drain_deadline_s is not None:
            return
        self._drain_deadline_s = time.monotonic() + self._drain_timeout_s
        self.phase = Phase.DRAINING
        logger.info("draining (%s): %s running requests have %.1f s", reason, len(self._live), self._drain_timeout_s)

    def _is_drained(self) -> bool:
        if self._drain_deadline_s is None:
            return False
        if time.monotonic() >= self._drain_deadline_s:
            logger.warning("drain deadline: %s requests are given back", len(self._live))
            return True
        return not (self._live or self._engine.has_work() or self._engine.has_transfers())


def _engine_request_id(session: int, request_id: str) -> str:
    return f"{session}/{request_id}"

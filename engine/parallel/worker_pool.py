"""An engine's worker processes, as the engine's process sees them: started, told, listened to, ended."""

from __future__ import annotations

import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import msgspec

from pdserve.engine.config import EngineConfig
from pdserve.engine.parallel.broadcast_buffer import BroadcastBuffer
from pdserve.engine.parallel.host_group import create_exchanges
from pdserve.engine.parallel.messages import Answer, Refused, WorkerStart
from pdserve.errors import ConfigError, EngineError
from pdserve.kv_layout import Rank

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Answer)
_END_S = 10.0
"""How long workers may take to close their connectors."""
_NUM_LOOKS = 8
"""A time limit is waited for in as many pieces, so that a machine that was suspended counts as one piece of silence."""
_STATUS_S = 1.0
"""How long after its connection broke a worker's exit status may come."""


class WorkerPool:
    """One process for each rank. Used by one thread; another one watches the processes.

    Args:
        ranks: all of the engine's, in order.

    Raises:
        ConfigError: this system cannot run them.

    Attributes:
        is_lost: a process has ended that was not told to; known only while they are watched.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self.is_lost = False
        self._ends_in_order = False
        self._watcher: threading.Thread | None = None
        self._buffer = BroadcastBuffer.create()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._exchange_fds = create_exchanges(ranks[0])
        self._fds = [self._wake_reader, self._wake_writer, *self._exchange_fds]
        self._rendezvous = Path(tempfile.mkdtemp(prefix="pdserve-ranks-"))

    def start(self, config: EngineConfig, directory: Path, engine_name: str) -> None:
        """Start the processes, once; they begin to load the model.

        Args:
            config: the engine's settings.
            directory: the model's files.
            engine_name: for the workers' logs.
        """
        log_level = logging.getLevelName(logging.getLogger("pdserve").getEffectiveLevel())
        for rank in self._ranks:
            start = WorkerStart(
                config=config,
                directory=str(directory),
                rank=rank,
                rendezvous=str(self._rendezvous / "stages"),
                exchange_fd=self._exchange_fds[rank.pipeline_parallel_rank] if self._exchange_fds else None,
                buffer_fd=self._buffer.fd,
                wake_fd=self._wake_writer,
                process_name=f"{engine_name}/{rank.label}",
                log_level=log_level,
            )
            self._start_one(start)

    def send(self, frame: bytes) -> None:
        """The same frame to all workers.

        Raises:
            EngineError: one has ended.
        """
        try:
            for connection in self._connections:
                connection.send_bytes(frame)
        except OSError as error:
            raise self._build_loss() from error

    def broadcast(self, message: bytes) -> None:
        """A large message to all workers, through shared memory; all of them have answered the last one.

        Raises:
            EngineError: one has ended.
        """
        self.send(msgspec.msgpack.encode(self._buffer.write(message)))

    def collect(self, kind: type[T], timeout_s: float | None = None) -> list[T]:
        """One answer of each worker, in the order of ranks; waits for all.

        Args:
            kind: of the answers.
            timeout_s: how long none of those waited for may answer; None = for ever.

        Raises:
            ConfigError: a worker says that it cannot start.
            EngineError: one has ended, or does not answer.
        """
        answers: dict[int, T] = {}
        pending = {connection: index for index, connection in enumerate(self._connections)}
        while pending:
            for ready in self._wait_for_any(list(pending), timeout_s):
                assert isinstance(ready, Connection)
                answer = self._receive(ready)
                if isinstance(answer, Refused):
                    self._ends_in_order = False
                    raise ConfigError(answer.message)
                assert isinstance(answer, kind)
                answers[pending.pop(ready)] = answer
        return [answers[index] for index in range(len(self._ranks))]

    def watch(self, on_news: Callable[[], None]) -> None:
        """Steps begin: notice from now on, also between them, what comes from the workers.

        Args:
            on_news: called on another thread when a connector's half has something to report, or a process has ended.
        """
        self._ends_in_order = True
        self._watcher = threading.Thread(target=self._watch, args=(on_news,), name="worker-watch", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End all workers, at once unless they serve steps and none has failed; idempotent."""
        processes, self._processes = self._processes, []
        for connection in self._connections if self._ends_in_order else ():
            try:
                connection.send_bytes(b"")
            except OSError:
                self._ends_in_order = False
        for process in processes:
            self._end(process)
        if self._watcher is not None:  # the end of the first process is its end
            self._watcher.join()
        self._watcher = None
        for connection in self._connections:
            connection.close()
        self._connections = []
        self.end_rendezvous()
        self._buffer.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def end_rendezvous(self) -> None:
        """The stages have found each other: what helped them goes, before anything can leave it behind."""
        shutil.rmtree(self._rendezvous, ignore_errors=True)

    def _watch(self, on_news: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        for connection in self._connections:
            poll.register(connection.fileno(), select.POLLRDHUP)
        while not self.is_lost:
            for fd, _ in poll.poll():
                if fd == self._wake_reader:
                    os.read(fd, 4096)
                else:
                    self.is_lost = True
            on_news()

    def _start_one(self, start: WorkerStart) -> None:
        connection, theirs = Pipe()
        with theirs:
            shared = (start.buffer_fd, start.wake_fd, start.exchange_fd)
            fds = [theirs.fileno(), *(fd for fd in shared if fd is not None)]
            command = [sys.executable, "-m", "pdserve.engine.parallel.worker_process", str(fds[0])]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds))
        self._connections.append(connection)
        connection.send_bytes(msgspec.msgpack.encode(start))

    def _wait_for_any(self, pending: list[Connection], timeout_s: float | None) -> Sequence[object]:
        """Those of the connections that can be read from; at least one."""
        if timeout_s is None:
            return wait(pending)
        for _ in range(_NUM_LOOKS):
            if ready := wait(pending, timeout_s / _NUM_LOOKS):
                return ready
        self._ends_in_order = False
        silent = ", ".join(self._ranks[self._connections.index(connection)].label for connection in pending)
        raise EngineError(f"worker processes of this engine have not answered for {timeout_s:g} s: {silent}")

    def _receive(self, connection: Connection) -> Answer:
        try:
            return self._decoder.decode(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._build_loss() from error

    def _build_loss(self) -> EngineError:
        """Which workers have ended, in words; the others are not waited for any more."""
        self._ends_in_order = False
        deadline_s = time.monotonic() + _STATUS_S
        while all(process.poll() is None for process in self._processes) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        ended = [
            f"{rank.label} ({_describe_status(process.returncode)})"
            for rank, process in zip(self._ranks, self._processes, strict=True)
            if process.returncode is not None
        ]
        return EngineError(f"worker processes of this engine have ended: {', '.join(ended) or 'not known which'}")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if self._ends_in_order and not _wait(process, _END_S):
            logger.warning("worker process %d does not end; it is killed", process.pid)
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _describe_status(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

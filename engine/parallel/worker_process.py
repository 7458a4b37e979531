"""A worker's process: one rank, told what to do by the engine's process, gone when that one is.

Run as ``python -m pdserve.engine.parallel.worker_process FD``, where FD is its end of a socket pair.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.shard import Shard
from pdserve.engine.parallel.broadcast_buffer import BroadcastBuffer
from pdserve.engine.parallel.host_group import HostGroup
from pdserve.engine.parallel.messages import (
    Answer,
    Loaded,
    Refused,
    Started,
    StepCodec,
    WorkerStart,
    build_step_codec,
)
from pdserve.engine.sampling.grammar_masks import GrammarCompiler
from pdserve.engine.worker import Worker, WorkerPlan
from pdserve.errors import ConfigError
from pdserve.log import configure_logging

logger = logging.getLogger("pdserve.worker")

REFUSED_STATUS = 2


def main() -> int:
    """Serve steps until the engine says that there are no more."""
    connection = Connection(int(sys.argv[1]))
    # A terminal or a supervisor signals whole groups of processes; the engine decides when its workers end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_engine, args=(connection.fileno(),), daemon=True).start()
    start = msgspec.msgpack.decode(connection.recv_bytes(), type=WorkerStart)
    configure_logging(start.process_name, start.log_level)
    try:
        codec = build_step_codec(start.config.connector, start.rank)
        runner, samples = _build_runner(start, connection)
    except ConfigError as error:
        _answer(connection, Refused(error.message))
        return REFUSED_STATUS
    try:
        _answer(connection, Started())
        _serve(connection, BroadcastBuffer(start.buffer_fd), runner, codec, samples=samples)
    finally:
        runner.close()
    return 0


def _build_runner(start: WorkerStart, connection: Connection) -> tuple[ModelRunner, bool]:
    """The rank's runner, and whether its tokens are those that count."""
    group = HostGroup(start.rank, start.exchange_fd, Path(start.rendezvous))
    worker = Worker(start.config, Path(start.directory), group)
    _answer(connection, Loaded(worker.numerics))
    plan = msgspec.msgpack.decode(connection.recv_bytes(), type=WorkerPlan)
    config = worker.model_config
    grammars = GrammarCompiler(Path(start.directory), config.vocab_size, frozenset(config.eos_token_ids))
    runner = worker.build_runner(plan, grammars, partial(_wake_engine, start.wake_fd))
    return runner, Shard(config, start.rank).samples


def _serve(
    connection: Connection, buffer: BroadcastBuffer, runner: ModelRunner, codec: StepCodec, *, samples: bool
) -> None:
    while announcement := connection.recv_bytes():
        step, sampled_token_ids = codec.decode_step(buffer.read(msgspec.msgpack.decode(announcement, type=int)))
        if not samples:
            runner.append_tokens(sampled_token_ids)
        connection.send_bytes(codec.encode_output(runner.execute_model(step)))


def _wake_engine(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):  # a full pipe wakes it already
        os.write(fd, b"\0")


def _answer(connection: Connection, answer: Answer) -> None:
    connection.send_bytes(msgspec.msgpack.encode(answer))


def _end_with_engine(fd: int) -> None:
    """End this process, whatever it does, when the engine's has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def run() -> None:
    """The process's main: gloo's threads do not survive an orderly end, so there is none."""
    status = 1
    try:
        status = main()
    except EOFError:
        logger.warning("the engine's process has ended")
    except Exception:
        logger.exception("this worker failed, and the engine with it")
    finally:
        logging.shutdown()
        os._exit(status)


if __name__ == "__main__":
    run()

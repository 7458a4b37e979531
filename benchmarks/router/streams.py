"""How many tokens one router streams on one core, and what a token costs it.

Instances make a step for all their streams at a fixed pace, the clients are two processes, and the router has a core
of its own. Its processor time is read from /proc, its system calls are counted by strace in a run of their own, which
strace slows down. Before, the clients read the same answers from a server that only writes them, as fast as it can:
what they take then is far above what they are asked to take.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from replayed import ALL_CORES, Service, get_router_pid, on_cores, read_process, run_service
from stream_clients import StreamAnswer, build_request, run_clients

from pdserve.bench.show.tables import format_table

_NUM_CLIENTS = 2
_PROMPT = [5000, 6000, 7000, 8000]
_SYSCALL_LINE = re.compile(r"^ +[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", re.MULTILINE)
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1,"model":"m",'
    b'"system_fingerprint":"fp_0123456789ab","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
)


def build_requests(num_streams: int, num_tokens: int) -> list[list[bytes]]:
    """One request for each of the streams, no two with the same answer."""
    return [[build_request({"prompt": _PROMPT, "seed": seed, "max_tokens": num_tokens})] for seed in range(num_streams)]


def measure_span_s(answers: Sequence[StreamAnswer]) -> float:
    """From the first request to the last byte."""
    return max(a.arrivals_s[-1] for a in answers) - min(a.sent_s for a in answers)


def check_whole(answers: Sequence[StreamAnswer], num_tokens: int) -> None:
    """Refuse to measure answers that are not what was asked for."""
    lost = [a for a in answers if not a.is_whole or a.num_tokens != num_tokens]
    if lost:
        raise RuntimeError(
            f"{len(lost)} of {len(answers)} answers are not whole; the first: {lost[0].error or lost[0]}"
        )


def run(cases: Sequence[tuple[int, float]], num_tokens: int) -> str:
    """The table.

    Args:
        cases: streams at a time, and milliseconds between two steps of the instance.
        num_tokens: of each stream.
    """
    rows = [
        [
            "streams, pace",
            "tokens/s",
            "of the pace",
            "events a token",
            "router's core",
            "µs of processor a token",
            "tokens a core-second",
            "bytes a token",
            "system calls a token",
        ]
    ]
    for num_streams, step_ms in cases:
        with run_service(decode=[["--step-ms", str(step_ms)]]) as service:
            run_clients(service.port, build_requests(num_streams, 10), _NUM_CLIENTS)
            rows.append(_measure_case(service, num_streams, step_ms, num_tokens))
    return format_table(rows) + "\n" + _describe_clients(num_tokens)


def _measure_case(service: Service, num_streams: int, step_ms: float, num_tokens: int) -> list[str]:
    pid = get_router_pid(service)
    requests = build_requests(num_streams, num_tokens)
    before_s = read_process(pid).cpu_s
    answers = run_clients(service.port, requests, _NUM_CLIENTS)
    cpu_s = read_process(pid).cpu_s - before_s
    check_whole(answers, num_tokens)
    total, span_s = num_streams * num_tokens, measure_span_s(answers)
    num_calls = _count_syscalls(service, requests)
    pace = num_streams * 1000 / step_ms if step_ms else None
    return [
        f"{num_streams}, {f'{step_ms:g} ms a step' if step_ms else 'as fast as it goes'}",
        f"{total / span_s:,.0f}",
        "-" if pace is None else f"{total / span_s / pace:.0%}",
        f"{sum(a.num_events for a in answers) / total:.2f}",
        f"{cpu_s / span_s:.0%}",
        f"{1e6 * cpu_s / total:.1f}",
        f"{total / cpu_s:,.0f}",
        f"{sum(a.num_bytes for a in answers) / total:,.0f}",
        "-" if num_calls is None else f"{num_calls / total:.2f}",
    ]


def _count_syscalls(service: Service, requests: list[list[bytes]]) -> int | None:
    """System calls of all the router's threads while it answers; None without strace."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with tempfile.NamedTemporaryFile() as summary:
        command = [strace, "-f", "-c", "-o", summary.name, "-p", str(get_router_pid(service))]
        tracing = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracing.stderr is not None
        if "attached" not in tracing.stderr.readline():
            tracing.wait()
            return None
        run_clients(service.port, requests, _NUM_CLIENTS)
        tracing.send_signal(signal.SIGINT)
        tracing.communicate()
        counts = {name: int(count) for count, name in _SYSCALL_LINE.findall(Path(summary.name).read_text())}
    return sum(count for name, count in counts.items() if name != "total")


# --- the clients by themselves ------------------------------------------------------------------------


class _Answering(asyncio.Protocol):
    """Answers each request with ready-made events, several at a time."""

    def __init__(self, num_tokens: int) -> None:
        self._piece = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
        self._num_left = num_tokens
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._write_next()

    def _write_next(self) -> None:
        assert self._transport is not None
        self._num_left -= 1
        if self._num_left < 0:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        self._transport.write(self._piece)
        asyncio.get_running_loop().call_soon(self._write_next)


async def _serve(connection: Connection, num_tokens: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Answering(num_tokens), "127.0.0.1", 0)
    connection.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _run_server(connection: Connection, num_tokens: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(connection, num_tokens))


def _describe_clients(num_tokens: int) -> str:
    ours, theirs = multiprocessing.Pipe()
    with on_cores(frozenset({min(ALL_CORES)})):
        server = multiprocessing.Process(target=_run_server, args=(theirs, num_tokens), daemon=True)
        server.start()
    try:
        answers = run_clients(ours.recv(), build_requests(64, num_tokens), _NUM_CLIENTS)
    finally:
        server.terminate()
    rate = 64 * num_tokens / measure_span_s(answers)
    return f"The clients by themselves, 64 streams of a server that only writes: {rate:,.0f} events/s"

"""What the others notice of a client that reads nothing, and when that client is dropped.

The same streams run twice, without it and beside it. The instance makes tokens for all of them at one pace, so the time
between two events of one stream shows whether the router held anybody up.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

from replayed import Service, get_router_pid, read_process, run_service
from stream_clients import StreamAnswer, build_request, run_clients
from streams import build_requests, check_whole

from pdserve.bench.show.tables import format_table

_NUM_STREAMS = 32
_STEP_MS = 5.0
_STALL_TIMEOUT_S = 2.0
_DEADLINE_S = 120.0


def run(num_tokens: int) -> str:
    """The table, and what became of the client that reads nothing."""
    rows = [["between two events, ms", "p50", "p99", "longest", "router's MiB"]]
    decode = ["--step-ms", str(_STEP_MS), "--max-model-len", "10000000"]
    with run_service(decode=[decode], router=["--client-stall-timeout-s", str(_STALL_TIMEOUT_S)]) as service:
        requests = build_requests(_NUM_STREAMS, num_tokens)
        run_clients(service.port, requests, 1)
        rows.append(_describe("32 streams alone", run_clients(service.port, requests, 1), service))
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", service.port))
            # Logprobs make its events long: the buffers on its way fill sooner.
            stalled.sendall(build_request({"prompt": [5000], "max_tokens": 9_000_000, "seed": 1, "logprobs": 5}))
            rows.append(_describe("beside one that reads nothing", run_clients(service.port, requests, 1), service))
            dropped_s = _wait_until_dropped(service)
    return format_table(rows) + f"\nThe client that reads nothing was dropped {dropped_s:.1f} s after it had asked"


def _describe(name: str, answers: Sequence[StreamAnswer], service: Service) -> list[str]:
    check_whole(answers, max(answer.num_tokens for answer in answers))
    gaps_ms = [1000 * gap_s for answer in answers for gap_s in answer.gaps_s]
    mib = read_process(get_router_pid(service)).rss_bytes / (1 << 20)
    p99_ms = statistics.quantiles(gaps_ms, n=100)[-1]
    return [name, f"{statistics.median(gaps_ms):.2f}", f"{p99_ms:.2f}", f"{max(gaps_ms):.1f}", f"{mib:.1f}"]


def _wait_until_dropped(service: Service) -> float:
    deadline_s = time.monotonic() + _DEADLINE_S
    while service.get_metric("client_disconnects_total") < 1:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the client was still connected after {_DEADLINE_S:g} s")
        time.sleep(0.1)
    (dropped,) = [t for t in service.get("/v1/status").json()["recent"] if t["outcome"] == "client_disconnected"]
    return float(dropped["total_ms"]) / 1000

"""What the router holds after many requests, and after instances have come and gone.

One process stands for every instance that joins: it listens at all addresses of the loopback network, and each of them
is an instance of its own to the router.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from replayed import Service, get_router_pid, read_process, run_service
from stream_clients import run_clients
from streams import build_requests, check_whole

from pdserve.bench.show.tables import format_table

_NUM_LANES = 32
_NUM_TOKENS = 3
_NUM_CLIENTS = 2
_MIB = 1 << 20


class _Listing:
    """The file with the pool's instances."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = 0
        self.path.write_text("")

    def write(self, service: Service, *hosts: int) -> None:
        """Make the pool consist of these hosts, and wait until it does."""
        fresh = self.path.with_suffix(".fresh")
        fresh.write_text(f"decode = {[f'127.0.0.{host}:{self.port}' for host in hosts]!r}")
        os.replace(fresh, self.path)
        service.wait_for(0, len(hosts))


def run(num_requests: int, num_joins: int) -> str:
    """The table: the state at the beginning, and after each quarter of the requests and of the joins."""
    rows = [["after", "resident MiB", "open files", "threads", "lines of /metrics"]]
    with tempfile.TemporaryDirectory(prefix="pdserve-router-") as directory:
        listing = _Listing(Path(directory) / "instances.toml")
        options = ["--instances-file", str(listing.path), "--discovery-interval-s", "0.05"]
        with run_service(decode=[["--host", "0.0.0.0"]], router=options, is_listed=False) as service:
            listing.port = service.instances[0].port
            listing.write(service, 1)
            _send(service, num_requests // 50 + 1000)  # timelines of the last 1,000 requests are kept
            _come_and_go(service, listing, range(2, 4))
            rows.append(_describe(service, "warming up"))
            _repeat(num_requests, lambda _, count: _send(service, count), "requests", rows, service)
            _repeat(
                num_joins,
                lambda start, count: _come_and_go(service, listing, range(4 + start, 4 + start + count)),
                "joins and leaves",
                rows,
                service,
            )
    return format_table(rows)


def _repeat(total: int, act: Callable[[int, int], None], name: str, rows: list[list[str]], service: Service) -> None:
    """``act`` in four parts, with a row after each."""
    for quarter in range(4):
        start, end = total * quarter // 4, total * (quarter + 1) // 4
        act(start, end - start)
        rows.append(_describe(service, f"{end:,} {name}"))


def _send(service: Service, num_requests: int) -> None:
    requests = [request for (request,) in build_requests(num_requests, _NUM_TOKENS)]
    lanes = [requests[lane::_NUM_LANES] for lane in range(_NUM_LANES)]
    check_whole(run_clients(service.port, lanes, _NUM_CLIENTS), _NUM_TOKENS)


def _come_and_go(service: Service, listing: _Listing, hosts: range) -> None:
    for host in hosts:
        listing.write(service, 1, host)
        _send(service, 2 * _NUM_LANES)
        listing.write(service, 1)


def _describe(service: Service, name: str) -> list[str]:
    state = read_process(get_router_pid(service))
    num_lines = len(service.get("/metrics").text.splitlines())
    return [name, f"{state.rss_bytes / _MIB:.1f}", str(state.num_fds), str(state.num_threads), str(num_lines)]

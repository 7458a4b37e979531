"""A real router with many clients, many requests, a client that reads nothing, and a second router beside it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import wait_until

from pdserve.text import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))

from replay_instance import ReplayedAnswer
from replay_service import VOCAB_SIZE, Service
from stream_clients import StreamAnswer, build_request, run_clients, run_streams

PROMPT_IDS = [5000, 6000, 7000, 8000]
TIMEOUT_S = 120.0
SETTINGS = ("--slow-start-s", "0", "--heartbeat-timeout-s", str(TIMEOUT_S), "--timeline-capacity", "50")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def ask(seed: int, num_tokens: int, **fields: object) -> bytes:
    return build_request({"prompt": PROMPT_IDS, "seed": seed, "max_tokens": num_tokens, **fields})


def answer_of(tokenizer: Tokenizer, seed: int, num_tokens: int) -> str:
    answer = ReplayedAnswer(PROMPT_IDS, seed, VOCAB_SIZE)
    return tokenizer.decode([answer.token_at(position) for position in range(num_tokens)])


def check_answers(tokenizer: Tokenizer, answers: list[StreamAnswer], seeds: list[int], num_tokens: int) -> None:
    """Every answer is whole, and each seed's has come exactly once."""
    assert [answer for answer in answers if not answer.is_whole or answer.num_tokens != num_tokens] == []
    texts = sorted(answer.text for answer in answers)
    assert texts == sorted(answer_of(tokenizer, seed, num_tokens) for seed in seeds)


def test_thousand_streams_at_once_are_all_exact(service: Service, tokenizer: Tokenizer) -> None:
    decode = service.add("decode")
    service.start(*SETTINGS).wait_for(0, 1)
    seeds = list(range(1000))
    # The instance stands still until all streams are there, however long that takes.
    decode.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(run_clients, service.port, [[ask(seed, 20)] for seed in seeds], 2)
        try:
            wait_until(lambda: service.get_metric("num_requests_running") == 1000, "1,000 streams", TIMEOUT_S)
        finally:
            decode.signal(signal.SIGCONT)
        answers = answering.result(TIMEOUT_S)
    check_answers(tokenizer, answers, seeds, 20)
    assert service.get_metric("num_requests_running") == 0


def test_two_thousand_requests_and_twenty_joins_leave_nothing_behind(
    service: Service, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    port = service.add("decode", "--host", "0.0.0.0").port
    listing = tmp_path / "instances.toml"

    def list_hosts(*hosts: int) -> None:
        fresh = tmp_path / "fresh.toml"
        fresh.write_text(f"decode = {[f'127.0.0.{host}:{port}' for host in hosts]!r}")
        fresh.replace(listing)
        service.wait_for(0, len(hosts))

    def send_requests(num_requests: int) -> None:
        seeds = list(range(num_requests))
        lanes = [[ask(seed, 3) for seed in seeds[lane::10]] for lane in range(10)]
        check_answers(tokenizer, run_streams(service.port, lanes), seeds, 3)

    def count() -> dict[str, int]:
        assert service.router is not None
        directory = Path("/proc") / str(service.router.pid)
        return {
            "threads": len(list((directory / "task").iterdir())),
            "files": len(list((directory / "fd").iterdir())),
            "metrics": len(service.get("/metrics").text.splitlines()),
            "resident_mib": int((directory / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20,
        }

    listing.write_text("")
    service.start(*SETTINGS, "--instances-file", str(listing), "--discovery-interval-s", "0.05", is_listed=False)
    list_hosts(1)
    send_requests(300)
    list_hosts(1, 2)
    list_hosts(1)
    before = count()
    for host in range(3, 23):
        list_hosts(1, host)
        send_requests(100)
        list_hosts(1)
    # Sockets of the last one that left, and of clients, are closed a moment later.
    names = ("threads", "files", "metrics")
    wait_until(lambda: all(count()[name] <= before[name] for name in names), f"counts as {before}")
    assert count()["resident_mib"] - before["resident_mib"] <= 3


def test_client_that_reads_nothing_is_cut_off_and_nobody_else_notices(service: Service, tokenizer: Tokenizer) -> None:
    decode = service.add("decode", "--max-model-len", "10000000")
    service.start(*SETTINGS, "--client-stall-timeout-s", "1").wait_for(0, 1)
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", service.port))
        stalled.sendall(ask(0, 9_000_000, logprobs=5))
        wait_until(lambda: service.get_metric("generation_tokens_total") > 0, "the stalled stream's first token")
        seeds = list(range(1, 21))
        check_answers(tokenizer, run_streams(service.port, [[ask(seed, 50)] for seed in seeds]), seeds, 50)
        wait_until(lambda: decode.stats["aborted"] == 1, "the stalled stream's leg being aborted", TIMEOUT_S)
        wait_until(lambda: service.get_metric("num_requests_running") == 0, "its place being free")
    assert service.get_metric("client_disconnects_total") == 1
    assert "its connection is dropped" in service.log.read_text()


def test_two_routers_load_the_same_pools_together(service: Service, tokenizer: Tokenizer, tmp_path: Path) -> None:
    instances = [service.add("prefill"), service.add("decode"), service.add("decode")]
    other = Service(tmp_path)
    other.log = tmp_path / "other.log"
    other.instances = instances
    try:
        for router in (service, other):
            router.start(*SETTINGS)
        seeds = list(range(64))
        with ThreadPoolExecutor(2) as pool:
            answering = [
                pool.submit(run_clients, router.wait_for(1, 2).port, [[ask(seed, 30)] for seed in seeds], 1)
                for router in (service, other)
            ]
            for answers in answering:
                check_answers(tokenizer, answers.result(TIMEOUT_S), seeds, 30)
        prefill, *decodes = (instance.stats for instance in instances)
        assert prefill["added"] == 128
        assert sum(stats["with_kv"] for stats in decodes) == 128
        assert min(stats["added"] for stats in decodes) > 0
    finally:
        other.instances = []
        other.close()

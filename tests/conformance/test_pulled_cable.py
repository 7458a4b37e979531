"""A cable that is pulled between two machines: what is on its way is lost without a word; it costs a bounded time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from pdserve.connectors import load_connector
from pdserve.connectors.testing import Bench
from pdserve.connectors.testing.checks import CHECKS
from pdserve.connectors.testing.faults.peer_process import PeerProcess
from pdserve.connectors.testing.faults.severed_network import SeveredNetwork
from pdserve.connectors.testing.free_port import find_free_port
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.runner import Verdict, run_check
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.connectors.testing.violations import NotOfferedError
from pdserve.protocol import Role


@pytest.fixture
def network() -> Iterator[SeveredNetwork]:
    try:
        with SeveredNetwork() as network:
            yield network
    except NotOfferedError as missing:
        pytest.skip(str(missing))


def test_a_redis_server_across_the_cable(network: SeveredNetwork, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    from pdserve.connectors.testing.targets import redis

    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")

    class Target(redis.Target):
        def outage(self) -> AbstractContextManager[None]:
            return network.cable_pulled()

    port = find_free_port()
    reachable = ("--bind", "0.0.0.0", "--protected-mode", "no")
    with closing(RedisProcess(*reachable, port=port, prefix=network.command_prefix)) as server:
        server.start()
        target = Target(load_connector("redis"), {"url": f"redis://{network.address}:{port}"}, tmp_path)
        (check,) = (check for check in CHECKS if check.id == "an_outage_costs_time_and_ends")
        result = run_check(target, check, Patience(30.0))
        assert (result.verdict, result.reason) == (Verdict.PASS, "")


def test_a_nixl_producer_across_the_cable(
    network: SeveredNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl")
    from pdserve.connectors.testing.targets import nixl

    class Target(nixl.Target):
        def build_options(self, engine_name: str, role: Role) -> dict[str, Any]:
            is_far = role is Role.PREFILL
            return {
                **super().build_options(engine_name, role),
                "host": network.address if is_far else network.here,
                "net_devices": network.far_device if is_far else network.device,
                "allowed_peers": f"{network.here}/30",
            }

    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    target = Target(load_connector("nixl"), {}, tmp_path)
    families = itertools.count()
    with (
        closing(Bench(target, "R19", Patience(30.0))) as bench,
        PeerProcess(bench, "peer", prefix=network.command_prefix) as peer,
    ):
        # Built after the peer was started, which would inherit what this engine tells UCX through the environment.
        consumer = bench.build_consumer()

        def fetch_next() -> int:
            prompt = bench.make_prompt(3 * bench.block_size + 1, next(families))
            return bench.fetch(consumer, prompt, peer.hand_over(prompt))

        assert fetch_next() == 3 * bench.block_size + 1
        with network.cable_pulled():
            assert fetch_next() == 0
        assert set(consumer.stats.failures) <= {"timeout", "disconnected", "unreachable"}
        bench.run_until(lambda: fetch_next() > 0, "no transfer succeeds when the cable is in again", "R19")
        assert consumer.num_used_blocks == 0

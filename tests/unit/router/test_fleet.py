"""Who is admitted, with real instances whose sessions are told by hand."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from fake_instances import build_ready, run

from pdserve.errors import UnavailableError
from pdserve.protocol import InstanceLoad, Ready, Role
from pdserve.router.api.status import describe_pool
from pdserve.router.config import PoolSettings
from pdserve.router.fleet import Fleet
from pdserve.router.instance import Instance
from pdserve.router.metrics import RouterMetrics


def with_fleet(test: Any, *, prefill: int = 1, decode: int = 1) -> None:
    async def main() -> None:
        settings = PoolSettings(
            prefill=[f"127.0.0.1:{1000 + i}" for i in range(prefill)],
            decode=[f"127.0.0.1:{2000 + i}" for i in range(decode)],
        )
        fleet = Fleet(settings, router_id="r", model_name="m", metrics=RouterMetrics())
        try:
            result = test(fleet)
            if asyncio.iscoroutine(result):
                await result
        finally:
            await fleet.close()

    run(main())


def come(fleet: Fleet, instance: Instance, ready: Ready | None = None) -> None:
    instance.ready = ready or build_ready(instance.role)
    fleet.instance_ready(instance)


def go(fleet: Fleet, instance: Instance) -> None:
    instance.ready = instance.refusal = None
    fleet.instance_lost(instance)


def test_equal_instances_are_admitted() -> None:
    def test(fleet: Fleet) -> None:
        assert fleet.identity is None
        assert not fleet.is_serving
        come(fleet, fleet.prefill.instances[0])
        assert not fleet.is_serving
        come(fleet, fleet.decode.instances[0])
        assert fleet.is_serving
        assert fleet.prefill.usable
        assert fleet.identity == build_ready(Role.DECODE).identity

    with_fleet(test)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_instance_of_another_model_is_refused_with_what_differs(role: Role, caplog: pytest.LogCaptureFixture) -> None:
    def test(fleet: Fleet) -> None:
        come(fleet, fleet.decode.instances[0])
        other = fleet.prefill.instances[0] if role is Role.PREFILL else fleet.decode.instances[1]
        with caplog.at_level(logging.WARNING, "pdserve"):
            come(fleet, other, build_ready(role, weights="w1"))
        assert not other.is_usable
        assert "weights w0 here, w1 there" in (other.refusal or "")
        (line,) = [record.getMessage() for record in caplog.records]
        assert "is refused" in line
        assert "weights w0 here, w1 there" in line

    with_fleet(test, decode=2)


def test_instances_of_different_parallel_sizes_are_not_paired() -> None:
    def test(fleet: Fleet) -> None:
        come(fleet, fleet.decode.instances[0])
        ready = build_ready(Role.PREFILL)
        identity = msgspec.structs.replace(ready.identity, tensor_parallel_size=3)
        other = fleet.prefill.instances[0]
        come(fleet, other, msgspec.structs.replace(ready, identity=identity))
        assert not other.is_usable
        assert "differs from decode-x's: tensor_parallel_size 1 here, 3 there; start both" in (other.refusal or "")

    with_fleet(test)


def test_refused_instance_defines_the_pool_once_all_others_are_gone() -> None:
    def test(fleet: Fleet) -> None:
        first, second = fleet.decode.instances
        come(fleet, first)
        come(fleet, second, build_ready(Role.DECODE, weights="w1"))
        assert fleet.decode.usable == [first]
        go(fleet, first)
        assert fleet.decode.usable == [second]
        come(fleet, first)
        assert fleet.decode.usable == [second]

    with_fleet(test, prefill=0, decode=2)


def test_decode_defines_the_model_and_a_prefill_instance_of_another_one_keeps_nobody_out() -> None:
    def test(fleet: Fleet) -> None:
        (prefill,), (decode,) = fleet.prefill.instances, fleet.decode.instances
        come(fleet, prefill, build_ready(Role.PREFILL, weights="w1"))
        assert prefill.is_usable
        come(fleet, decode)
        assert (prefill.is_usable, fleet.is_serving) == (False, True)
        assert "weights w0 here, w1 there" in (prefill.refusal or "")
        go(fleet, decode)
        assert prefill.is_usable
        come(fleet, decode, build_ready(Role.DECODE, weights="w1"))
        assert prefill.is_usable

    with_fleet(test)


def test_refused_decode_instance_does_not_take_over_while_the_right_one_restarts() -> None:
    def test(fleet: Fleet) -> None:
        (prefill,), (right, wrong) = fleet.prefill.instances, fleet.decode.instances
        come(fleet, right)
        come(fleet, prefill)
        come(fleet, wrong, build_ready(Role.DECODE, weights="w1"))
        go(fleet, right)
        assert (prefill.is_usable, wrong.is_usable) == (True, False)
        come(fleet, right)
        assert (right.is_usable, prefill.is_usable, wrong.is_usable) == (True, True, False)

    with_fleet(test, decode=2)


def test_status_tells_of_connectors_that_do_not_meet() -> None:
    def test(fleet: Fleet) -> None:
        (prefill,), (decode,) = fleet.prefill.instances, fleet.decode.instances
        come(fleet, decode)
        come(fleet, prefill)
        reasons = []
        for connector in ("fake", "other"):
            prefill.ready = msgspec.structs.replace(build_ready(Role.PREFILL), connector=connector)
            described = describe_pool(fleet.prefill, "p", fleet.decode)
            reasons += [instance["reason"] for instance in described["instances"]]
        assert reasons[0] == ""
        assert reasons[1].startswith("its connector is other, decode's is fake: ")

    with_fleet(test)


def test_role_that_does_not_fit_the_pool_is_refused_and_whoever_asks_hears_why() -> None:
    def test(fleet: Fleet) -> None:
        come(fleet, fleet.decode.instances[0], build_ready(Role.PREFILL))
        assert not fleet.is_serving
        with pytest.raises(UnavailableError, match=r"prefill-x is refused \(it was started as a prefill instance"):
            fleet.get_limits()

    with_fleet(test)


def test_draining_instance_gets_no_new_work_and_stays_a_member() -> None:
    def test(fleet: Fleet) -> None:
        (instance,) = fleet.decode.instances
        come(fleet, instance)
        instance.load = InstanceLoad(draining=True)
        fleet.instance_load_changed(instance)
        assert not fleet.is_serving
        assert fleet.decode.members == [instance]
        with pytest.raises(UnavailableError):
            fleet.get_limits()

    with_fleet(test, prefill=0)


def test_limits_are_the_least_of_both_pools() -> None:
    def test(fleet: Fleet) -> None:
        come(fleet, fleet.decode.instances[0])
        ready = build_ready(Role.PREFILL)
        limits = type(ready.limits)(
            max_model_len=32, max_num_seqs=99, max_queue_len=1, num_blocks=7, vocab_size=50000, max_logprobs=5
        )
        fields = {name: getattr(ready, name) for name in Ready.__struct_fields__} | {"limits": limits}
        come(fleet, fleet.prefill.instances[0], Ready(**fields))
        least = fleet.get_limits()
        assert (least.max_model_len, least.max_num_seqs, least.max_queue_len) == (32, 8, 1)
        assert (least.num_blocks, least.vocab_size, least.max_logprobs) == (7, 49152, 5)

    with_fleet(test)


def test_waiting_ends_when_an_instance_comes_and_when_time_is_up() -> None:
    async def test(fleet: Fleet) -> None:
        assert not await fleet.wait_for_usable(Role.DECODE, 0.01)
        waiting = asyncio.create_task(fleet.wait_for_usable(Role.DECODE, 10))
        await asyncio.sleep(0)
        come(fleet, fleet.prefill.instances[0])
        await asyncio.sleep(0)
        assert not waiting.done()
        come(fleet, fleet.decode.instances[0])
        assert await waiting

    with_fleet(test)


def test_patience_with_a_lost_prefill_pool_runs_out_once_for_all_requests() -> None:
    async def test(fleet: Fleet) -> None:
        (instance,) = fleet.prefill.instances
        come(fleet, instance)
        go(fleet, instance)
        assert 0.9 < fleet.prefill_patience_s(1.0) <= 1.0
        assert fleet.prefill_patience_s(0.0) == 0.0

    with_fleet(test)

"""Only an instance's own faults make it rest, and a probe brings it back."""

from __future__ import annotations

import pytest
from fake_instances import BAD_REQUEST, DRAINING, ENGINE_ERROR, OVERLOADED, FakeInstance, run

from pdserve.protocol import FinishReason, RequestOutput, Role, WireError
from pdserve.router.health import HealthSettings, InstanceHealth
from pdserve.router.policies import RoutedRequest, build_policy
from pdserve.router.pool import Pool

SETTINGS = HealthSettings(max_faults=3, ejection_s=5.0, slow_start_s=10.0)


def ended(reason: FinishReason, error: WireError | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", finish_reason=reason, error=error)


FAULT = ended(FinishReason.ERROR, ENGINE_ERROR)


def build(settings: HealthSettings = SETTINGS) -> InstanceHealth:
    health = InstanceHealth(settings)
    health.note_ready(-100.0, max_num_seqs=8)
    return health


def eject(health: InstanceHealth, now_s: float = 0.0) -> None:
    for _ in range(3):
        health.note_output(FAULT, now_s)


def test_faults_in_a_row_eject_it_and_a_passed_probe_brings_it_back() -> None:
    health = build()
    for _ in range(2):
        health.note_output(FAULT, 0.0)
    assert health.may_take(5, 0.0)
    health.note_output(FAULT, 0.0)
    assert not health.may_take(0, 4.9)
    assert health.may_take(0, 5.0)
    assert not health.may_take(1, 5.0), "one probe at a time"
    health.note_output(ended(FinishReason.STOP), 6.0)
    assert health.may_take(5, 6.0)


def test_failed_probe_rests_twice_as_long_up_to_a_minute() -> None:
    health = build()
    eject(health)
    now_s = 0.0
    for rest_s in (5, 10, 20, 40, 60, 60):
        assert not health.may_take(0, now_s + rest_s - 0.1)
        now_s += rest_s
        assert health.may_take(0, now_s)
        health.note_output(FAULT, now_s)


def test_success_between_faults_starts_the_count_anew() -> None:
    health = build()
    for _ in range(10):
        for _ in range(2):
            health.note_output(FAULT, 0.0)
        health.note_output(ended(FinishReason.HANDOFF), 0.0)
    assert health.may_take(5, 0.0)


@pytest.mark.parametrize(
    "output",
    [
        ended(FinishReason.ERROR, BAD_REQUEST),
        ended(FinishReason.ERROR, OVERLOADED),
        ended(FinishReason.ERROR, DRAINING),
        ended(FinishReason.TIMEOUT),
        ended(FinishReason.ABORT),
    ],
)
def test_case_28_what_is_not_its_own_fault_never_counts(output: RequestOutput) -> None:
    health = build()
    for _ in range(100):
        health.note_output(output, 0.0)
    assert health.may_take(100, 0.0)
    assert not health.is_ejected


def test_no_limit_of_faults_never_ejects() -> None:
    health = build(HealthSettings(max_faults=0))
    for _ in range(100):
        health.note_output(FAULT, 0.0)
    assert health.may_take(5, 0.0)


def test_fresh_instance_gets_more_with_time() -> None:
    health = build()
    health.note_ready(0.0, max_num_seqs=8)
    assert [health.may_take(0, 0.0), health.may_take(1, 0.0)] == [True, False]
    assert [health.may_take(3, 5.0), health.may_take(4, 5.0)] == [True, False]
    assert health.may_take(1000, 10.0)


def test_pool_passes_over_who_is_not_trusted_unless_there_is_no_other() -> None:
    class Distrusted(FakeInstance):
        is_trusted = False  # type: ignore[assignment]

    async def main() -> None:
        good, bad = FakeInstance(Role.DECODE, "good"), Distrusted(Role.DECODE, "bad")
        pool = Pool(Role.DECODE, [bad, good], build_policy("round_robin"))  # type: ignore[list-item]
        assert [pool.choose(RoutedRequest()) for _ in range(3)] == [good] * 3
        assert pool.choose(RoutedRequest(), {good.incarnation}) is bad

    run(main())

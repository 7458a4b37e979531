from __future__ import annotations

import pytest

from pdserve.supervisor.placement import share_cores
from pdserve.supervisor.restarts import RestartBudget


@pytest.mark.parametrize(
    ("num_cores", "num_instances", "num_threads", "pin", "threads", "cores"),
    [
        (2, 2, None, True, 1, [[0], [1]]),
        (2, 4, None, True, 1, [None] * 4),
        (8, 3, None, True, 2, [[0, 1], [2, 3], [4, 5]]),
        (8, 2, 3, True, 3, [[0, 1, 2], [3, 4, 5]]),
        (4, 2, 3, True, 3, [None, None]),
        (8, 2, None, False, 4, [None, None]),
        (1, 1, None, True, 1, [[0]]),
    ],
)
def test_cores_are_shared_evenly_and_pinned_only_where_each_has_its_own(
    num_cores, num_instances, num_threads, pin, threads, cores
) -> None:
    placement = share_cores(list(range(num_cores)), num_instances, num_threads=num_threads, pin=pin)
    assert placement.num_threads == threads
    assert list(placement.cores) == cores


def test_five_restarts_in_a_minute_with_growing_delays_then_none() -> None:
    budget = RestartBudget()
    assert [budget.next_delay_s(10.0 * n) for n in range(5)] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert budget.next_delay_s(50.0) is None
    assert budget.next_delay_s(60.5) == 4.0

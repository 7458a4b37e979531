from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from pdserve.bench.workload.arrivals import build_due_times
from pdserve.bench.workload.settings import LoadSettings
from pdserve.errors import ConfigError


def due_times(num_requests: int, rate: float | None, arrivals: str = "poisson", burst_size: int = 1, seed: int = 0):
    return build_due_times(num_requests, rate=rate, arrivals=arrivals, burst_size=burst_size, seed=seed)


def test_a_burst_is_all_at_once() -> None:
    assert due_times(3, None, "burst") == [0.0, 0.0, 0.0]


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert due_times(4, 4.0, "constant") == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_clients() -> None:
    times = due_times(20_001, 5.0)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # of an exponential: as large as the mean
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def test_equal_seeds_give_equal_times_and_others_do_not() -> None:
    assert due_times(50, 2.0, seed=7) == due_times(50, 2.0, seed=7) != due_times(50, 2.0, seed=8)


def test_groups_arrive_together_at_the_same_average_rate() -> None:
    times = due_times(10_000, 8.0, burst_size=4)
    assert times[0:4] == [times[0]] * 4
    assert times[4:8] == [times[4]] * 4
    assert times[4] > times[3]
    assert len(times) / times[-1] == pytest.approx(8.0, rel=0.05)
    assert due_times(5, 1.0, "constant", burst_size=2) == [0.0, 0.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LoadSettings(rate=0.0), "--rate: 0.0 is no rate"),
        (LoadSettings(rate=-1.0), "--rate: -1.0 is no rate"),
        (LoadSettings(rate=float("inf")), "--rate: inf is no rate"),
        (LoadSettings(rate=float("nan")), "--rate: nan is no rate"),
        (LoadSettings(arrivals="poisson"), "--arrivals poisson needs --rate"),
        (LoadSettings(rate=1.0, arrivals="burst"), "takes no --rate"),
        (LoadSettings(burst_size=2), "--burst-size needs --rate"),
    ],
)
def test_settings_that_do_not_go_together(settings: LoadSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.check()


def test_latency_counts_from_the_due_time_only_where_there_is_one() -> None:
    assert LoadSettings(rate=1.0).is_timed
    assert not LoadSettings(max_concurrency=4).is_timed

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from pdserve.protocol import InstanceLoad
from pdserve.router.policies import POLICY_NAMES, LeastLoaded, RoundRobin, build_policy, choose


@dataclass
class Candidate:
    address: str
    load: InstanceLoad = field(default_factory=InstanceLoad)
    num_unreported: int = 0


def loaded(address: str, waiting: int, running: int, unreported: int = 0) -> Candidate:
    return Candidate(address, InstanceLoad(num_waiting=waiting, num_running=running), unreported)


def test_round_robin_goes_round() -> None:
    policy, candidates = RoundRobin(), [Candidate("a"), Candidate("b"), Candidate("c")]
    assert [choose(policy, candidates).address for _ in range(7)] == list("abcabca")


def test_round_robin_gives_a_newcomer_its_turn_and_keeps_the_order_without_the_lost() -> None:
    policy, a, b, c = RoundRobin(), Candidate("a"), Candidate("b"), Candidate("c")
    assert [choose(policy, [a, b]).address for _ in range(3)] == ["a", "b", "a"]
    assert [choose(policy, [a, b, c]).address for _ in range(3)] == ["c", "b", "a"]
    assert [choose(policy, [a, c]).address for _ in range(2)] == ["c", "a"]


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        ([loaded("a", 0, 5), loaded("b", 1, 0)], "b"),
        ([loaded("a", 0, 3), loaded("b", 1, 0)], "a"),
        ([loaded("a", 0, 0, unreported=1), loaded("b", 0, 3)], "b"),
        ([loaded("a", 2, 1), loaded("b", 2, 0)], "b"),
    ],
)
def test_least_loaded_weighs_waiting_four_times(candidates: list[Candidate], best: str) -> None:
    assert choose(LeastLoaded(), candidates).address == best


def test_least_loaded_spreads_equals_evenly() -> None:
    policy, candidates = LeastLoaded(), [Candidate(name) for name in "abcd"]
    chosen = Counter(choose(policy, candidates).address for _ in range(400))
    assert set(chosen.values()) == {100}


def test_burst_between_two_reports_is_spread() -> None:
    policy, candidates = LeastLoaded(), [loaded("a", 0, 2), loaded("b", 0, 0)]
    for _ in range(10):
        choose(policy, candidates).num_unreported += 1
    assert [candidate.num_unreported for candidate in candidates] == [5, 5]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_answers_none_of_an_empty_pool(name: str) -> None:
    assert choose(build_policy(name), []) is None

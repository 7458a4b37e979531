from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from pdserve.errors import ConfigError
from pdserve.protocol import InstanceLoad
from pdserve.router.policies import Policy, RoutedRequest, build_policy, policy_names
from pdserve.router.policies import choose as choose_for
from pdserve.router.policies.least_loaded import LeastLoaded
from pdserve.router.policies.power_of_two import PowerOfTwo
from pdserve.router.policies.prefix_aware import PrefixAware
from pdserve.router.policies.round_robin import RoundRobin
from pdserve.router.policies.session_affinity import SessionAffinity


@dataclass
class Candidate:
    address: str
    load: InstanceLoad = field(default_factory=InstanceLoad)
    num_unreported: int = 0


def choose(policy: Policy, candidates: list[Candidate], request: RoutedRequest | None = None) -> Candidate:
    chosen = choose_for(policy, candidates, request or RoutedRequest())
    assert chosen is not None
    return chosen


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


def test_power_of_two_takes_the_better_of_two_at_random() -> None:
    policy = PowerOfTwo(random.Random(1))
    candidates = [loaded("a", 9, 0), loaded("b", 0, 1), loaded("c", 0, 2), loaded("d", 0, 3)]
    chosen = Counter(choose(policy, candidates).address for _ in range(600))
    # The worst never wins; each other one wins each of its pairs that it is the better of: 3, 2 and 1 of 6.
    assert "a" not in chosen
    assert chosen["b"] > chosen["c"] > chosen["d"] > 50


def knowing(blocks: dict[str, int]) -> RoutedRequest:
    return RoutedRequest(hash_prompt=lambda: [b"x"] * 100, count_known_blocks=lambda address, _: blocks[address])


def test_prefix_aware_goes_where_the_prefix_is_unless_too_much_is_to_do_there() -> None:
    request = knowing({"a": 0, "b": 64, "c": 8})
    a, c = Candidate("a"), Candidate("c")
    assert choose(PrefixAware(), [a, loaded("b", 1, 0), c], request).address == "b"
    assert choose(PrefixAware(), [a, loaded("b", 1, 4), c], request).address == "c"
    assert choose(PrefixAware(), [a, loaded("b", 4, 0), loaded("c", 1, 0)], request).address == "a"


def test_prefix_aware_spreads_what_nobody_knows() -> None:
    policy, candidates = PrefixAware(), [Candidate(name) for name in "abc"]
    request = knowing(dict.fromkeys("abc", 0))
    assert Counter(choose(policy, candidates, request).address for _ in range(30)) == dict.fromkeys("abc", 10)


def test_sessions_stay_and_only_those_of_a_lost_instance_move() -> None:
    candidates = [Candidate(name) for name in "abcd"]

    def place(among: list[Candidate]) -> dict[str, str]:
        return {
            session: choose(SessionAffinity(), among, RoutedRequest(session_id=session)).address
            for session in map(str, range(200))
        }

    before = place(candidates)
    assert before == place(list(reversed(candidates)))
    assert min(Counter(before.values()).values()) > 20
    after = place(candidates[:3])
    assert {session for session in before if before[session] != after[session]} == {
        session for session, address in before.items() if address == "d"
    }


def test_requests_without_a_session_go_to_the_least_loaded() -> None:
    assert choose(SessionAffinity(), [loaded("a", 1, 0), loaded("b", 0, 1)]).address == "b"


def test_digests_are_computed_once_and_only_when_asked_for() -> None:
    calls = []
    request = RoutedRequest(hash_prompt=lambda: calls.append(1) or [b"x"])
    choose(LeastLoaded(), [Candidate("a")], request)
    assert not request.has_digests
    for _ in range(2):
        choose(PrefixAware(), [Candidate("a"), Candidate("b")], request)
    assert request.has_digests
    assert calls == [1]


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_answers_none_of_an_empty_pool(name: str) -> None:
    assert choose_for(build_policy(name), [], RoutedRequest()) is None


def test_policy_of_ones_own_is_found_by_its_class() -> None:
    assert isinstance(build_policy("pdserve.router.policies.power_of_two:PowerOfTwo"), PowerOfTwo)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best", "policy 'best' is unknown; there are least_loaded"),
        ("json:Nothing", "cannot be imported"),
        ("no_such_module:Policy", "cannot be imported"),
        ("json:JSONDecoder", "lacks uses_prefixes"),
    ],
)
def test_policies_that_are_none_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_policy(name)

from __future__ import annotations

from fake_instances import build_identity

from pdserve.protocol import CacheEvents
from pdserve.router.prefix_memory import UNCONFIRMED_S, PrefixMemory, PrefixMode, hash_prompt

DIGESTS = hash_prompt(build_identity(block_size=16), list(range(70)), "")


def test_only_full_blocks_have_digests_and_salts_never_meet() -> None:
    assert len(DIGESTS) == 4
    assert not set(DIGESTS) & set(hash_prompt(build_identity(block_size=16), list(range(70)), "salt"))
    assert hash_prompt(build_identity(block_size=16), [1] * 15, "") == []


def test_known_blocks_are_the_leading_ones() -> None:
    memory = PrefixMemory()
    assert memory.count_known_blocks("a", DIGESTS) == 0
    memory.note("a", DIGESTS[:2], max_blocks=10)
    memory.note("a", DIGESTS[3:], max_blocks=10)
    assert memory.count_known_blocks("a", DIGESTS) == 2
    assert memory.count_known_blocks("a", DIGESTS[:1]) == 1
    assert memory.count_known_blocks("b", DIGESTS) == 0


def test_memory_is_bounded_by_the_instances_blocks_and_ends_with_it() -> None:
    memory = PrefixMemory()
    memory.note("a", DIGESTS[:2], max_blocks=3)
    memory.note("a", [b"x", b"y"], max_blocks=3)
    assert memory.count_known_blocks("a", DIGESTS) == 0
    assert memory.count_known_blocks("a", DIGESTS[1:2]) == 1
    memory.forget("a")
    assert memory.count_known_blocks("a", DIGESTS[1:2]) == 0


def test_what_the_instance_tells_replaces_what_was_thought() -> None:
    memory, digests = PrefixMemory(), [b"a", b"b", b"c"]
    memory.note("x", digests, 100)
    assert memory.mode("x") is PrefixMode.APPROXIMATE
    memory.apply("x", CacheEvents(stored=[b"a"], replaces_all=True))
    assert memory.mode("x") is PrefixMode.EXACT
    assert memory.count_known_blocks("x", digests) == 1
    memory.apply("x", CacheEvents(stored=[b"b", b"c"]))
    assert memory.count_known_blocks("x", digests) == 3
    memory.apply("x", CacheEvents(evicted=[b"a"]))
    assert memory.count_known_blocks("x", digests) == 0
    memory.forget("x")
    assert memory.mode("x") is PrefixMode.APPROXIMATE


def test_what_is_on_its_way_counts_until_it_is_told_of_or_too_long_ago() -> None:
    now_s = 0.0
    memory, digests = PrefixMemory(clock=lambda: now_s), [b"a", b"b", b"c"]
    memory.apply("x", CacheEvents(stored=[b"a"], replaces_all=True))
    memory.note("x", digests, 100)
    assert memory.mode("x") is PrefixMode.EXACT
    assert memory.count_known_blocks("x", digests) == 3
    memory.apply("x", CacheEvents(stored=[b"b"]))
    now_s = UNCONFIRMED_S + 1
    assert memory.count_known_blocks("x", digests) == 2
    memory.note("x", digests, 100)
    memory.apply("x", CacheEvents(evicted=[b"a", b"c"]))
    assert memory.count_known_blocks("x", digests) == 0
    assert memory.count_known_blocks("x", digests[1:]) == 1
    memory.note("x", digests, max_blocks=1)
    assert memory.count_known_blocks("x", digests) == 0
    assert memory.count_known_blocks("x", digests[1:]) == 2

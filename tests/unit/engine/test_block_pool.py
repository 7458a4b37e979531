"""The block pool: counts, eviction order, the index."""

from __future__ import annotations

from pdserve.engine.block_pool import BlockPool


def test_blocks_are_given_away_in_the_order_they_were_freed_tail_first() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    second = pool.allocate(2)
    for block_id in (*first, *second):
        pool.set_digest(block_id, bytes([block_id]))
    pool.free(first)
    pool.free(second)
    assert pool.allocate(4) == [first[1], first[0], second[1], second[0]]


def test_blocks_without_content_are_given_away_before_indexed_ones() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    pool.set_digest(a, b"a")
    pool.set_digest(b, b"b")
    pool.free([a])
    pool.free([b])
    pool.free([c])
    assert pool.allocate(1) == [c]


def test_hit_revives_a_free_block_and_allocation_forgets_its_content() -> None:
    pool = BlockPool(2)
    (a,) = pool.allocate(1)
    pool.set_digest(a, b"x")
    pool.free([a])
    assert pool.get_cached_block(b"x") == a
    pool.touch([a])
    assert pool.num_free_blocks == 1
    pool.free([a])
    pool.allocate(2)
    assert pool.get_cached_block(b"x") is None
    pool.check()


def test_shared_block_is_free_only_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    (a,) = pool.allocate(1)
    pool.touch([a])
    pool.free([a])
    assert not pool.is_free(a)
    pool.free([a])
    assert pool.is_free(a)


def test_second_block_with_the_same_content_is_not_indexed() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.set_digest(a, b"x")
    pool.set_digest(b, b"x")
    assert pool.get_cached_block(b"x") == a
    pool.free([a, b])
    pool.check()

"""Whoever follows the events knows exactly what the pool's index holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.cache_events import CacheEventLog, build_snapshot
from pdserve.protocol import CacheEvents


def follow(known: set[bytes], events: CacheEvents | None) -> set[bytes]:
    if events is None:
        return known
    before = set() if events.replaces_all else known
    return (before | set(events.stored)) - set(events.evicted)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(0, 9)),
            st.tuples(st.just("take"), st.just(0)),
            st.tuples(st.just("reset"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_events_add_up_to_the_index(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(4)
    pool.events.is_listening = True
    known = follow(set(), build_snapshot(pool.cached_digests))
    for action, number in actions:
        if action == "store":
            (block_id,) = pool.allocate(1)
            pool.set_digest(block_id, bytes([number]))
            pool.free([block_id])
        elif action == "reset":
            pool.reset_index()
        else:
            known = follow(known, pool.events.take(pool.cached_digests))
            assert known == set(pool.cached_digests)
    assert follow(known, pool.events.take(pool.cached_digests)) == set(pool.cached_digests)


def test_nothing_is_kept_while_nobody_listens() -> None:
    log = CacheEventLog(max_events=2)
    for digest in (b"a", b"b", b"c"):
        log.note_stored(digest)
    log.note_cleared()
    assert log.take([b"x"]) is None


def test_full_log_is_replaced_by_the_whole_index() -> None:
    log = CacheEventLog(max_events=2)
    log.is_listening = True
    for digest in (b"a", b"b", b"c", b"d"):
        log.note_stored(digest)
    assert log.take([b"c", b"d"]) == CacheEvents(stored=[b"c", b"d"], replaces_all=True)
    log.note_evicted(b"c")
    assert log.take([b"d"]) == CacheEvents(evicted=[b"c"])
    assert log.take([b"d"]) is None

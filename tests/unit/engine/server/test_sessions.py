from __future__ import annotations

from pdserve.engine.server.sessions import SessionTable
from pdserve.protocol import Hello


def hello(router_id: str = "r", session: str = "s") -> Hello:
    return Hello(router_id=router_id, session=session)


def test_a_session_never_moves_to_another_connection() -> None:
    table = SessionTable()
    first = table.hello(b"1", hello(), 0.0).opened
    moved = table.hello(b"2", hello(), 1.0)
    assert moved.closed == [first]
    assert moved.opened is None
    assert "has ended" in (moved.refused or "")
    assert len(table) == 0


def test_expiry_goes_by_the_last_message_and_can_be_excused() -> None:
    table = SessionTable()
    table.hello(b"1", hello("a"), 0.0)
    table.hello(b"2", hello("b"), 5.0)
    table.hello(b"1", hello("a"), 6.0)
    assert [session.router_id for session in table.expire(5.5)] == ["b"]
    table.excuse(10.0)
    assert table.expire(15.9) == []
    assert [session.router_id for session in table.expire(16.1)] == ["a"]


def test_ten_thousand_sessions_leave_bounded_memory() -> None:
    table = SessionTable()
    for number in range(10_000):
        table.hello(b"1", hello(session=str(number)), 0.0)
    assert len(table) == 1
    assert len(table._ended) == 1024


def test_hello_of_an_ended_session_does_not_end_its_successor() -> None:
    table = SessionTable()
    table.hello(b"a", Hello(router_id="r", session="old"), 0.0)
    table.hello(b"b", Hello(router_id="r", session="new"), 0.0)
    late = table.hello(b"a", Hello(router_id="r", session="old"), 1.0)
    assert late.refused is not None
    assert late.closed == []
    assert [session.name for session in table] == ["new"]

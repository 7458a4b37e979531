from __future__ import annotations

import threading

from pdserve.engine.server.inbox import Drain, Inbox

DEADLINE_S = 30


def test_commands_come_in_order_and_all_at_once() -> None:
    inbox = Inbox()
    inbox.put(Drain("one"))
    inbox.put(Drain("two"))
    assert len(inbox) == 2
    assert inbox.take(None) == [Drain("one"), Drain("two")]
    assert inbox.take(0) == []


def test_many_wake_ups_are_one_and_no_command() -> None:
    inbox = Inbox()
    for _ in range(1000):
        inbox.wake()
    assert len(inbox) == 0
    inbox.put(Drain("behind"))
    assert len(inbox) == 1
    assert inbox.take(None) == [Drain("behind")]
    inbox.wake()
    assert inbox.take(None) == []
    assert inbox.take(0) == []


def test_whoever_waits_for_ever_is_woken_each_time() -> None:
    inbox = Inbox()
    for _ in range(3):
        taken: list[list[object]] = []
        waiter = threading.Thread(target=lambda into=taken: into.append(list(inbox.take(None))))
        waiter.start()
        inbox.wake()
        waiter.join(DEADLINE_S)
        assert taken == [[]]

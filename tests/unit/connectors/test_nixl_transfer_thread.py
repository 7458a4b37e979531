"""How the loop sleeps: whatever comes wakes it, also out of waits shorter than ZMQ's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

pytest.importorskip("nixl")

from pdserve.connectors.nixl import transfer_thread
from pdserve.connectors.nixl.report import TransferReport
from pdserve.connectors.nixl.side_channel import Sockets
from pdserve.connectors.nixl.transfer_thread import TransferThread
from pdserve.connectors.nixl.wake_up import WakeUp

LONG_S = 60.0
"""What a test that fails would wait for."""


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.context.destroy(linger=0)


@pytest.fixture
def wake_up() -> Iterator[WakeUp]:
    wake_up = WakeUp()
    yield wake_up
    wake_up.close()


@pytest.fixture(params=["brief", "long"])
def thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, sockets, wake_up) -> TransferThread:
    """Its waits of `LONG_S` are taken for brief ones, or for long ones."""
    if request.param == "brief":
        monkeypatch.setattr(transfer_thread, "_POLL_UNIT_S", 2 * LONG_S)
    parts = {"agent": None, "consumer": None, "channels": None, "side": None}
    return TransferThread(sockets, wake_up, **parts, report=TransferReport(), clock=time.monotonic)  # type: ignore[arg-type]


def wait_s(thread: TransferThread) -> float:
    began = time.monotonic()
    thread._wait(LONG_S)
    return time.monotonic() - began


def test_a_task_wakes_it(thread: TransferThread, wake_up: WakeUp) -> None:
    threading.Thread(target=wake_up.run_soon, args=(lambda: None,)).start()
    assert wait_s(thread) < LONG_S


def test_a_message_wakes_it(thread: TransferThread, sockets: Sockets) -> None:
    with sockets.context.socket(zmq.PULL) as ours, sockets.context.socket(zmq.PUSH) as theirs:
        ours.bind("inproc://ours")
        theirs.connect("inproc://ours")
        sockets.poller.register(ours, zmq.POLLIN)
        sender = threading.Thread(target=theirs.send, args=(b"message",))
        sender.start()
        received: list[bytes] = []
        while not received:  # what ZMQ's sides say to each other wakes it too
            assert wait_s(thread) < LONG_S
            with contextlib.suppress(zmq.Again):
                received.append(ours.recv(zmq.NOBLOCK))
        sender.join()
        assert received == [b"message"]


def test_messages_are_looked_for_when_one_may_have_come(thread: TransferThread, wake_up: WakeUp, sockets) -> None:
    """A brief wait does not tell what came."""
    is_brief = transfer_thread._POLL_UNIT_S > LONG_S
    wake_up.run_soon(lambda: None)
    assert thread._wait(LONG_S) is is_brief
    with sockets.context.socket(zmq.PULL) as ours, sockets.context.socket(zmq.PUSH) as theirs:
        ours.bind("inproc://ours")
        theirs.connect("inproc://ours")
        sockets.poller.register(ours, zmq.POLLIN)
        theirs.send(b"message")
        assert thread._wait(LONG_S)


def test_descriptors_that_select_does_not_take_cost_the_wait(
    thread: TransferThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("filedescriptor out of range in select()")

    slept: list[float] = []
    monkeypatch.setattr(transfer_thread.select, "select", refuse)
    monkeypatch.setattr(transfer_thread.time, "sleep", slept.append)
    thread._wait(0.0001)
    assert slept == [0.0001]


@pytest.mark.parametrize("lacks_word", [False, True])
def test_an_answer_that_came_during_the_read_is_heard_in_the_same_turn(
    sockets: Sockets, wake_up: WakeUp, lacks_word: bool
) -> None:
    heard: list[str] = []

    class Consumer:
        wants_to_run, is_waiting_for_read, pause_s, next_due = True, False, 0.0, None
        is_waiting_for_word = lacks_word

        def advance(self) -> None:
            heard.append("read")

    class Channels:
        def receive_into(self, consumer: Consumer) -> None:
            heard.append("messages")

    parts = {"agent": None, "consumer": Consumer(), "channels": Channels(), "side": None}
    thread = TransferThread(sockets, wake_up, **parts, report=TransferReport(), clock=time.monotonic)  # type: ignore[arg-type]
    thread._turn()
    assert heard == ["messages", "read", *(["messages"] if lacks_word else [])]

from __future__ import annotations

import contextlib
import socket

from pdserve.connectors.testing.free_port import find_free_port


def test_no_port_comes_twice_and_none_is_one_that_the_system_gives_away() -> None:
    ports = [find_free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < 32768


def test_a_port_that_is_taken_is_passed_over() -> None:
    port = find_free_port()
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # taken by whoever runs beside this test: just as well
            other.bind(("127.0.0.1", port + 1))
        assert find_free_port() not in (port, port + 1)

"""A port for a process that is started later, or again."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket

_FIRST = 11000
_NUM_PORTS = 11000
"""Below what systems give to whoever lets them choose (from 32768 on, on Linux), so that nobody gets one by chance
before it is used; a Redis cluster's second ports, ten thousand further, are too."""

# In turn, so that no port is given twice before it is used, from a place that is another one in each process.
_places = itertools.count(random.SystemRandom().randrange(_NUM_PORTS))


def find_free_port() -> int:
    """A port of loopback that nobody listens on.

    Raises:
        OSError: none of them is free.
    """
    for place in itertools.islice(_places, _NUM_PORTS):
        port = _FIRST + place % _NUM_PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"all ports from {_FIRST} to {_FIRST + _NUM_PORTS - 1} are taken")

"""The router's own end: no new work, what runs goes on, and a load balancer is told first."""

from __future__ import annotations

import asyncio
import logging

from pdserve.errors import UnavailableError
from pdserve.router.admission import Admission

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class Drain:
    """Whether the router still takes work. Lives on the event loop."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether it has begun."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Refuse new work from now on; for good."""
        if not self.is_draining:
            logger.info("draining: new requests are refused")
            self._begun.set()

    def check(self) -> None:
        """Let a request in.

        Raises:
            UnavailableError: the router drains.
        """
        if self.is_draining:
            raise UnavailableError("the router is stopping; try another or try again later")

    async def wait_until_drained(self, admission: Admission, timeout_s: float) -> None:
        """Return once it has begun and nothing runs any more, or ``timeout_s`` after it began."""
        await self._begun.wait()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not admission.is_idle and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)

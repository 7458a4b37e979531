"""What a list of instances is, wherever it comes from, and following it while it changes.

A list that cannot be read changes nothing: the instances that are known go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pdserve.errors import ConfigError
from pdserve.protocol import Role
from pdserve.router.config import endpoint_of

logger = logging.getLogger(__name__)

Members = Mapping[Role, Sequence[str]]
"""Addresses of the instances of each role."""


class DirectoryError(Exception):
    """The list cannot be read now; the text says why."""


class Directory(Protocol):
    """A list of instances that may change."""

    def read(self) -> Members:
        """The list as it is now; may block, and is called on a thread.

        Raises:
            DirectoryError: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Release what it holds; idempotent."""
        ...


async def follow(directory: Directory, apply: Callable[[Members], None], interval_s: float) -> None:
    """Read the list at intervals and apply what is new, until cancelled.

    Args:
        directory: the list.
        apply: gets the whole list, on the event loop, whenever it changed.
        interval_s: between two reads.
    """
    current: Members | None = None
    problem = ""
    try:
        while True:
            try:
                members = await asyncio.to_thread(directory.read)
                check_members(members)
            except DirectoryError as error:
                if str(error) != problem:
                    logger.warning("the list of instances cannot be read, those known go on: %s", error)
                problem = str(error)
            else:
                problem = ""
                if members != current:
                    current = members
                    apply(members)
            await asyncio.sleep(interval_s)
    finally:
        directory.close()


def check_members(members: Members) -> None:
    """Refuse a list that is wrong.

    Raises:
        DirectoryError: an address is none, or stands there twice.
    """
    endpoints: set[str] = set()
    for address in (address for addresses in members.values() for address in addresses):
        try:
            endpoint = endpoint_of(address)
        except ConfigError as error:
            raise DirectoryError(error.message) from None
        if endpoint in endpoints:
            raise DirectoryError(f"instance {address} stands there more than once")
        endpoints.add(endpoint)

"""Instances that announce themselves in Redis, and routers that look there: one key an instance, with a time to live.

An instance writes its key again three times in each life span; one that dies is gone from the list by itself. The
server's password comes from ``PDSERVE_REDIS_PASSWORD``, never from the URL, which is logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from pdserve import env
from pdserve.errors import ConfigError
from pdserve.protocol import Role

if TYPE_CHECKING:
    import redis

TTL_S = 6
_PREFIX = "pdserve:instance:"
_TIMEOUT_S = 2.0
_SCHEMES = ("redis", "rediss")


class AnnouncementError(Exception):
    """Redis cannot be asked; the text says why."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says of itself.

    Attributes:
        role: the pool it is for.
        address: HOST:PORT where routers connect.
        instance_id: its name.
        generation: unique for each start of the process.
    """

    role: Role
    address: str
    instance_id: str
    generation: str


class AnnouncementBoard:
    """The list of announcements at one Redis server. Safe to use from several threads; connects when first used.

    Args:
        url: ``redis://host:port/db`` or ``rediss://…``.

    Raises:
        ConfigError: the URL is none of these or holds a password, or the package for Redis is missing.
    """

    def __init__(self, url: str) -> None:
        _check_url(url)
        try:
            import redis
        except ImportError:
            raise ConfigError("--discovery needs the redis package: pip install 'pdserve[redis]'") from None
        self._failure = redis.RedisError
        self._client: redis.Redis = redis.Redis.from_url(
            url, password=env.get_redis_password(), socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        )

    def put(self, announcement: Announcement, ttl_s: float = TTL_S) -> None:
        """Announce, or announce again; forgotten after ``ttl_s``.

        Raises:
            AnnouncementError: Redis cannot be asked.
        """
        try:
            self._client.set(_key_of(announcement), msgspec.json.encode(announcement), px=round(1000 * ttl_s))
        except self._failure as error:
            raise AnnouncementError(str(error)) from error

    def withdraw(self, announcement: Announcement) -> None:
        """The instance ends.

        Raises:
            AnnouncementError: Redis cannot be asked.
        """
        try:
            self._client.delete(_key_of(announcement))
        except self._failure as error:
            raise AnnouncementError(str(error)) from error

    def read(self) -> list[Announcement]:
        """All that are there; what is no announcement is left out.

        Raises:
            AnnouncementError: Redis cannot be asked.
        """
        try:
            keys = sorted(self._client.scan_iter(match=f"{_PREFIX}*", count=1000))
            values = self._client.mget(keys) if keys else []
        except self._failure as error:
            raise AnnouncementError(str(error)) from error
        found = []
        for value in values:
            try:
                found.append(msgspec.json.decode(value or b"", type=Announcement))
            except msgspec.DecodeError:
                continue
        return found

    def close(self) -> None:
        """Release the connections; idempotent."""
        self._client.close()


def _key_of(announcement: Announcement) -> str:
    return f"{_PREFIX}{announcement.role}:{announcement.address}"


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ConfigError("--discovery must be of the form redis://HOST:PORT/DB")
    if parts.username or parts.password:
        raise ConfigError("--discovery holds a user or password: set PDSERVE_REDIS_PASSWORD instead")

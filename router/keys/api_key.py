"""One API key: how it is made, and how it is written down without itself.

A key is 256 random bits, so its SHA-256 is enough to keep: nobody can guess what was hashed, and neither a salt nor a
slow function would make that harder. Both are for passwords, which have few bits; a slow one would cost each request
tens of milliseconds.

An entry of a list of keys is ``NAME DIGEST`` or ``NAME DIGEST admin``.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

_PREFIX = "pds-"
_DIGEST_PREFIX = "sha256:"
_NUM_RANDOM_BYTES = 32
_MIN_PLAIN_CHARACTERS = 32
_ADMIN = "admin"
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(rf"{_DIGEST_PREFIX}([0-9a-f]{{64}})")
_PLAIN_KEY = re.compile(rf"[!-~]{{{_MIN_PLAIN_CHARACTERS},256}}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that is valid, without itself.

    Attributes:
        name: whom it was given to; several keys of one name share their limits.
        digest: SHA-256 of the key.
        is_admin: whether it may also drain the router.
    """

    name: str
    digest: bytes
    is_admin: bool = False

    def format(self) -> str:
        """The entry that `parse_entries` reads."""
        entry = f"{self.name} {_DIGEST_PREFIX}{self.digest.hex()}"
        return f"{entry} {_ADMIN}" if self.is_admin else entry


def make_secret() -> str:
    """A fresh key, as its owner sends it."""
    return _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)


def digest_of(secret: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(secret).digest()


def check_name(name: str) -> str:
    """``name``, if a key may be called so.

    Raises:
        ValueError: it may not.
    """
    if not _NAME.fullmatch(name):
        raise ValueError("a key's name has 1 to 64 of the characters A-Z a-z 0-9 . _ @ -")
    return name


def parse_entries(entries: Iterable[str], *, takes_plain: bool) -> list[ApiKey]:
    """The keys in a list of entries; empty ones and those that begin with ``#`` are passed over.

    Args:
        entries: the first one has number 1 in errors.
        takes_plain: whether the key itself may stand in a digest's place.

    Raises:
        ValueError: an entry is none, or there is none at all; what it holds is not repeated.
    """
    keys = []
    for number, entry in enumerate(entries, start=1):
        words = entry.split()
        if not words or entry.lstrip().startswith("#"):
            continue
        try:
            keys.append(_parse_entry(words, takes_plain=takes_plain))
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from None
    if not keys:
        raise ValueError("it holds no key")
    return keys


def _parse_entry(words: list[str], *, takes_plain: bool) -> ApiKey:
    if len(words) not in (2, 3) or (len(words) == 3 and words[2] != _ADMIN):
        raise ValueError("it is not of the form NAME DIGEST [admin]; pdserve keys api --name NAME prints one")
    return ApiKey(check_name(words[0]), _parse_digest(words[1], takes_plain=takes_plain), is_admin=len(words) == 3)


def _parse_digest(word: str, *, takes_plain: bool) -> bytes:
    digest = _DIGEST.fullmatch(word)
    if digest is not None:
        return bytes.fromhex(digest[1])
    if not takes_plain:
        raise ValueError("its digest is not sha256: and 64 hexadecimal digits; pdserve keys api makes it")
    if not _PLAIN_KEY.fullmatch(word):
        raise ValueError(f"its key must have {_MIN_PLAIN_CHARACTERS} to 256 printable characters without spaces")
    return digest_of(word.encode())

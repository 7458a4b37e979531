"""CURVE keys in files: a pair of its own for each process or group, and the public keys of those it speaks with.

A file holds lines ``NAME KEY``, a key as 64 hexadecimal digits; lines that begin with ``#`` are passed over. So the
list of those that are spoken with is their ``.public`` files, one after the other. Source: CurveZMQ, RFC 26.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from pdserve.errors import ConfigError

_KEY = re.compile(r"[0-9a-f]{64}")


class CurveKeyPair(NamedTuple):
    """One side's own keys, 32 bytes each."""

    public: bytes
    secret: bytes


def make_key_pair(name: str, directory: Path) -> tuple[Path, Path]:
    """Write a fresh pair to ``NAME.secret``, which only its owner may read, and ``NAME.public``; returns both paths.

    Raises:
        ConfigError: a file is there already, or cannot be written.
    """
    public, secret = (z85.decode(key).hex() for key in zmq.curve_keypair())
    secret_path, public_path = directory / f"{name}.secret", directory / f"{name}.public"
    for path, key, mode in ((secret_path, secret, 0o600), (public_path, public, 0o644)):
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as file:
                file.write(f"{name} {key}\n")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
    return secret_path, public_path


def read_key_pair(path: Path, flag: str) -> CurveKeyPair:
    """The pair whose secret key is in a file.

    Args:
        path: the ``.secret`` file.
        flag: the setting that names it, for errors.

    Raises:
        ConfigError: the file cannot be read, others may read it, or it does not hold one key.
    """
    keys = read_key_file(path, flag)
    if len(keys) != 1:
        raise ConfigError(f"{flag} {path}: it holds {len(keys)} keys; give the .secret file of one key pair")
    if path.stat().st_mode & 0o007:
        raise ConfigError(f"{flag} {path}: others may read it; chmod 600 it")
    (secret,) = keys.values()
    return CurveKeyPair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def read_key_file(path: Path, flag: str) -> dict[str, bytes]:
    """The keys in a file, by name.

    Args:
        path: the file.
        flag: the setting that names it, for errors.

    Raises:
        ConfigError: the file cannot be read, holds no key or something else, or one name twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: it is no text") from None
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _KEY.fullmatch(words[1]):
            raise ConfigError(f"{flag} {path}: line {number} is not of the form NAME KEY, with 64 hexadecimal digits")
        if words[0] in keys:
            raise ConfigError(f"{flag} {path}: line {number} names {words[0]} again")
        keys[words[0]] = bytes.fromhex(words[1])
    if not keys:
        raise ConfigError(f"{flag} {path}: it holds no key")
    return keys

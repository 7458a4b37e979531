"""``pdserve keys``: makes the keys that clients, routers and instances show one another."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.peers.curve_keys import make_key_pair
from pdserve.router.keys.api_key import ApiKey, check_name, digest_of, make_secret
from pdserve.settings import load_settings, setting

KINDS = {
    "api": "a key for a client of a router, and its line for --api-keys-file",
    "curve": "a key pair for a router or an instance, in two files",
}


@dataclass(frozen=True)
class ApiKeySettings:
    """Whose key it is."""

    name: str = setting("", help="whom it is for; limits and the log go by this name")
    admin: bool = setting(False, help="it may also drain the router")


@dataclass(frozen=True)
class ApiKeyConfig:
    """All settings of ``pdserve keys api``."""

    key: ApiKeySettings = field(default_factory=ApiKeySettings)


@dataclass(frozen=True)
class CurveKeySettings:
    """Whose keys they are, and where they go."""

    name: str = setting("", help="of the router or instance they are for, or of a group that shares them")
    directory: str = setting(".", help="where NAME.secret and NAME.public are written", metavar="PATH")


@dataclass(frozen=True)
class CurveKeyConfig:
    """All settings of ``pdserve keys curve``."""

    key: CurveKeySettings = field(default_factory=CurveKeySettings)


def run(argv: Sequence[str]) -> int:
    """Make a key; returns the exit status.

    Raises:
        ConfigError: there is no such kind of key, a setting is wrong, or a file cannot be written.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_help_text())
        return 0 if argv else 2
    kind, *rest = argv
    if kind not in KINDS:
        nearest = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown kind of key {kind}; the nearest known one is {nearest} (pdserve keys --help)")
    return _make_api_key(rest) if kind == "api" else _make_curve_keys(rest)


def _make_api_key(argv: Sequence[str]) -> int:
    settings = load_settings(
        ApiKeyConfig,
        prog="pdserve keys api",
        description="Make an API key: the key goes to standard error, its line for --api-keys-file to standard output.",
        examples=["pdserve keys api --name alice >> api-keys", "pdserve keys api --name ops --admin"],
        argv=argv,
    ).key
    secret = make_secret()
    key = ApiKey(_checked(settings.name), digest_of(secret.encode()), settings.admin)
    print(f"the key, shown only now: {secret}", file=sys.stderr)
    print(key.format())
    return 0


def _make_curve_keys(argv: Sequence[str]) -> int:
    settings = load_settings(
        CurveKeyConfig,
        prog="pdserve keys curve",
        description="Make a key pair: NAME.secret stays where it is used, NAME.public goes to those it speaks with.",
        examples=["pdserve keys curve --name router", "pdserve keys curve --name instances --directory keys"],
        argv=argv,
    ).key
    for path in make_key_pair(_checked(settings.name), Path(settings.directory)):
        print(path)
    return 0


def _checked(name: str) -> str:
    try:
        return check_name(name)
    except ValueError as error:
        raise ConfigError(f"--name: {error}") from None


def _help_text() -> str:
    width = max(map(len, KINDS))
    return "\n".join(
        [
            "usage: pdserve keys KIND [--option value ...]",
            "",
            "Make keys; docs/security.md says what each one protects.",
            "",
            "kinds:",
            *(f"  {kind:<{width}}  {purpose}" for kind, purpose in KINDS.items()),
            "",
            "pdserve keys KIND --help tells more.",
        ]
    )

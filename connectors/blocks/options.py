"""Connectors' own settings: what the user wrote, validated, with the defaults that all stores share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.connectors.base import ConnectorContext
from pdserve.errors import ConfigError
from pdserve.protocol import Role

_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

Parser = Callable[[Any], Any]
"""Turns what the user wrote into a value; raises ValueError with what to write instead."""


def count_transfer_threads() -> int:
    """Two, or one where this process may run on a single core: more would only take turns."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2, num_cores)


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Settings that every store has.

    Attributes:
        save: ``auto`` = the prefill role saves; ``always``; ``never``.
        max_staging_bytes: bound of the memory that holds blocks on their way to the store.
        save_timeout_s: longest wait of a step for room in that memory; what finds none is not saved.
        load_timeout_s: a load that takes longer ends with what has come.
        reader_threads: threads that load; two, or one where there is a single core: each takes a turn from the decode
            step in which a load begins.
        reader_nice: by how much the forward pass goes before them on a core that they share. At 10 a reader takes a
            tenth of it from decode steps; at 0 it would take half.
        writer_threads: threads that save.
    """

    save: str = "auto"
    max_staging_bytes: int = 256 << 20
    save_timeout_s: float = 2.0
    load_timeout_s: float = 30.0
    reader_threads: int = field(default_factory=count_transfer_threads)
    reader_nice: int = 10
    writer_threads: int = 1

    def saves_as(self, role: Role) -> bool:
        """Whether an engine of this role saves."""
        return self.save == "always" or (self.save == "auto" and role is Role.PREFILL)


def parse_values(connector: str, context: ConnectorContext, parsers: Mapping[str, Parser]) -> dict[str, Any]:
    """The context's options as values, by name.

    Args:
        connector: its name, for the message.
        context: holds the options.
        parsers: one for each known option.

    Raises:
        ConfigError: an option is unknown or ill-typed.
    """
    values: dict[str, Any] = {}
    for name, raw in context.options.items():
        if name not in parsers:
            raise ConfigError(f"connector {connector}: option {name!r} is unknown; known: {', '.join(parsers)}")
        try:
            values[name] = parsers[name](raw)
        except ValueError as error:
            raise ConfigError(f"connector {connector}: option {name}={raw!r}: {error}") from None
    return values


def check_size(connector: str, name: str, num_bytes: int | None, value_bytes: int) -> None:
    """Refuse a limit that no block fits into.

    Raises:
        ConfigError: ``num_bytes`` is less than one stored block.
    """
    if num_bytes is not None and num_bytes < value_bytes:
        raise ConfigError(
            f"connector {connector}: option {name}={num_bytes} is below the {value_bytes} bytes of one block"
        )


def parse_choice(*choices: str) -> Parser:
    """Parser of one of ``choices``."""

    def parse(raw: Any) -> str:
        if raw not in choices:
            raise ValueError(f"give one of {', '.join(choices)}")
        return str(raw)

    return parse


def parse_flag(raw: Any) -> bool:
    """True or false, also as text."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    raise ValueError("give true or false")


def parse_text(raw: Any) -> str:
    """Text that is not empty."""
    if isinstance(raw, str) and raw:
        return raw
    raise ValueError("give text that is not empty")


def parse_bytes(raw: Any) -> int:
    """A size, as a number or like 512MiB."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        raise ValueError("give bytes, as a number or like 512MiB")
    number, prefix, is_binary = match.groups()
    base = 1024 if is_binary else 1000
    exponent = " KMGT".index(prefix.upper() or " ")
    return int(number) * int(base**exponent)


def parse_seconds(raw: Any) -> float:
    """Seconds, 0 or more."""
    if isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
        value = float(raw)
        if 0 <= value < float("inf"):
            return value
    raise ValueError("give seconds, 0 or more")


def parse_number(least: int, most: int) -> Parser:
    """Parser of a whole number from ``least`` to ``most``."""

    def parse(raw: Any) -> int:
        if isinstance(raw, (int, str)) and not isinstance(raw, bool):
            value = int(raw)
            if least <= value <= most:
                return value
        raise ValueError(f"give a whole number from {least} to {most}")

    return parse


TRANSFER_PARSERS: dict[str, Parser] = {
    "save": parse_choice("auto", "always", "never"),
    "max_staging_bytes": parse_bytes,
    "save_timeout_s": parse_seconds,
    "load_timeout_s": parse_seconds,
    "reader_threads": parse_number(1, 64),
    "reader_nice": parse_number(0, 19),
    "writer_threads": parse_number(1, 64),
}
"""Parsers of `TransferOptions`."""

"""Settings: frozen dataclasses become command lines and TOML sections.

A component declares its settings as a frozen dataclass whose fields are made with `setting`; a process
composes several of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def setting(default: Any, *, help: str, choices: Sequence[str] | None = None, metavar: str | None = None) -> Any:  # noqa: A002
    """A dataclass field with the text and the choices that ``--help`` shows.

    Args:
        default: the value when neither the TOML file nor the command line sets it.
        help: one sentence for people.
        choices: the only values allowed.
        metavar: what stands for the value in ``--help``.
    """
    metadata = {"help": help, "choices": tuple(choices) if choices else None, "metavar": metavar}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)

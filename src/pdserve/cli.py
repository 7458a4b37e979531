"""``pdserve``: the command with subcommands. Each lives in a module of its own under `pdserve.commands`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

import pdserve
from pdserve.errors import ConfigError

COMMANDS = {
    "up": "start prefill and decode instances and a router on this machine, and watch them",
    "doctor": "say what is wrong with a running or configured deployment, and what to do",
    "keys": "make keys: for clients of a router, and for routers and instances between machines",
    "bench": "measure a service, an engine or this machine",
    "conformance": "test a KV connector against every rule of the connector contract",
}
"""Name and purpose; the module `pdserve.commands.<name>` has a ``run(argv) -> exit status``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        print(f"pdserve {pdserve.__version__}")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown command {name}; the nearest known one is {nearest} (pdserve --help lists them)")
    status: int = importlib.import_module(f"pdserve.commands.{name}").run(rest)
    return status


def _help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pdserve COMMAND [--option value ...]",
            "",
            "Serve language models through prefill and decode instances.",
            "",
            "commands:",
            *lines,
            "",
            "pdserve COMMAND --help tells more. One process by itself: run-prefill, run-decode, run-router.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

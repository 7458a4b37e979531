"""``run-decode``: an instance that goes on from a prompt's KV, or serves whole requests by itself.

A request's way through it:

1. A router sends the prompt's tokens, the tokens made so far and, after a hand-off, the KV's whereabouts.
2. The connector loads the KV beside other requests' steps; what cannot be loaded is computed here.
3. The request joins the batch, and each step's token goes back to the router.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pdserve.engine.server.run_instance import run_instance
from pdserve.engine.server.settings import InstanceConfig, InstanceSettings
from pdserve.protocol import Role
from pdserve.settings import section


@dataclass(frozen=True)
class DecodeConfig(InstanceConfig):
    """All settings of ``run-decode``."""

    instance: InstanceSettings = section(partial(InstanceSettings, port=8200))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a decode instance; returns the exit status."""
    return run_instance(Role.DECODE, DecodeConfig, argv)


if __name__ == "__main__":
    sys.exit(main())

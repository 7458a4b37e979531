"""``run-prefill``: an instance that computes prompts and hands their KV to decode instances.

A request's way through it:

1. A router sends the prompt's tokens with ``handoff`` set.
2. The engine computes them, in chunks, and samples the first token, which goes back at once.
3. The connector saves the prompt's KV, or holds it until a decode instance has fetched it.
4. The request ends with HANDOFF and the parameters by which the decode instance finds the KV.
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
class PrefillConfig(InstanceConfig):
    """All settings of ``run-prefill``."""

    instance: InstanceSettings = section(partial(InstanceSettings, port=8100))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a prefill instance; returns the exit status."""
    return run_instance(Role.PREFILL, PrefillConfig, argv)


if __name__ == "__main__":
    sys.exit(main())

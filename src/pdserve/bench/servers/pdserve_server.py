"""pdserve itself as a measured server: ``pdserve up`` with a number of instances and a hand-off threshold."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

from pdserve.bench.servers.server import ServerPlan
from pdserve.engine.config import EngineConfig
from pdserve.errors import ConfigError
from pdserve.settings import to_arguments

_SPLIT = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class Split:
    """How many prefill and decode instances there are."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str, flag: str = "--splits") -> Split:
        """Read ``2:1``.

        Raises:
            ConfigError: it does not read, or there is no decode instance.
        """
        match = _SPLIT.fullmatch(text)
        if match is None or match[2] == "0":
            raise ConfigError(
                f"{flag}: {text!r} is no split; write PREFILL:DECODE with at least 1 to decode, as in 1:1"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        """As it is written."""
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True)
class _Engines:
    """The part of the command line of ``pdserve up`` that is the engines'."""

    engine: EngineConfig = field(default_factory=EngineConfig)


def plan_pdserve(
    split: Split, engine: EngineConfig, *, threshold_tokens: int = 0, name: str | None = None
) -> ServerPlan:
    """``pdserve up`` on a port of the system's choice.

    Args:
        split: its instances.
        engine: their settings; the connector is `up`'s own choice unless it is another than the default.
        threshold_tokens: prompts with fewer uncached tokens are not handed off.
        name: in tables; default: says split and threshold.
    """
    threshold = f", from {threshold_tokens} tokens" if threshold_tokens and split.prefill else ""
    return ServerPlan(
        name=name or f"pdserve {split}{threshold}",
        command=[
            *(sys.executable, "-P", "-m", "pdserve.cli", "up"),
            *(f"--prefill={split.prefill}", f"--decode={split.decode}", "--port=0"),
            f"--disaggregation-threshold-tokens={threshold_tokens}",
            *to_arguments(_Engines(engine)),
        ],
        url_pattern=r"^ready: (http://\S+)/v1 ",
    )

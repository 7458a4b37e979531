"""Which prompts, how long, and when they arrive: two sections of the benchmark commands' settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.bench.workload.arrivals import build_due_times
from pdserve.errors import ConfigError
from pdserve.settings import setting

REPLY = "reply"
"""``--output-tokens reply``: as long as the answer that the file has."""
DEFAULT_NUM_REQUESTS = 64


@dataclass(frozen=True)
class WorkloadSettings:
    """The prompts."""

    prompts_file: str | None = setting(
        None, help="prompts from this file: .jsonl with prompt or messages, else one a line", metavar="PATH"
    )
    sharegpt: str | None = setting(
        None, help="prompts are the first questions of this file of conversations (ShareGPT's JSON)", metavar="PATH"
    )
    num_requests: int | None = setting(
        None, help="requests to send; default: all of --prompts-file, else 64", minimum=1
    )
    prompt_tokens: str = setting(
        "200", help="length of synthetic prompts: 200, 100-300, or a mix with weights: 128:0.7,1024:0.3", metavar="MIX"
    )
    output_tokens: str = setting(
        "64", help="length of answers, as a mix; reply = as long as ShareGPT's own", metavar="MIX"
    )
    shared_prefix_tokens: int = setting(
        0, help="synthetic prompts begin with a prefix of this length, which counts", minimum=0
    )
    num_prefixes: int = setting(1, help="how many different shared prefixes there are", minimum=1)
    max_prompt_tokens: int = setting(1024, help="longer conversations of --sharegpt are left out", minimum=1)
    tokenizer: str | None = setting(
        None,
        help="model whose tokenizer measures prompts; default: the served model's where it is found on this machine",
        metavar="MODEL",
    )
    seed: int = setting(0, help="equal seeds give equal prompts, lengths and arrivals", minimum=0)


@dataclass(frozen=True)
class LoadSettings:
    """When requests are sent."""

    rate: float | None = setting(
        None, help="requests a second on average; default: all at once (a burst)", metavar="RATE"
    )
    arrivals: str | None = setting(
        None,
        choices=("poisson", "constant", "burst"),
        help="how they arrive; default: poisson with --rate, else burst",
    )
    burst_size: int = setting(1, help="with --rate: this many arrive together", minimum=1)
    max_concurrency: int | None = setting(
        None, help="requests under way at once; the others wait; default: no limit", minimum=1
    )
    num_warmups: int = setting(2, help="requests sent one after the other beforehand, and not counted", minimum=0)

    def check(self) -> None:
        """Raise where the settings do not go together.

        Raises:
            ConfigError: says which.
        """
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ConfigError(f"--rate: {self.rate} is no rate; give requests a second above 0, or none for a burst")
        if self.rate is None and self.arrivals not in (None, "burst"):
            raise ConfigError(f"--arrivals {self.arrivals} needs --rate")
        if self.rate is not None and self.arrivals == "burst":
            raise ConfigError("--arrivals burst sends all at once and takes no --rate; --burst-size sends groups")
        if self.rate is None and self.burst_size > 1:
            raise ConfigError("--burst-size needs --rate: without one all requests are one burst")

    @property
    def is_timed(self) -> bool:
        """Whether requests have times of their own, as against one burst."""
        return self.rate is not None

    def describe(self) -> str:
        """The load in a few words."""
        cap = f", at most {self.max_concurrency} at a time" if self.max_concurrency else ""
        if self.rate is None:
            return f"all at once{cap}"
        groups = f" in groups of {self.burst_size}" if self.burst_size > 1 else ""
        return f"{self.arrivals or 'poisson'}{groups} at {self.rate:g} requests/s{cap}"

    def build_due_times(self, num_requests: int, seed: int) -> list[float]:
        """Seconds at which each request is due; see `arrivals`."""
        return build_due_times(
            num_requests,
            rate=self.rate,
            arrivals=self.arrivals or "poisson",
            burst_size=self.burst_size,
            seed=seed,
        )

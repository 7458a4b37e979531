"""Where results go: a section of the benchmark commands' settings."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.bench.measure.summary import Objective
from pdserve.errors import ConfigError
from pdserve.settings import setting


@dataclass(frozen=True)
class OutputSettings:
    """What is shown and kept."""

    output: str | None = setting(None, help="write everything that was measured to this file as JSON", metavar="PATH")
    progress: bool = setting(True, help="show a progress bar where the output is a terminal")


@dataclass(frozen=True)
class PlotSettings:
    """Pictures."""

    plot: str | None = setting(None, help="draw the results to this PNG file (needs matplotlib)", metavar="PATH")


@dataclass(frozen=True)
class ObjectiveSettings:
    """What makes a request good; goodput counts only these."""

    slo_ttft_ms: float | None = setting(None, help="longest time to the first token", metavar="MS")
    slo_itl_ms: float | None = setting(
        None, help="longest gap between tokens: 99 of 100 gaps of a request must be within it", metavar="MS"
    )
    slo_tpot_ms: float | None = setting(None, help="longest mean time for each token after the first", metavar="MS")
    slo_e2e_ms: float | None = setting(None, help="longest time to the end of an answer", metavar="MS")

    def build(self) -> Objective:
        """The objective in seconds.

        Raises:
            ConfigError: a bound that nothing can meet.
        """
        bounds = [self.slo_ttft_ms, self.slo_itl_ms, self.slo_tpot_ms, self.slo_e2e_ms]
        for flag, bound in zip(("ttft", "itl", "tpot", "e2e"), bounds, strict=True):
            if bound is not None and not bound > 0:
                raise ConfigError(f"--slo-{flag}-ms: {bound} must be above 0")
        return Objective(*(None if bound is None else bound / 1000 for bound in bounds))

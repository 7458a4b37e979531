"""One server's figures against another's, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better one server was than another, over the rounds both were measured in."""

    median: float
    minimum: float
    maximum: float
    num_rounds: int


def compare_rounds(own: Sequence[float | None], other: Sequence[float | None], *, is_more_better: bool) -> Ratio | None:
    """The ratio of each round, then their median and spread: what changed between rounds cancels within one.

    Args:
        own: a figure of each round; None where it was not taken.
        other: the other server's, of the same rounds.
        is_more_better: 2.0 means twice as good in either case: twice the rate, or half the time.

    Returns:
        None when no round has both.
    """
    ratios = [
        mine / theirs if is_more_better else theirs / mine
        for mine, theirs in zip(own, other, strict=True)
        if mine is not None and theirs is not None and mine > 0 and theirs > 0
    ]
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))

"""A mix of lengths, written as people say it: ``200``, ``100-300``, ``128:0.7,1024:0.3``, ``100-300:3,2000:1``."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from pdserve.errors import ConfigError

_PART = re.compile(r"(\d+)(?:-(\d+))?(?::([\d.]+))?")


@dataclass(frozen=True, slots=True)
class _Range:
    low: int
    high: int
    weight: float


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Lengths in tokens to draw from: ranges, each with a weight."""

    ranges: tuple[_Range, ...]

    @classmethod
    def parse(cls, text: str, flag: str) -> LengthMix:
        """Read ``text``.

        Args:
            text: parts with commas between them; a part is a length or a range, with a weight behind a colon.
            flag: the option it was given with, for the error.

        Raises:
            ConfigError: it does not read, a length is 0, or a range ends before it begins.
        """
        return cls(tuple(_parse_part(part.strip(), text, flag) for part in text.split(",")))

    @property
    def shortest(self) -> int:
        """The least length that can be drawn."""
        return min(part.low for part in self.ranges)

    @property
    def longest(self) -> int:
        """The greatest length that can be drawn."""
        return max(part.high for part in self.ranges)

    @property
    def mean(self) -> float:
        """The expected length."""
        total = math.fsum(part.weight for part in self.ranges)
        return math.fsum((part.low + part.high) / 2 * part.weight for part in self.ranges) / total

    def draw(self, generator: random.Random) -> int:
        """One length."""
        (part,) = generator.choices(self.ranges, [part.weight for part in self.ranges])
        return generator.randint(part.low, part.high)


def _parse_part(part: str, text: str, flag: str) -> _Range:
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(f"{flag}: {text!r} is no mix of lengths; write 200, 100-300 or 128:0.7,1024:0.3")
    low = int(match[1])
    high = int(match[2] or low)
    try:
        weight = float(match[3] or 1)
    except ValueError:
        raise ConfigError(f"{flag}: {match[3]!r} in {text!r} is no weight") from None
    if low < 1 or high < low:
        raise ConfigError(f"{flag}: {part!r} is no range of lengths; they start at 1, the lesser first")
    if not weight > 0:
        raise ConfigError(f"{flag}: the weight of {part!r} must be above 0")
    return _Range(low, high, weight)

from __future__ import annotations

import random
from collections import Counter

import pytest

from pdserve.bench.workload.lengths import LengthMix
from pdserve.errors import ConfigError


def draw(text: str, count: int) -> Counter[int]:
    mix, generator = LengthMix.parse(text, "--prompt-tokens"), random.Random(1)
    return Counter(mix.draw(generator) for _ in range(count))


def test_one_length() -> None:
    assert draw("200", 5) == {200: 5}


def test_a_range_is_drawn_from_evenly_with_both_ends() -> None:
    assert set(draw("3-5", 200)) == {3, 4, 5}


def test_weights_are_shares() -> None:
    counts = draw("128:3, 1024:1", 4000)
    assert set(counts) == {128, 1024}
    assert counts[128] / 4000 == pytest.approx(0.75, abs=0.03)


def test_what_a_mix_says_of_itself() -> None:
    mix = LengthMix.parse("10-20:0.5,100:0.5", "--x")
    assert (mix.shortest, mix.longest, mix.mean) == (10, 100, 57.5)


@pytest.mark.parametrize("text", ["", "0", "a", "5-3", "5:0", "5:.", "-3", "5,", "5:1:2", "1.5", "0-4"])
def test_what_is_no_mix_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--prompt-tokens: "):
        LengthMix.parse(text, "--prompt-tokens")

from __future__ import annotations

import math

import pytest
import torch

from pdserve.engine.models.rope import build_frequencies, build_rotation_table
from pdserve.engine.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def test_plain_frequencies_follow_the_formula() -> None:
    frequencies = build_frequencies(RopeConfig(1e4, None, 64), 8)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_linear_scaling_divides_all() -> None:
    plain = build_frequencies(RopeConfig(1e4, None, 64), 8)
    torch.testing.assert_close(build_frequencies(RopeConfig(1e4, LinearScaling(4.0), 64), 8), plain / 4)


def test_llama3_scaling_keeps_fast_and_divides_slow_frequencies() -> None:
    plain = build_frequencies(RopeConfig(5e5, None, 8192), 128)
    scaled = build_frequencies(RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192), 131072), 128)
    wavelengths = 2 * math.pi / plain
    ratio = scaled / plain
    assert (ratio[wavelengths < 8192 / 4] == 1).all()
    torch.testing.assert_close(ratio[wavelengths > 8192], torch.full_like(ratio[wavelengths > 8192], 1 / 8))
    assert (ratio.diff() <= 0).all()


def test_yarn_keeps_fast_and_divides_slow_frequencies() -> None:
    plain = build_frequencies(RopeConfig(1e4, None, 2048), 64)
    yarn = YarnScaling(4.0, 2048, 1.25, 32.0, 1.0, True)
    ratio = build_frequencies(RopeConfig(1e4, yarn, 8192), 64) / plain
    assert ratio[0] == 1
    torch.testing.assert_close(ratio[-1], torch.tensor(1 / 4))
    assert (ratio.diff() <= 0).all()


@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 64, 1.25, 32.0, 1.0, True)])
def test_a_rotation_turns_pairs_by_position_and_scales_by_the_attention_factor(scaling: YarnScaling | None) -> None:
    config = RopeConfig(1e4, scaling, 256)
    rotation = build_rotation_table(config, 8, 256).select(torch.tensor([0, 200]))
    magnitude = 1.0 if scaling is None else 1.25
    angles = 200 * build_frequencies(config, 8).double()
    expected = torch.cat((angles.cos(), angles.cos())) * magnitude
    torch.testing.assert_close(rotation.cos_TH[1].double(), expected, atol=1e-6, rtol=0)
    expected = torch.cat((-angles.sin(), angles.sin())) * magnitude
    torch.testing.assert_close(rotation.sin_TH[1].double(), expected, atol=1e-6, rtol=0)
    assert rotation.cos_TH[0].tolist() == [magnitude] * 8


def test_a_table_does_not_depend_on_its_size() -> None:
    config = RopeConfig(1e5, None, 4096)
    positions = torch.tensor([0, 1, 77, 999])
    small = build_rotation_table(config, 64, 1000).select(positions)
    large = build_rotation_table(config, 64, 4096).select(positions)
    assert torch.equal(small.cos_TH, large.cos_TH)
    assert torch.equal(small.sin_TH, large.sin_TH)

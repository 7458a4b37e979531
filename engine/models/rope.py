"""Tables of the rotary embedding: cos and sin of every position (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.engine.models.rope_config import Llama3Scaling, RopeConfig, YarnScaling
from pdserve.kernels.base import Rotation

CPU = torch.device("cpu")


def build_rotation_table(config: RopeConfig, head_dim: int, num_positions: int, device: torch.device = CPU) -> Rotation:
    """The rotation of all positions of a model's context.

    Angles are computed in float64 and rounded once, so that a table is the same on any machine and for any size.

    Args:
        config: the rotary embedding.
        head_dim: H.
        num_positions: rows of the table.
        device: where the table is to be; computed on the CPU in any case.
    """
    frequencies = build_frequencies(config, head_dim).double()
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    magnitude = config.scaling.attention_factor if isinstance(config.scaling, YarnScaling) else 1.0
    cos, sin = (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()
    return Rotation(torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device))


def build_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[H / 2] float32 angles a position, scaled as ``config`` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = 1.0 / config.theta**exponents
    scaling = config.scaling
    if scaling is None:
        return frequencies.float()
    if isinstance(scaling, Llama3Scaling):
        return _scale_llama3(frequencies, scaling).float()
    if isinstance(scaling, YarnScaling):
        return _scale_yarn(frequencies, scaling, config.theta, head_dim).float()
    return (frequencies / scaling.factor).float()


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep what turns often within the original context, divide what turns seldom, interpolate between."""
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _scale_yarn(frequencies: Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> Tensor:
    """Keep dimensions before the ramp, divide those behind it."""

    def dimension_of(rotations: float) -> float:
        """The dimension that turns ``rotations`` times within the original context."""
        wavelength = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return frequencies * ((1 - divided) + divided / scaling.factor)

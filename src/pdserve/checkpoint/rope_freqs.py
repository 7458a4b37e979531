"""Llama 3's rope scaling, recovered from the divisors that a GGUF file stores instead of its parameters.

The rule (Llama 3.1, "Effective long-context scaling"): a frequency of wavelength ``w`` is divided by 1 where
``w < original / high``, by ``factor`` where ``w > original / low``, and between them by
``1 / ((1 - s) / factor + s)`` with ``s = (original / w - low) / (high - low)``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

ROPE_FREQS_TENSOR = "rope_freqs.weight"
_TOLERANCE = 1e-5


def llama3_rope_scaling(divisors: npt.NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any] | None:
    """The ``rope_scaling`` entry that gives ``divisors``, or None where they scale nothing.

    Only ``original / low`` and ``original / high`` matter; ``low_freq_factor`` is given as 1, as in the
    published configurations.

    Args:
        divisors: ``[head_dim // 2]``.
        head_dim: size of an attention head.
        theta: rope base.

    Raises:
        ValueError: they do not follow the rule.
    """
    if divisors.shape != (head_dim // 2,):
        raise ValueError(f"rope_freqs has shape {list(divisors.shape)}, expected [{head_dim // 2}]")
    values = divisors.astype(np.float64)
    if np.allclose(values, 1.0, rtol=0, atol=1e-7):
        return None
    scaling = _fit(values, _frequencies(head_dim, theta))
    if scaling is None or not np.allclose(llama3_divisors(scaling, head_dim, theta), values, rtol=_TOLERANCE, atol=0):
        raise ValueError("rope_freqs does not follow Llama 3's rule, and no other is supported")
    return scaling


def llama3_divisors(scaling: dict[str, Any], head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """The divisor of each of the ``head_dim // 2`` frequencies under ``scaling``."""
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] * _frequencies(head_dim, theta)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _frequencies(head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """1 / wavelength of each rotary pair."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return np.asarray(theta**-exponents / (2 * math.pi))


def _fit(divisors: npt.NDArray[np.float64], frequencies: npt.NDArray[np.float64]) -> dict[str, Any] | None:
    """Parameters from the frequencies between the two thresholds, where the rule is a straight line."""
    factor = float(divisors.max())
    if factor <= 1.0 or not np.isfinite(divisors).all():
        return None
    factor = round(factor, 4)
    between = (divisors > 1.0 + 1e-6) & (divisors < factor * (1 - 1e-6))
    if between.sum() < 2:
        return None
    smooth = (1.0 / divisors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, intercept = np.polyfit(frequencies[between], smooth, 1)
    if slope <= 0 or intercept >= 0:
        return None
    high = round(1.0 - 1.0 / float(intercept), 3)
    original = round(float(slope) * (high - 1.0))
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }

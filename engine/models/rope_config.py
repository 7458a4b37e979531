"""The rotary embedding's settings in a Hugging Face ``config.json``, old spelling or new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdserve.engine.models.typed_fields import TypedFields
from pdserve.errors import ConfigError


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by ``factor``."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by ``factor``, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp between kept and divided frequencies, cos and sin scaled.

    Attributes:
        attention_factor: what cos and sin are multiplied by.
        beta_fast: rotations within the original context above which a frequency is kept.
        beta_slow: rotations below which it is divided.
        truncate: whether the ramp's ends are rounded outwards to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding over whole heads, halves rotated against each other.

    Attributes:
        theta: base of the frequencies.
        scaling: how frequencies are stretched for long contexts, or None.
        max_context_len: positions that the settings are made for.
    """

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None
    max_context_len: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before).

        Raises:
            ConfigError: a field is missing or wrong, or the kind of scaling is not supported; it is named.
        """
        top = TypedFields(config, "config.json")
        max_positions = top.positive_int("max_position_embeddings")
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        content = config.get(name) or {}
        if not isinstance(content, Mapping):
            raise ConfigError(f"config.json: {name} is {content!r}; it must be an object")
        fields = TypedFields(content, f"config.json: {name}")
        theta = fields.positive_float("rope_theta", default=top.positive_float("rope_theta", default=10000.0))
        for holder in (content, config):
            if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise ConfigError("config.json: partial_rotary_factor other than 1 is not supported")
        original = config.get("original_max_position_embeddings") or content.get("original_max_position_embeddings")
        values = TypedFields({**content, "original_max_position_embeddings": original or max_positions}, name)
        kind = content.get("rope_type") or content.get("type") or "default"
        if kind == "default":
            return cls(theta, None, max_positions)
        if kind == "linear":
            return cls(theta, LinearScaling(fields.positive_float("factor")), max_positions)
        if kind == "llama3":
            return cls(theta, _read_llama3(values), max_positions)
        if kind == "yarn":
            yarn = _read_yarn(values)
            stretched = int(yarn.original_max_position_embeddings * yarn.factor)
            return cls(theta, yarn, max(max_positions, stretched))
        if kind == "dynamic":
            raise ConfigError(
                f"config.json: {name} of kind 'dynamic' is not supported: it changes earlier positions as a text grows,"
                " so a cached block would not stay valid; 'yarn' is"
            )
        raise ConfigError(f"config.json: {name} of kind {kind!r} is not supported; use default, linear, llama3 or yarn")


def _read_llama3(fields: TypedFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=fields.positive_float("factor"),
        low_freq_factor=fields.positive_float("low_freq_factor"),
        high_freq_factor=fields.positive_float("high_freq_factor"),
        original_max_position_embeddings=fields.positive_int("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            f"config.json: high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor"
            f" {scaling.low_freq_factor}"
        )
    return scaling


def _read_yarn(fields: TypedFields) -> YarnScaling:
    factor = fields.positive_float("factor")
    mscale, mscale_all_dim = fields.content.get("mscale"), fields.content.get("mscale_all_dim")
    derived = _yarn_magnitude(factor, 1.0)
    if mscale and mscale_all_dim:
        derived = _yarn_magnitude(factor, fields.positive_float("mscale"))
        derived /= _yarn_magnitude(factor, fields.positive_float("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=fields.positive_int("original_max_position_embeddings"),
        attention_factor=fields.positive_float("attention_factor", default=derived),
        beta_fast=fields.positive_float("beta_fast", default=32.0),
        beta_slow=fields.positive_float("beta_slow", default=1.0),
        truncate=fields.boolean("truncate", default=True),
    )


def _yarn_magnitude(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

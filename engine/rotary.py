"""Rotary tables: cosine and sine of every position's angles, with plain, linear, llama3 and YaRN scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError

__all__ = ["rotary_tables"]


def rotary_tables(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_position: int, window: int
) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, float32 [window, head_dim / 2] each (RoFormer, arXiv 2104.09864, eq. 15).

    scaling: None or a mapping with "rope_type" (or "type") default, linear, llama3 or yarn and that type's numbers, as in
    config.json. max_position: the model's trained window, used where the mapping names no original one.
    Angles are float32 products, as in the implementations that the checkpoints were trained with.
    Raises ConfigError for an unknown type or a missing number.
    """
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    magnitude = 1.0
    kind = "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))
    if scaling is not None and kind != "default":
        if kind == "linear":
            inverse = inverse / _number(scaling, kind, "factor")
        elif kind == "llama3":
            inverse = _llama3(inverse, scaling, max_position)
        elif kind == "yarn":
            inverse, magnitude = _yarn(inverse, theta, head_dim, scaling, max_position)
        else:
            raise ConfigError(f"rope_scaling type {kind!r} is unknown; use default, linear, llama3 or yarn")
    angles = torch.arange(window, dtype=torch.float32)[:, None] * inverse[None, :]
    return angles.cos() * magnitude, angles.sin() * magnitude


def _number(scaling: Mapping[str, Any], kind: str, name: str, default: float | None = None) -> float:
    value = scaling.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"rope_scaling of type {kind!r} needs a positive number {name!r}, got {value!r}")
    return float(value)


def _llama3(inverse: Tensor, scaling: Mapping[str, Any], max_position: int) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between (Llama 3.1's published rule)."""
    factor = _number(scaling, "llama3", "factor")
    low = _number(scaling, "llama3", "low_freq_factor")
    high = _number(scaling, "llama3", "high_freq_factor")
    original = _number(scaling, "llama3", "original_max_position_embeddings", max_position)
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, smooth, scaled)


def _yarn(
    inverse: Tensor, theta: float, head_dim: int, scaling: Mapping[str, Any], max_position: int
) -> tuple[Tensor, float]:
    """Interpolate slow frequencies, keep fast ones, ramp between (YaRN, arXiv 2309.00071, eq. 21-23 and section 3.4)."""
    factor = _number(scaling, "yarn", "factor")
    original = _number(scaling, "yarn", "original_max_position_embeddings", max_position)
    fast = _number(scaling, "yarn", "beta_fast", 32.0)
    slow = _number(scaling, "yarn", "beta_slow", 1.0)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    keep = 1 - ramp
    return inverse / factor * (1 - keep) + inverse * keep, _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "yarn", "attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(_number(scaling, "yarn", "mscale")) / mscale(_number(scaling, "yarn", "mscale_all_dim"))
    return mscale(1.0)

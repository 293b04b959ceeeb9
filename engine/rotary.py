"""Rotary tables: cosine and sine of every position's angles, with plain, linear, llama3 and YaRN scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["rotary_tables", "turn_keys"]


def rotary_tables(head_dim: int, theta: float, scaling: Mapping[str, Any] | None, window: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, float32 [window, head_dim / 2] each (RoFormer, arXiv 2104.09864, eq. 15).

    scaling: ModelConfig.rope_scaling, which is checked and complete. Angles are float32 products, as in the
    implementations
    that the checkpoints were trained with: in float64 far positions would differ from what the model knows.
    """
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    magnitude = 1.0
    if scaling is not None:
        if scaling["rope_type"] == "linear":
            inverse = inverse / scaling["factor"]
        elif scaling["rope_type"] == "llama3":
            inverse = _llama3(inverse, scaling)
        else:
            inverse, magnitude = _yarn(inverse, theta, head_dim, scaling), _yarn_magnitude(scaling)
    angles = torch.arange(window, dtype=torch.float32)[:, None] * inverse[None, :]
    return angles.cos() * magnitude, angles.sin() * magnitude


def turn_keys(keys: Tensor, old: Tensor, new: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys [N, kv_heads, head_dim] of positions `old`, as they are at positions `new`, in the keys' type, rounded once.

    old, new: int64 [N]. cos, sin: the model's tables. A table's entry is a 2x2 matrix, magnitude times rotation. That
    of the old position is inverted whole, so that YaRN's magnitude does not enter twice.
    """
    c, s, c_new, s_new = (table[at].double().unsqueeze(1) for at in (old, new) for table in (cos, sin))
    square = c * c + s * s
    turn_c, turn_s = (c_new * c + s_new * s) / square, (s_new * c - c_new * s) / square
    first, second = keys.double().chunk(2, dim=-1)
    return torch.cat((first * turn_c - second * turn_s, second * turn_c + first * turn_s), dim=-1).to(keys.dtype)


def _llama3(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between (Llama 3.1's published rule)."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, smooth, scaled)


def _yarn(inverse: Tensor, theta: float, head_dim: int, scaling: Mapping[str, Any]) -> Tensor:
    """Interpolate slow frequencies, keep fast ones, ramp between (YaRN, arXiv 2309.00071, "NTK-by-parts")."""
    original = scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast", 32.0)), dimension(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    slow = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    interpolated: Tensor = inverse / scaling["factor"]
    return interpolated * slow + inverse * (1 - slow)


def _yarn_magnitude(scaling: Mapping[str, Any]) -> float:
    """Factor on cosine and sine: 0.1 ln(factor) + 1 (YaRN, section 3.4), or what the checkpoint says instead."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)

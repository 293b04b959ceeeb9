"""Rope scaling: how a model's rotary angles are stretched for longer windows, read from a mapping and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .json_fields import Fields

__all__ = ["LARGEST_WINDOW", "ORIGINAL", "read_rope_scaling", "widened_window"]

LARGEST_WINDOW = 1 << 24  # positions are float32 in the rotary tables, and whole numbers exact up to here
ORIGINAL = "original_max_position_embeddings"

# Keys of a rope scaling, apart from rope_type: (required, optional).
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "yarn": (
        ("factor", ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def read_rope_scaling(given: Fields, window: int) -> dict[str, Any] | None:
    """Check a rope scaling and complete it; None for the plain rotary embedding.

    The result has "rope_type" and every required key of that type; `window` (tokens) stands for a missing
    original_max_position_embeddings. Raises the error of `given` for a type or key that is not known, a key that is
    missing, and a value with which the angles mean nothing.
    """
    keys = [key for key in given.values if key not in ("type", "rope_type")]
    kind = given.text("rope_type", given.text("type", "default"))
    if kind == "default" and not keys:
        return None
    if kind not in ROPE_KEYS:
        raise given.failure(
            f"rope_type {kind!r} with {', '.join(map(str, keys)) or 'no further keys'} in {given.place} is not "
            f"supported; it must be {', '.join(ROPE_KEYS)}, or 'default' without further keys"
        )
    required, optional = ROPE_KEYS[kind]
    for key in keys:
        if key not in (*required, *optional):
            raise given.failure(
                f"{given.place} has the key {key!r}, unknown for rope_type {kind!r}; "
                f"known: {', '.join((*required, *optional))}"
            )
    if ORIGINAL in required and ORIGINAL not in keys:
        keys.append(ORIGINAL)
    scaling = {key: _read(given, key, window) for key in (*keys, *(key for key in required if key not in keys))}
    _check_order(given, scaling)
    return {"rope_type": kind, **scaling}


def widened_window(scaling: Mapping[str, Any], window: int, given: Fields) -> int:
    """Tokens of the window that a scaling's factor opens, at least `window`. Raises if they are too many for us."""
    wide = max(window, int(scaling["factor"] * scaling.get(ORIGINAL, window)))
    if wide > LARGEST_WINDOW:
        raise given.failure(
            f"'factor' {scaling['factor']!r} in {given.place} makes a window of {wide} tokens; "
            f"at most {LARGEST_WINDOW} are supported"
        )
    return wide


def _read(given: Fields, key: str, window: int) -> int | float | bool:
    if key == "truncate":
        return given.flag(key, True)
    if key == ORIGINAL:
        return given.integer(key, window, low=1, high=LARGEST_WINDOW)
    if key == "factor":
        return given.number(key, low=1.0, high=LARGEST_WINDOW)
    # mscale and mscale_all_dim may be 0, which turns them off
    return given.number(key, low=0.0, high=1e6, open_low=not key.startswith("mscale"))


def _check_order(given: Fields, scaling: Mapping[str, Any]) -> None:
    """Both kinds blend between a slow and a fast frequency, which must not change places (defaults: YaRN's)."""
    if "low_freq_factor" in scaling and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise given.failure(
            f"'low_freq_factor' {scaling['low_freq_factor']!r} in {given.place} must be below 'high_freq_factor' "
            f"{scaling['high_freq_factor']!r}"
        )
    if scaling.get("beta_fast", 32.0) < scaling.get("beta_slow", 1.0):
        raise given.failure(
            f"'beta_fast' {scaling.get('beta_fast', 32.0)!r} in {given.place} must not be below 'beta_slow' "
            f"{scaling.get('beta_slow', 1.0)!r}"
        )

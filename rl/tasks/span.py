"""Span: the least and the most of something that is drawn for each example."""

from __future__ import annotations

from ...engine.config import _require, _tuple

__all__ = ["span"]


def span(owner: str, name: str, value: object, low: int = 1) -> tuple[int, int]:
    """From a list of two. Raises ConfigError for anything but whole numbers of at least low, the first not above the
    second."""
    values = _tuple(owner, name, value)
    ok = len(values) == 2 and all(type(one) is int for one in values) and low <= values[0] <= values[1]
    _require(ok, f"{owner}.{name} must be [least, most], whole numbers of at least {low}, got {value!r}")
    return values[0], values[1]

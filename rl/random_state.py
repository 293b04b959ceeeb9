"""The states of this process's random generators, for rewards, data and agents that draw from them.

The engine draws from none: its noise is a function of whole numbers (engine/noise.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's (CPU) global generators, as plain JSON values."""
    drawn: Any = numpy.random.get_state(legacy=True)
    kind, keys, *rest = drawn
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators into the states that random_state gave, perhaps by way of JSON."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))

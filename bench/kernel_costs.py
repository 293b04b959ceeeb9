"""Cost of single kernels: what each cannot do without, its inputs read once and its results written once.

Unlike in costs.py activations count, float32: a kernel alone takes them from memory and puts them back. Index tables,
scales and biases are left out: under 1 % of the rest. FLOPs are those of products; the rest is free beside the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .costs import Cost

__all__ = [
    "Heads",
    "attention_backward_cost",
    "attention_cost",
    "group_cost",
    "move_kv_cost",
    "moved",
    "product_cost",
    "turn_and_write_cost",
]

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, and the size of each."""

    query: int
    kv: int
    dim: int


def attention_cost(spans: Iterable[tuple[int, int]], heads: Heads, kv_bytes: int) -> Cost:
    """Spans of (rows, keys of the last row), causal. kv_bytes: of an element of the pages."""
    spans = list(spans)
    rows, keys = (sum(column) for column in zip(*spans, strict=True))
    flops = 4.0 * _scores(spans) * heads.query * heads.dim  # a dot product with the key, a sum of the values
    return Cost(flops, float(2 * keys * heads.kv * heads.dim * kv_bytes + 2 * rows * heads.query * heads.dim * FLOAT))


def group_cost(batch: int, keys: int, shared: int, heads: Heads, kv_bytes: int) -> Cost:
    """One row each of `batch` sequences over `keys` keys, of which the first `shared` are the same for all."""
    alone = attention_cost([(1, keys)] * batch, heads, kv_bytes)
    return Cost(alone.flops, alone.bytes - float(2 * (batch - 1) * shared * heads.kv * heads.dim * kv_bytes))


def attention_backward_cost(spans: Iterable[tuple[int, int]], heads: Heads, kv_bytes: int) -> Cost:
    """The scores again and a product for each of four gradients: of weights, queries, keys and values."""
    spans = list(spans)
    rows, keys = (sum(column) for column in zip(*spans, strict=True))
    flops = 10.0 * _scores(spans) * heads.query * heads.dim
    of_rows = 4 * rows * heads.query * heads.dim * FLOAT  # query, output and both gradients
    of_keys = 2 * keys * heads.kv * heads.dim * (kv_bytes + FLOAT)
    return Cost(flops, float(of_rows + of_keys))


def product_cost(rows: int, inputs: int, outputs: int, weight_bytes: int) -> Cost:
    """[rows, inputs] times a weight [outputs, inputs] of so many bytes an element."""
    return Cost(
        2.0 * rows * inputs * outputs, float(inputs * outputs * weight_bytes + rows * (inputs + outputs) * FLOAT)
    )


def turn_and_write_cost(rows: int, heads: Heads, kv_bytes: int) -> Cost:
    """Queries turned, keys and values read as float32 and written as elements of `kv_bytes`, and a row's angles."""
    elements = 2 * heads.query * FLOAT + 2 * heads.kv * (FLOAT + kv_bytes) + FLOAT
    return Cost(0.0, float(rows * heads.dim * elements))


def move_kv_cost(rows: int, heads: Heads, kv_bytes: int) -> Cost:
    """Keys and values read and written as elements of `kv_bytes`, and the angles of two positions."""
    return Cost(0.0, float(rows * heads.dim * (4 * heads.kv * kv_bytes + 2 * FLOAT)))


def moved(elements: int, times: int) -> Cost:
    """`times` float32 tensors of so many elements read or written."""
    return Cost(0.0, float(elements * times * FLOAT))


def _scores(spans: Iterable[tuple[int, int]]) -> float:
    """Pairs of a row and a key that it sees: of `rows` rows the last sees all keys, each one before one less."""
    return sum(rows * keys - rows * (rows - 1) / 2 for rows, keys in spans)

"""Block sizes, fixed per shape and checked in: no request waits for a search, and no result depends on one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionBlocks", "LinearBlocks", "attention_blocks", "linear_blocks", "next_power_of_2", "row_warps"]

# Products are summed in blocks of this many columns whatever the rest: it belongs to the result.
LINEAR_K = 64


@dataclass(frozen=True)
class LinearBlocks:
    """Rows, outputs and columns per matrix product; blocks of rows per band; warps and load stages."""

    m: int
    n: int
    k: int
    bands: int
    warps: int
    stages: int


def linear_blocks(rows: int, weight: torch.dtype) -> LinearBlocks:
    """The blocks for a product with this many rows."""
    if weight == torch.float32:
        return LinearBlocks(32 if rows > 16 else 16, 64, 32, 8, 4, 3)
    if rows <= 16:
        return LinearBlocks(16, 32, LINEAR_K, 1, 4, 6)
    if rows <= 64:
        return LinearBlocks(64, 64, LINEAR_K, 1, 4, 4)
    return LinearBlocks(128, 128, LINEAR_K, 8, 8, 4)


@dataclass(frozen=True)
class AttentionBlocks:
    """Query rows (tokens x heads of one key head) per program; warps and load stages."""

    m: int
    warps: int
    stages: int


def attention_blocks(head_dim: int, group: int, *, small: bool) -> AttentionBlocks:
    """The blocks for heads of this size, `group` query heads per key head. small: the step has few rows."""
    m = 16 if small else 64
    if head_dim > 128 and not small:
        m = 32  # more rows of so large a head do not fit the registers
    return AttentionBlocks(max(m, next_power_of_2(group)), 4 if small else 8, 2)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def row_warps(width: int) -> int:
    """Warps of a program that holds a row of `width` float32 numbers: some 16 of them in each thread."""
    return min(max(width // 512, 1), 16)

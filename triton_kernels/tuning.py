"""Block sizes, fixed per shape and GPU and checked in: no request waits for a search, and no result depends on one.

Nor does a request wait for a compiler more often than it must: Triton builds a kernel anew for an argument that is 1 or
a multiple of 16 and for each alignment of an array, unless told otherwise. So kernels are told of every argument that
changes from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

__all__ = [
    "AttentionBlocks",
    "LinearBlocks",
    "attention_blocks",
    "backward_blocks",
    "linear_blocks",
    "next_power_of_2",
    "row_warps",
    "shared_bytes",
]

# Products are summed in blocks of this many columns whatever the rest: it belongs to the result.
LINEAR_K = 64
# Shared memory that a program may take, by compute capability (CUDA C++ Programming Guide, "Technical Specifications
# per Compute Capability"). Of the GPUs that are left out here it is that of the smallest.
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, **dict.fromkeys(((9, 0), (10, 0), (10, 3)), 227 * 1024)}
SHARED_BYTES_OF_OTHERS = 99 * 1024


@dataclass(frozen=True)
class LinearBlocks:
    """Rows, outputs and columns per matrix product; blocks of rows per band; warps and load stages."""

    m: int
    n: int
    k: int
    bands: int
    warps: int
    stages: int


def linear_blocks(rows: int, weight: torch.dtype, *, exact: bool, shared: int) -> LinearBlocks:
    """The blocks for a product with this many rows.

    exact: one instruction for every number of rows: a Hopper GPU multiplies blocks of 64 rows by another than smaller
    ones, and nobody promises that both round alike. shared: bytes of shared memory that a program may take.
    """
    if weight == torch.float32:
        return LinearBlocks(32 if rows > 16 else 16, 64, 32, 8, 4, 3)
    if rows <= 16:
        return LinearBlocks(64, 32, LINEAR_K, 1, 4, 5) if exact else LinearBlocks(16, 32, LINEAR_K, 1, 4, 6)
    if rows <= 64:
        return LinearBlocks(64, 64, LINEAR_K, 1, 4, 4)
    return LinearBlocks(128, 128, LINEAR_K, 8, 8, 4 if shared > SHARED_BYTES_OF_OTHERS else 3)


@dataclass(frozen=True)
class AttentionBlocks:
    """Query rows (tokens x heads of one key head) per program, tokens of context per product; warps and load stages."""

    m: int
    n: int
    warps: int
    stages: int


def attention_blocks(head_dim: int, group: int, pages: torch.dtype, *, small: bool) -> AttentionBlocks:
    """The blocks for heads of this size, `group` query heads per key head. small: the step has few rows.

    n belongs to the result: it is the same for few rows and many. The sizes are those with which no register is
    spilled (bench/kernels.md).
    """
    wide = head_dim > 128
    if pages == torch.float32:  # without matrix instructions each thread holds rows of both operands
        m, n, warps = 16 if small else 32, 16, 8
        stages = 2 if small or 64 < head_dim < 128 else 1 if head_dim <= 64 else 3
    elif wide:
        m, n, warps, stages = 16 if small else 32, 32, 4 if small else 16 if pages == torch.bfloat16 else 8, 2
    else:
        m, n, warps, stages = 16 if small else 64, 64, 4 if small else 8, 2
    return AttentionBlocks(max(m, next_power_of_2(group)), n, warps, stages)


def backward_blocks(head_dim: int, group: int, pages: torch.dtype) -> AttentionBlocks:
    """The blocks of attention's backward pass."""
    wide = head_dim > 128
    if pages == torch.float32:
        side, warps, stages = (16, 4, 2) if wide else (16, 8, 1)
    else:
        side, warps, stages = (32, 8, 2) if wide else (32, 4, 3)
    return AttentionBlocks(max(side, next_power_of_2(group)), side, warps, stages)


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take on a GPU; under the interpreter there is no limit to keep."""
    return _shared_bytes(device.index) if device.type == "cuda" else max(SHARED_BYTES.values())


@cache
def _shared_bytes(index: int) -> int:
    return SHARED_BYTES.get(torch.cuda.get_device_capability(index), SHARED_BYTES_OF_OTHERS)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def row_warps(width: int) -> int:
    """Warps of a program that holds a row of `width` float32 numbers: some 16 of them in each thread."""
    return min(max(width // 512, 1), 16)

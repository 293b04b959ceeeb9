"""The log-sum-exp of logits rows.

A row is cut into tiles of TILE ids, each reduced whole by one program; the partial results are folded in order. Both
is done by the functions here, in sampling.py and token_scores.py too, and without fused multiply-adds. So a row's
log-probability has the same bits wherever it is asked for.
Twin: reference.log_sum_exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["TILE", "WARPS", "fold", "log_sum_exp", "reduce"]

TILE = 4096
WARPS = 8  # of a program that reduces a tile


@triton.jit
def reduce(values):
    """The largest of a tile, and the sum of e^(value - largest)."""
    peak = tl.max(values, axis=0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(tl.exp(values - safe), axis=0)


@triton.jit
def fold(peaks, totals, tiles):
    """The log-sum-exp of a row from what its tiles gave, left to right."""
    peak, total = tl.load(peaks), tl.load(totals)
    for tile in range(1, tiles):
        tile_peak = tl.load(peaks + tile)
        higher = tl.maximum(peak, tile_peak)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.load(totals + tile) * tl.exp(tile_peak - safe)
        peak = higher
    return peak + tl.log(total)


@triton.jit
def tile_kernel(logits, peaks, totals, row_stride, vocabulary, tiles, TILE: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * row_stride + at, mask=at < vocabulary, other=float("-inf"))
    peak, total = reduce(values)
    tl.store(peaks + row * tiles + tile, peak)
    tl.store(totals + row * tiles + tile, total)


@triton.jit
def fold_kernel(peaks, totals, out, tiles):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, fold(peaks + row * tiles, totals + row * tiles, tiles))


def log_sum_exp(logits: Tensor) -> Tensor:
    """float32 [R, vocabulary] (rows contiguous) -> float32 [R]."""
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    peaks, totals = (torch.empty(rows, tiles, dtype=torch.float32, device=logits.device) for _ in range(2))
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        tile_kernel[(rows, tiles)](
            logits, peaks, totals, logits.stride(0), vocabulary, tiles, TILE, num_warps=WARPS, enable_fp_fusion=False
        )
        fold_kernel[(rows,)](peaks, totals, out, tiles, enable_fp_fusion=False)
    return out

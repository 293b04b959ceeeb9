"""The log-sum-exp of logits rows.

A row is cut into tiles of TILE ids, each reduced whole by one program; the partial results are folded in order by one
function, here and in token_scores.py. So a row's log-probability has the same bits wherever it is asked for.
Twin: reference.log_sum_exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["log_sum_exp"]

TILE = 4096
WARPS = 8  # of a program that reduces a tile


@triton.jit
def tile_kernel(logits, peaks, totals, row_stride, vocabulary, tiles, TILE: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * row_stride + at, mask=at < vocabulary, other=float("-inf"))
    place = row * tiles + tile
    peak = tl.max(values, axis=0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(values - safe), axis=0))


@triton.jit
def fold_kernel(peaks, totals, out, tiles):
    """The log-sum-exp of one row from those of its tiles, left to right."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(peaks + row * tiles)
    total = tl.load(totals + row * tiles)
    for tile in range(1, tiles):
        tile_peak = tl.load(peaks + row * tiles + tile)
        higher = tl.maximum(peak, tile_peak)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.load(totals + row * tiles + tile) * tl.exp(tile_peak - safe)
        peak = higher
    tl.store(out + row, peak + tl.log(total))


def log_sum_exp(logits: Tensor) -> Tensor:
    """float32 [R, vocabulary] (rows contiguous) -> float32 [R]."""
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    peaks, totals = (torch.empty(rows, tiles, dtype=torch.float32, device=logits.device) for _ in range(2))
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        tile_kernel[(rows, tiles)](logits, peaks, totals, logits.stride(0), vocabulary, tiles, TILE, num_warps=WARPS)
        fold_kernel[(rows,)](peaks, totals, out, tiles)
    return out

"""Reductions of logits rows: log-sum-exp, log-probability of given ids, the likeliest id, and the draw of one.

A row is cut into tiles of TILE ids, each reduced whole by one program; the partial results are folded in order by one
function, here and in training.py. So a row's log-probability has the same bits wherever it is asked for.
Twins: reference.log_sum_exp, noise.gumbel, draw.draw_rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw", "log_sum_exp"]

TILE = 4096
WARPS = 8  # of a program that reduces a tile
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def tile_kernel(logits, peaks, totals, best, best_id, temperatures, keys, row_stride, vocabulary, tiles,
                TILE: tl.constexpr, DRAWS: tl.constexpr):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < vocabulary
    values = tl.load(logits + row * row_stride + at, mask=inside, other=float("-inf"))
    place = row * tiles + tile
    if DRAWS:
        temperature = tl.load(temperatures + row)
        values = values / tl.where(temperature == 0.0, 1.0, temperature)
        scores = values.to(tl.float64)
        if temperature > 0.0:
            scores += gumbel(tl.load(keys + row).to(tl.uint64, bitcast=True), at)
        score = tl.max(scores, axis=0)
        tl.store(best + place, score)
        tl.store(best_id + place, tl.min(tl.where(scores == score, at, vocabulary), axis=0))
    peak = tl.max(values, axis=0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(values - safe), axis=0))


@triton.jit
def gumbel(key, ids):
    """float64 noise of ids under a key: see engine/noise.py, but for the last bits of the logarithm."""
    x = key + (ids.to(tl.uint64) + 1) * GAMMA
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    x = x ^ (x >> 31)
    uniform = ((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


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
    peaks, totals, tiles = _partials(logits)
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        grid = (len(logits), tiles)
        tile_kernel[grid](
            logits, peaks, totals, peaks, peaks, peaks, peaks, logits.stride(0), logits.shape[1], tiles, TILE, False,
            num_warps=WARPS,
        )  # fmt: skip
        fold_kernel[(len(logits),)](peaks, totals, out, tiles)
    return out


def draw(logits: Tensor, temperatures: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """One id per row of logits (float32 [R, vocabulary]) without filters, and its log-probability.

    temperatures: float32 [R], 0 is greedy. keys: int64 [R], the bits of noise.stream_key. -> int64 [R], float32 [R]:
    log-softmax of logits / temperature (of the logits at temperature 0). Of equal ids the lowest.
    """
    peaks, totals, tiles = _partials(logits)
    rows, vocabulary = logits.shape
    sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, tiles, dtype=torch.float64, device=logits.device)
    best_id = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=logits.device), sums
    grid = (rows, tiles)
    tile_kernel[grid](
        logits, peaks, totals, best, best_id, temperatures, keys, logits.stride(0), vocabulary, tiles, TILE, True,
        num_warps=WARPS,
    )  # fmt: skip
    fold_kernel[(rows,)](peaks, totals, sums, tiles)
    ids = best_id.gather(1, best.argmax(dim=1, keepdim=True))
    divisors = torch.where(temperatures == 0, 1.0, temperatures).unsqueeze(1)
    return ids.squeeze(1), (logits.gather(1, ids) / divisors).squeeze(1) - sums


def _partials(logits: Tensor) -> tuple[Tensor, Tensor, int]:
    tiles = triton.cdiv(logits.shape[1], TILE)
    peaks, totals = (torch.empty(len(logits), tiles, dtype=torch.float32, device=logits.device) for _ in range(2))
    return peaks, totals, tiles

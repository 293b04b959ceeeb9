"""Paged causal attention over ragged spans: prefill pieces, single tokens and drafts by one kernel.

Exactness. The context is cut into tiles of TILE tokens at multiples of TILE. A row has one partial result per tile
(maximum, sum, output), made over blocks of BLOCK_N tokens, and folds them left to right by one function; a block or a
tile that a row does not see leaves its state as it is, bit for bit. So with one size of block (`exact`) neither the
company of a row, nor the cut of its span, nor where its pages lie changes a bit.

A program takes the heads of one key head for some tokens of one span. In a step of few rows each tile goes to a program
of its own, which stores its partial for `merge_kernel`; with many rows one program folds all tiles. Where a group of
spans begins with the same pages, the tiles wholly inside are made for all rows of the group at once.

Twin: reference.paged_attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import dot, narrow
from .tuning import attention_blocks

__all__ = ["LOG2E", "TILE", "SharedPrefix", "merge_tiles", "paged_attention"]

TILE = 1024  # tokens of context per partial result
BLOCK_N = 64  # tokens of context per matrix product
LOG2E = 1.4426950408889634


@triton.jit
def fold(peak, total, acc, tile_peak, tile_total, tile_acc):
    """Put the partial result of the next tile behind those before it."""
    higher = tl.maximum(peak, tile_peak)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(peak - safe), tl.exp2(tile_peak - safe)
    return higher, total * old + tile_total * new, acc * old[:, None] + tile_acc * new[:, None]


@triton.jit
def tile_partial(
    q, key_pages, value_pages, table, kv_head, kv_heads, first, last, positions, length, scale,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Attend from q [BLOCK_M, BLOCK_D] to tokens first .. last - 1; `positions`: the last token that each row sees."""
    at_d = tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        written = tokens < length
        page = tl.load(table + tokens // PAGE, mask=written, other=0).to(tl.int64)
        rows = ((page * kv_heads + kv_head) * PAGE + tokens % PAGE) * DIM
        inside = written[:, None] & (at_d < DIM)[None, :]
        k = tl.load(key_pages + rows[:, None] + at_d[None, :], mask=inside, other=0.0)
        k = narrow(k) if HALF else k.to(tl.float32)
        scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * scale
        scores = tl.where(written[None, :] & (tokens[None, :] <= positions[:, None]), scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        old = tl.exp2(peak - safe)
        v = tl.load(value_pages + rows[:, None] + at_d[None, :], mask=inside, other=0.0)
        v = narrow(v) if HALF else v.to(tl.float32)
        total = total * old + tl.sum(weights, axis=1)
        acc = dot(narrow(weights) if HALF else weights, v, acc * old[:, None])
        peak = higher
    return peak, total, acc


@triton.jit
def span_of(block, query_start, spans, TOKENS: tl.constexpr):
    """Which span a block of TOKENS rows belongs to: span i has blocks query_start[i] // TOKENS + i and on."""
    low, high = 0, spans
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attention_kernel(
    query, key_pages, value_pages, query_start, kv_length, tables, skipped, out, log_sums, peaks, totals, partials,
    scale, spans, heads, kv_heads, table_stride, tiles,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
    HALF: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    block, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = span_of(block, query_start, spans, TOKENS)
    begin, end = tl.load(query_start + span), tl.load(query_start + span + 1)
    length = tl.load(kv_length + span)
    first_row = begin + (block - begin // TOKENS - span) * TOKENS
    at_m, at_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = first_row + at_m // GROUP
    active = (row < end) & (at_m < TOKENS * GROUP)
    positions = length - (end - row) if CAUSAL else tl.zeros((BLOCK_M,), tl.int32) + length
    seen = tl.minimum(length, length - (end - first_row) + TOKENS) if CAUSAL else length
    if first_row < end:
        head = kv_head * GROUP + at_m % GROUP
        place = row.to(tl.int64) * heads + head
        inside = active[:, None] & (at_d < DIM)[None, :]
        q = tl.load(query + place[:, None] * DIM + at_d[None, :], mask=inside, other=0.0)
        if HALF:
            q = narrow(q)
        table = tables + span.to(tl.int64) * table_stride
        if PARTIAL:
            if (tile * TILE < seen) & (tile >= tl.load(skipped + span)):
                peak, total, acc = tile_partial(
                    q, key_pages, value_pages, table, kv_head, kv_heads, tile * TILE,
                    tl.minimum(tile * TILE + TILE, seen), positions, length, scale,
                    PAGE, DIM, BLOCK_D, BLOCK_M, BLOCK_N, HALF,
                )  # fmt: skip
                place = place * tiles + tile
                tl.store(peaks + place, peak, mask=active)
                tl.store(totals + place, total, mask=active)
                tl.store(partials + place[:, None] * DIM + at_d[None, :], acc, mask=inside)
        else:
            peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for start in range(0, seen, TILE):
                tile_peak, tile_total, tile_acc = tile_partial(
                    q, key_pages, value_pages, table, kv_head, kv_heads, start, tl.minimum(start + TILE, seen),
                    positions, length, scale, PAGE, DIM, BLOCK_D, BLOCK_M, BLOCK_N, HALF,
                )  # fmt: skip
                peak, total, acc = fold(peak, total, acc, tile_peak, tile_total, tile_acc)
            result = acc / total[:, None]
            tl.store(out + place[:, None] * DIM + at_d[None, :], result, mask=inside)
            if SAVES:
                tl.store(log_sums + place, peak + tl.log2(total), mask=active)


@triton.jit
def merge_kernel(
    peaks, totals, partials, query_start, kv_length, out, spans, heads, tiles,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fold the partial results of one row and head; one program each."""
    row, head = tl.program_id(0), tl.program_id(1)
    low, high = 0, spans
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= row:
            low = middle + 1
        else:
            high = middle
    span = low - 1
    position = tl.load(kv_length + span) - (tl.load(query_start + span + 1) - row)
    one, at_d = tl.arange(0, 1), tl.arange(0, BLOCK_D)
    inside = (at_d < DIM)[None, :]
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    first = (row.to(tl.int64) * heads + head) * tiles
    for tile in range(position // TILE + 1):
        place = first + tile + one
        tile_acc = tl.load(partials + place[:, None] * DIM + at_d[None, :], mask=inside, other=0.0)
        peak, total, acc = fold(peak, total, acc, tl.load(peaks + place), tl.load(totals + place), tile_acc)
    target = out + (row.to(tl.int64) * heads + head) * DIM + at_d[None, :]
    tl.store(target, acc / total[:, None], mask=inside)


@dataclass(frozen=True)
class SharedPrefix:
    """Groups of neighbouring spans that begin with the same pages.

    query_start: int32 [groups + 1], rows of each group. kv_length: int32 [groups], shared tokens, a multiple of TILE
    (0: nothing). pages: int32 [groups, pages]. skipped: int32 [spans], shared tiles of each span.
    """

    query_start: Tensor
    kv_length: Tensor
    pages: Tensor
    skipped: Tensor


def paged_attention(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, query_start: Tensor, kv_length: Tensor, pages: Tensor,
    scale: float, *, few_rows: bool, exact: bool = False, shared: SharedPrefix | None = None,
    log_sums: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from query [T, heads, head_dim] over pages [pages, kv_heads, page_size, head_dim] -> float32, as query.

    query_start, kv_length, pages: the fields of ops.Spans, on the same device. Pages of float32 are multiplied in
    float32, all others in bfloat16; sums are float32. few_rows: give each tile a program of its own (decode and
    drafts). exact: with the blocks of many rows all the same, since the layout of a block's reductions goes with its
    size; a row's bits then depend on nothing but the row. shared: read these tokens once per group; needs few_rows.
    log_sums: float32 [T, heads], gets the log2 of each row's sum for the backward pass; not with few_rows.
    """
    tokens, heads, head_dim = query.shape
    kv_heads, page_size = key_pages.shape[1], key_pages.shape[2]
    group = heads // kv_heads
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if not tokens:
        return out
    query = query.contiguous()
    block_d = max(triton.next_power_of_2(head_dim), 16)
    blocks = attention_blocks(head_dim, group, small=few_rows and not exact)
    per_block = blocks.m // group
    sizes = {"GROUP": group, "PAGE": page_size, "DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": blocks.m}
    tiles = triton.cdiv(pages.shape[1] * page_size, TILE)
    peaks, totals, partials = out, out, out
    if few_rows:
        peaks, totals = (torch.empty(tokens, heads, tiles, dtype=torch.float32, device=query.device) for _ in range(2))
        partials = torch.empty(tokens, heads, tiles, head_dim, dtype=torch.float32, device=query.device)

    def launch(starts: Tensor, lengths: Tensor, tables: Tensor, skipped: Tensor, width: int, causal: bool) -> None:
        grid = (tokens // per_block + len(lengths), kv_heads, width)
        attention_kernel[grid](
            query, key_pages, value_pages, starts, lengths, tables, skipped, out,
            out if log_sums is None else log_sums, peaks, totals, partials,
            scale * LOG2E, len(lengths), heads, kv_heads, tables.stride(0), tiles,
            **sizes, BLOCK_N=BLOCK_N, TILE=TILE, CAUSAL=causal, PARTIAL=few_rows,
            HALF=key_pages.dtype != torch.float32, SAVES=log_sums is not None,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    nothing = torch.zeros_like(kv_length)
    if shared is not None:
        width = triton.cdiv(shared.pages.shape[1] * page_size, TILE)
        launch(shared.query_start, shared.kv_length, shared.pages, torch.zeros_like(shared.kv_length), width, False)
    skipped = nothing if shared is None else shared.skipped
    launch(query_start, kv_length, pages, skipped, tiles if few_rows else 1, True)
    return merge_tiles(peaks, totals, partials, query_start, kv_length, TILE) if few_rows else out


def merge_tiles(
    peaks: Tensor, totals: Tensor, partials: Tensor, query_start: Tensor, kv_length: Tensor, tile: int
) -> Tensor:
    """Fold the partial results of `tile` tokens each -> float32 [T, heads, head_dim].

    peaks, totals: float32 [T, heads, tiles]: largest score, and sum of 2^(score - peak). partials: float32
    [T, heads, tiles, head_dim], the values weighted so.
    """
    tokens, heads, tiles, head_dim = partials.shape
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float32, device=partials.device)
    if tokens:
        merge_kernel[(tokens, heads)](
            peaks, totals, partials, query_start, kv_length, out, len(kv_length), heads, tiles,
            DIM=head_dim, BLOCK_D=max(triton.next_power_of_2(head_dim), 16), TILE=tile,
        )  # fmt: skip
    return out

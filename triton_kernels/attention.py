"""Paged causal attention over ragged spans: prefill pieces, single tokens and drafts by one kernel.

Exactness. The context is cut into tiles of TILE tokens at multiples of TILE. A row has one partial result per tile
(maximum, sum, output), made over blocks of BLOCK_N tokens, and folds them left to right by one function, whose fused
multiply-adds are written out: several kernels contain it, and a compiler is free to fuse each of them in its own way. A
block or a tile that a row does not see leaves its state as it is, bit for bit. So with one size of block (`exact`)
neither the company of a row, nor the cut of its span, nor where its pages lie changes a bit.

A program takes the heads of one key head for some tokens of one span. In a step of few rows each tile goes to a program
of its own, which stores its partial for `merge_kernel`; with many rows one program folds all tiles. Where a group of
spans begins with the same pages, the tiles wholly inside are made for all rows of the group at once (`SharedPrefix`):
the same partial results, each of those keys and values read once for many rows.

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

__all__ = ["LOG2E", "TILE", "SharedPrefix", "merge_tiles", "paged_attention", "shared_partials"]

TILE = 1024  # tokens of context per partial result
LOG2E = 1.4426950408889634


@triton.jit
def fold(peak, total, acc, tile_peak, tile_total, tile_acc):
    """Put the partial result of the next tile behind those before it."""
    higher = tl.maximum(peak, tile_peak)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(peak - safe), tl.exp2(tile_peak - safe)
    acc = tl.fma(tile_acc, new[:, None], acc * old[:, None])
    return higher, tl.fma(tile_total, new, total * old), acc


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
        total = tl.fma(total, old, tl.sum(weights, axis=1))
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


@triton.jit(
    do_not_specialize=["spans", "table_stride", "tiles"],
    do_not_specialize_on_alignment=["query_start", "kv_length", "tables", "rows", "skipped"],
)
def attention_kernel(
    query, key_pages, value_pages, query_start, kv_length, tables, rows, skipped, out, log_sums, peaks, totals,
    partials, scale, spans, heads, kv_heads, table_stride, tiles,
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
        if not CAUSAL:  # of a group, whose rows may lie anywhere
            row = tl.load(rows + row, mask=active, other=0)
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


@triton.jit(do_not_specialize=["spans", "tiles"], do_not_specialize_on_alignment=["query_start", "kv_length"])
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
    """Groups of spans that begin with the same pages, for paged_attention; the groups that are left over are empty.

    rows: int32 [T], the rows of the batch, those of a group side by side. query_start: int32 [spans + 1], where in
    `rows` each group begins. kv_length: int32 [spans], shared tokens of a group, a multiple of TILE (0: nothing).
    pages: int32 [spans, most pages] of a group. skipped: int32 [spans], shared tiles of each span.
    """

    rows: Tensor
    query_start: Tensor
    kv_length: Tensor
    pages: Tensor
    skipped: Tensor

    @classmethod
    def find(
        cls, tokens: int, query_start: Tensor, kv_length: Tensor, pages: Tensor, page_size: int
    ) -> SharedPrefix | None:
        """Group the spans of a step of `tokens` rows by their first tile. None where there can't be two such spans.

        query_start, kv_length, pages: the fields of ops.Spans; two spans with one page at the same place have all
        pages before it in common, as the prefix index has them. Nothing is read back from the device, and the launches
        do not depend on what is found.
        """
        spans, tiles = len(kv_length), pages.shape[1] * page_size // TILE
        if spans < 2 or not tiles:
            return None
        each, device = torch.arange(spans, device=pages.device), pages.device
        counts = query_start.diff()
        before = (kv_length - counts) // TILE  # tiles that all rows of a span see whole
        ends = (torch.arange(1, tiles + 1, device=device) * TILE - 1) // page_size
        marks = torch.where(torch.arange(tiles, device=device) < before[:, None], pages[:, ends], -1 - each[:, None])
        key, order = marks[:, 0].sort(stable=True)
        begins = torch.ones(spans, dtype=torch.bool, device=device)
        torch.ne(key[1:], key[:-1], out=begins[1:])
        group = begins.cumsum(0) - 1
        first = torch.where(begins, each, 0).cummax(0).values  # where the group of each span begins in `order`
        common = (marks[order] == marks[order[first]]).cumprod(1).sum(1)
        members = torch.zeros_like(each).index_add_(0, group, torch.ones_like(each))
        least = torch.full_like(each, tiles).scatter_reduce_(0, group, common, "amin")
        shared = torch.where(members > 1, least, 0)
        rows_of = torch.zeros_like(each).index_add_(0, group, counts[order].long())
        leaders = torch.zeros_like(each).scatter_reduce_(0, group, each, "amin", include_self=False)
        behind = counts[order].cumsum(0) - counts[order]
        moved = torch.repeat_interleave(query_start[order] - behind, counts[order], output_size=tokens)
        return cls(
            rows=(torch.arange(tokens, device=device) + moved).int(),
            query_start=torch.nn.functional.pad(rows_of.cumsum(0), (1, 0)).int(),
            kv_length=(shared * TILE).int(),
            pages=pages[order[leaders]],
            skipped=torch.zeros_like(each).index_copy_(0, order, shared[group]).int(),
        )


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
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if not tokens:
        return out
    query = query.contiguous()
    tiles = triton.cdiv(pages.shape[1] * key_pages.shape[2], TILE)
    peaks, totals, partials = out, out, out
    if few_rows:
        peaks, totals = (torch.empty(tokens, heads, tiles, dtype=torch.float32, device=query.device) for _ in range(2))
        partials = torch.empty(tokens, heads, tiles, head_dim, dtype=torch.float32, device=query.device)
    if shared is not None:
        shared_partials(query, key_pages, value_pages, shared, scale, peaks, totals, partials)
    _launch(
        query, key_pages, value_pages, query_start, kv_length, pages, query_start,
        torch.zeros_like(kv_length) if shared is None else shared.skipped,
        out, out if log_sums is None else log_sums, peaks, totals, partials, scale,
        small=few_rows and not exact, tiles=tiles if few_rows else 1, causal=True, partial=few_rows,
        saves=log_sums is not None,
    )  # fmt: skip
    return merge_tiles(peaks, totals, partials, query_start, kv_length, TILE) if few_rows else out


def shared_partials(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, shared: SharedPrefix, scale: float, peaks: Tensor,
    totals: Tensor, partials: Tensor,
) -> None:  # fmt: skip
    """Write what merge_tiles folds for the tiles that groups share; the others are left alone."""
    _launch(
        query, key_pages, value_pages, shared.query_start, shared.kv_length, shared.pages, shared.rows,
        torch.zeros_like(shared.kv_length), partials, partials, peaks, totals, partials, scale,
        small=False, tiles=peaks.shape[2], causal=False, partial=True, saves=False,
    )  # fmt: skip


def _launch(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, query_start: Tensor, kv_length: Tensor, tables: Tensor,
    rows: Tensor, skipped: Tensor, out: Tensor, log_sums: Tensor, peaks: Tensor, totals: Tensor, partials: Tensor,
    scale: float, *, small: bool, tiles: int, causal: bool, partial: bool, saves: bool,
) -> None:  # fmt: skip
    tokens, heads, head_dim = query.shape
    kv_heads, page_size = key_pages.shape[1:3]
    group = heads // kv_heads
    blocks = attention_blocks(head_dim, group, key_pages.dtype, small=small)
    attention_kernel[(tokens // (blocks.m // group) + len(kv_length), kv_heads, tiles)](
        query, key_pages, value_pages, query_start, kv_length, tables, rows, skipped, out, log_sums, peaks, totals,
        partials, scale * LOG2E, len(kv_length), heads, kv_heads, tables.stride(0), tiles,
        GROUP=group, PAGE=page_size, DIM=head_dim, BLOCK_D=max(triton.next_power_of_2(head_dim), 16), BLOCK_M=blocks.m,
        BLOCK_N=blocks.n, TILE=TILE, CAUSAL=causal, PARTIAL=partial, HALF=key_pages.dtype != torch.float32, SAVES=saves,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


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

"""The backward pass of paged attention over ragged spans (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Scores are made again from the saved log-sums. One kernel walks the context for each block of queries, another the
queries for each block of context: no atomics, every sum has one order. Twin: autograd of reference.attend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import dot, narrow
from .attention import LOG2E, span_of
from .tuning import backward_blocks, next_power_of_2

__all__ = ["paged_attention_backward"]


@triton.jit
def load_half(pointer, mask, HALF: tl.constexpr):
    """float32, or rounded to bfloat16."""
    x = tl.load(pointer, mask=mask, other=0.0)
    return narrow(x) if HALF else x.to(tl.float32)


@triton.jit(
    do_not_specialize=["spans", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "kv_length", "tables"],
)
def query_gradient_kernel(
    grad, query, key_pages, value_pages, log_sums, deltas, query_start, kv_length, tables, grad_query,
    scale, spans, heads, kv_heads, table_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HALF: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    block, kv_head = tl.program_id(0), tl.program_id(1)
    span = span_of(block, query_start, spans, TOKENS)
    begin, end = tl.load(query_start + span), tl.load(query_start + span + 1)
    length = tl.load(kv_length + span)
    first_row = begin + (block - begin // TOKENS - span) * TOKENS
    if first_row < end:
        at_m, at_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        row = first_row + at_m // GROUP
        active = (row < end) & (at_m < TOKENS * GROUP)
        positions = length - (end - row)
        seen = tl.minimum(length, length - (end - first_row) + TOKENS)
        place = row.to(tl.int64) * heads + kv_head * GROUP + at_m % GROUP
        inside = active[:, None] & (at_d < DIM)[None, :]
        q = load_half(query + place[:, None] * DIM + at_d[None, :], inside, HALF)
        d_out = load_half(grad + place[:, None] * DIM + at_d[None, :], inside, HALF)
        log_sum = tl.load(log_sums + place, mask=active, other=0.0)
        delta = tl.load(deltas + place, mask=active, other=0.0)
        table = tables + span.to(tl.int64) * table_stride
        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(0, seen, BLOCK_N):
            tokens = start + tl.arange(0, BLOCK_N)
            written = tokens < length
            page = tl.load(table + tokens // PAGE, mask=written, other=0).to(tl.int64)
            slots = ((page * kv_heads + kv_head) * PAGE + tokens % PAGE) * DIM
            known = written[:, None] & (at_d < DIM)[None, :]
            k = load_half(key_pages + slots[:, None] + at_d[None, :], known, HALF)
            v = load_half(value_pages + slots[:, None] + at_d[None, :], known, HALF)
            visible = written[None, :] & (tokens[None, :] <= positions[:, None])
            scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * (scale * LOG2E)
            weights = tl.where(visible, tl.exp2(scores - log_sum[:, None]), 0.0)
            d_weights = dot(d_out, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            d_scores = weights * (d_weights - delta[:, None]) * scale
            total = dot(narrow(d_scores) if HALF else d_scores, k, total)
        tl.store(grad_query + place[:, None] * DIM + at_d[None, :], total, mask=inside)


@triton.jit(
    do_not_specialize=["spans", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "kv_start", "tables"],
)
def context_gradient_kernel(
    grad, query, key_pages, value_pages, log_sums, deltas, query_start, kv_start, tables, grad_key, grad_value,
    scale, spans, heads, kv_heads, table_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HALF: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    block, kv_head = tl.program_id(0), tl.program_id(1)
    span = span_of(block, kv_start, spans, BLOCK_N)
    first, last = tl.load(kv_start + span), tl.load(kv_start + span + 1)
    begin, end = tl.load(query_start + span), tl.load(query_start + span + 1)
    length = last - first
    start = (block - first // BLOCK_N - span) * BLOCK_N
    if start < length:
        at_m, at_d, at_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        tokens = start + at_n
        written = tokens < length
        page = tl.load(tables + span.to(tl.int64) * table_stride + tokens // PAGE, mask=written, other=0).to(tl.int64)
        slots = ((page * kv_heads + kv_head) * PAGE + tokens % PAGE) * DIM
        known = written[:, None] & (at_d < DIM)[None, :]
        k = load_half(key_pages + slots[:, None] + at_d[None, :], known, HALF)
        v = load_half(value_pages + slots[:, None] + at_d[None, :], known, HALF)
        d_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        d_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        # Row r stands at position length - (end - r); the first that sees this block stands at `start`.
        first_row = tl.maximum(begin, start + end - length)
        for first_of_block in range(first_row, end, TOKENS):
            row = first_of_block + at_m // GROUP
            active = (row < end) & (at_m < TOKENS * GROUP)
            positions = length - (end - row)
            place = row.to(tl.int64) * heads + kv_head * GROUP + at_m % GROUP
            inside = active[:, None] & (at_d < DIM)[None, :]
            q = load_half(query + place[:, None] * DIM + at_d[None, :], inside, HALF)
            d_out = load_half(grad + place[:, None] * DIM + at_d[None, :], inside, HALF)
            log_sum = tl.load(log_sums + place, mask=active, other=0.0)
            delta = tl.load(deltas + place, mask=active, other=0.0)
            visible = written[:, None] & active[None, :] & (tokens[:, None] <= positions[None, :])
            scores = dot(k, tl.trans(q), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)) * (scale * LOG2E)
            weights = tl.where(visible, tl.exp2(scores - log_sum[None, :]), 0.0)
            d_v = dot(narrow(weights) if HALF else weights, d_out, d_v)
            d_weights = dot(v, tl.trans(d_out), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
            d_scores = weights * (d_weights - delta[None, :]) * scale
            d_k = dot(narrow(d_scores) if HALF else d_scores, q, d_k)
        target = ((first + tokens).to(tl.int64) * kv_heads + kv_head)[:, None] * DIM + at_d[None, :]
        tl.store(grad_key + target, d_k, mask=known)
        tl.store(grad_value + target, d_v, mask=known)


def paged_attention_backward(
    grad: Tensor, query: Tensor, out: Tensor, log_sums: Tensor, key_pages: Tensor, value_pages: Tensor,
    query_start: Tensor, kv_length: Tensor, pages: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of paged_attention for grad [T, heads, head_dim], all float32.

    query, out, log_sums: of the forward pass. -> those of the queries, and of keys and values [C, kv_heads, head_dim],
    where C counts the context tokens of all spans, span after span: a token that several spans read has one row each,
    to be added in order.
    """
    tokens, heads, head_dim = query.shape
    kv_heads, page_size = key_pages.shape[1], key_pages.shape[2]
    group = heads // kv_heads
    kv_start = torch.nn.functional.pad(kv_length.cumsum(0, dtype=torch.int32), (1, 0))
    context = int(kv_start[-1])
    grad, query, out = grad.contiguous(), query.contiguous(), out.contiguous()
    deltas = (grad * out).sum(dim=-1)
    grad_query = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    grad_key, grad_value = (
        torch.zeros(context, kv_heads, head_dim, dtype=torch.float32, device=query.device) for _ in range(2)
    )
    if not tokens:
        return grad_query, grad_key, grad_value
    blocks = backward_blocks(head_dim, group, key_pages.dtype)
    numbers = scale, len(kv_length), heads, kv_heads, pages.stride(0)
    sizes = {
        "GROUP": group, "PAGE": page_size, "DIM": head_dim, "BLOCK_D": max(next_power_of_2(head_dim), 16),
        "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "HALF": key_pages.dtype != torch.float32, "LOG2E": LOG2E,
        "num_warps": blocks.warps, "num_stages": blocks.stages,
    }  # fmt: skip
    query_gradient_kernel[(tokens // (blocks.m // group) + len(kv_length), kv_heads)](
        grad, query, key_pages, value_pages, log_sums, deltas, query_start, kv_length, pages, grad_query,
        *numbers, **sizes,
    )  # fmt: skip
    context_gradient_kernel[(context // blocks.n + len(kv_length), kv_heads)](
        grad, query, key_pages, value_pages, log_sums, deltas, query_start, kv_start, pages, grad_key, grad_value,
        *numbers, **sizes,
    )  # fmt: skip
    return grad_query, grad_key, grad_value

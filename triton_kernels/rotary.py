"""Rotary positions of query and key with the write of keys and values to their pages, and their plain rotation.

One program per token and head turns it by its position's angles, after Qwen3's norm of the head where the model has it;
those of key and value heads store into the pages. Twins: reference.rms_norm, rotate and write_kv.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotate", "rotate_and_write"]


@triton.jit
def turned(head, weight, cos, sin, position, eps, HALF: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr):
    """Both halves of one head, normed if asked for, turned by the angles of `position`."""
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    first = tl.load(head + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(head + HALF + at, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        square = tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)
        scale = tl.rsqrt(square / (2 * HALF) + eps)
        first *= scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF + at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + position * HALF + at, mask=inside, other=0.0)
    s = tl.load(sin + position * HALF + at, mask=inside, other=0.0)
    return first * c - second * s, second * c + first * s


@triton.jit
def rotate_kernel(x, positions, cos, sin, out, token_stride, heads, HALF: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    source = x + token * token_stride + head * 2 * HALF
    first, second = turned(source, source, cos, sin, position, 0.0, HALF, BLOCK, False)
    at = tl.arange(0, BLOCK)
    target = out + (token * heads + head) * 2 * HALF
    tl.store(target + at, first, mask=at < HALF)
    tl.store(target + HALF + at, second, mask=at < HALF)


@triton.jit
def rotate_and_write_kernel(
    query, key, value, query_weight, key_weight, positions, slots, cos, sin, out, key_pages, value_pages, eps,
    query_stride, key_stride, value_stride, heads, kv_heads,
    PAGE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    if head < heads:
        source = query + token * query_stride + head * 2 * HALF
        first, second = turned(source, query_weight, cos, sin, position, eps, HALF, BLOCK, NORMS)
        target = out + (token * heads + head) * 2 * HALF
        tl.store(target + at, first, mask=inside)
        tl.store(target + HALF + at, second, mask=inside)
    else:
        kv_head = head - heads
        slot = tl.load(slots + token)
        place = ((slot // PAGE * kv_heads + kv_head) * PAGE + slot % PAGE) * 2 * HALF
        source = key + token * key_stride + kv_head * 2 * HALF
        first, second = turned(source, key_weight, cos, sin, position, eps, HALF, BLOCK, NORMS)
        stored = key_pages.dtype.element_ty
        tl.store(key_pages + place + at, first.to(stored), mask=inside)
        tl.store(key_pages + place + HALF + at, second.to(stored), mask=inside)
        source = value + token * value_stride + kv_head * 2 * HALF
        low = tl.load(source + at, mask=inside, other=0.0)
        high = tl.load(source + HALF + at, mask=inside, other=0.0)
        tl.store(value_pages + place + at, low.to(stored), mask=inside)
        tl.store(value_pages + place + HALF + at, high.to(stored), mask=inside)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, head_dim] (heads contiguous), int64 [T], tables [window, head_dim / 2] -> turned, float32.

    With -sin it is its own backward pass.
    """
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if tokens:
        half = head_dim // 2
        block = triton.next_power_of_2(half)
        rotate_kernel[(tokens, heads)](x, positions, cos, sin, out, x.stride(0), heads, half, block)
    return out


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, positions: Tensor,
    slots: Tensor, cos: Tensor, sin: Tensor, key_pages: Tensor, value_pages: Tensor,
) -> Tensor:  # fmt: skip
    """Turn queries and keys, write keys and values to the slots of pages [pages, kv_heads, page_size, head_dim].

    query [T, heads, head_dim], key and value [T, kv_heads, head_dim] (heads contiguous); norms: weights [head_dim] of
    Qwen3's query and key norms. -> the turned queries, float32 [T, heads, head_dim].
    """
    tokens, heads, head_dim = query.shape
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if tokens:
        half, kv_heads = head_dim // 2, key.shape[1]
        query_weight, key_weight = (query, key) if norms is None else norms
        rotate_and_write_kernel[(tokens, heads + kv_heads)](
            query, key, value, query_weight, key_weight, positions, slots, cos, sin, out, key_pages, value_pages, eps,
            query.stride(0), key.stride(0), value.stride(0), heads, kv_heads,
            key_pages.shape[2], half, triton.next_power_of_2(half), norms is not None,
        )  # fmt: skip
    return out

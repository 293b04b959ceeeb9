"""Heads made ready for attention: QK-norm, the angle of their position, and where they lie in pages, in one kernel.

One program per token and head. Twin: the steps of reference.attend before it attends, and reference.move_kv.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import narrow, narrow_to_float8
from .tuning import next_power_of_2

__all__ = ["move_kv", "rotate", "turn_and_write"]

WARPS = 1


@triton.jit
def halves(row, at, HALF: tl.constexpr):
    """Both halves of a row of 2 * HALF numbers."""
    inside = at < HALF
    first = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(row + HALF + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def put(target, x, inside):
    """Store float32 x in the target's type, to the nearest, ties to even."""
    if target.dtype.element_ty == tl.bfloat16:
        tl.store(target, narrow(x), mask=inside)
    elif target.dtype.element_ty == tl.float8e4nv:
        tl.store(target, narrow_to_float8(x), mask=inside)
    else:
        tl.store(target, x, mask=inside)


@triton.jit
def angles(cos, sin, position, at, HALF: tl.constexpr):
    """A position's row of the tables."""
    place, inside = position * HALF + at, at < HALF
    return tl.load(cos + place, mask=inside, other=1.0), tl.load(sin + place, mask=inside, other=0.0)


@triton.jit
def turn(row, weight, c, s, eps, at, HALF: tl.constexpr, NORMED: tl.constexpr):
    """Both halves of a head, normed and turned."""
    first, second = halves(row, at, HALF)
    if NORMED:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=0) / (2 * HALF) + eps)
        of_first, of_second = halves(weight, at, HALF)
        first, second = first * scale * of_first, second * scale * of_second
    return first * c - second * s, second * c + first * s


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def turn_and_write_kernel(
    query, key, value, query_norm, key_norm, positions, cos, sin, slots, out, key_pages, value_pages, query_stride,
    key_stride, value_stride, heads, kv_heads, eps, PAGE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    c, s = angles(cos, sin, position, at, HALF)
    if head < heads:
        row = query + token * query_stride + head * 2 * HALF
        first, second = turn(row, query_norm, c, s, eps, at, HALF, NORMED)
        target = out + (token * heads + head) * 2 * HALF + at
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    else:
        head -= heads
        slot = tl.load(slots + token)
        place = ((slot // PAGE * kv_heads + head) * PAGE + slot % PAGE) * 2 * HALF + at
        first, second = turn(key + token * key_stride + head * 2 * HALF, key_norm, c, s, eps, at, HALF, NORMED)
        put(key_pages + place, first, inside)
        put(key_pages + place + HALF, second, inside)
        first, second = halves(value + token * value_stride + head * 2 * HALF, at, HALF)
        put(value_pages + place, first, inside)
        put(value_pages + place + HALF, second, inside)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rotate_kernel(x, positions, cos, sin, out, token_stride, heads, HALF: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    c, s = angles(cos, sin, position, at, HALF)
    first, second = turn(x + token * token_stride + head * 2 * HALF, x, c, s, 0.0, at, HALF, False)
    target = out + (token * heads + head) * 2 * HALF + at
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)


@triton.jit
def move_kernel(
    key_pages, value_pages, sources, targets, old, new, cos, sin, kv_heads, PAGE: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """rotary.turn_keys for one token and head, and its value as it is."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    slot = tl.load(sources + token)
    source = ((slot // PAGE * kv_heads + head) * PAGE + slot % PAGE) * 2 * HALF
    slot = tl.load(targets + token)
    target = ((slot // PAGE * kv_heads + head) * PAGE + slot % PAGE) * 2 * HALF + at
    c, s = angles(cos, sin, tl.load(old + token), at, HALF)
    c_new, s_new = angles(cos, sin, tl.load(new + token), at, HALF)
    c, s, c_new, s_new = c.to(tl.float64), s.to(tl.float64), c_new.to(tl.float64), s_new.to(tl.float64)
    square = c * c + s * s
    turn_c, turn_s = (c_new * c + s_new * s) / square, (s_new * c - c_new * s) / square
    first, second = halves(key_pages + source, at, HALF)
    first, second = first.to(tl.float64), second.to(tl.float64)
    put(key_pages + target, (first * turn_c - second * turn_s).to(tl.float32), inside)
    put(key_pages + target + HALF, (second * turn_c + first * turn_s).to(tl.float32), inside)
    first, second = halves(value_pages + source, at, HALF)
    put(value_pages + target, first, inside)
    put(value_pages + target + HALF, second, inside)


def turn_and_write(
    query: Tensor, key: Tensor, value: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float,
    positions: Tensor, cos: Tensor, sin: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Norm (where there are weights) and turn query [T, heads, head_dim] and key, write key and value to their slots.

    float32, heads contiguous; key and value [T, kv_heads, head_dim]. Norms, positions, cos, sin: see ops.Turn. pages:
    [pages, kv_heads, page_size, head_dim] of float32, bfloat16 or float8_e4m3fn. slots: int64 [T], page * page_size +
    offset. -> the query that attends, float32 dense.
    """
    tokens, heads, head_dim = query.shape
    kv_heads, half = key.shape[1], head_dim // 2
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if tokens:
        turn_and_write_kernel[(tokens, heads + kv_heads)](
            query, key, value, query if query_norm is None else query_norm, key if key_norm is None else key_norm,
            positions, cos, sin, slots, out, key_pages, value_pages, query.stride(0), key.stride(0), value.stride(0),
            heads, kv_heads, eps, PAGE=key_pages.shape[2], HALF=half, BLOCK=next_power_of_2(half),
            NORMED=query_norm is not None, num_warps=WARPS,
        )  # fmt: skip
    return out


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, head_dim] (heads contiguous), int64 [T], tables [window, head_dim / 2] -> turned, float32.

    With -sin it is its own backward pass. Twin: reference.rotate.
    """
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if tokens:
        half = head_dim // 2
        block = next_power_of_2(half)
        rotate_kernel[(tokens, heads)](x, positions, cos, sin, out, x.stride(0), heads, half, block, num_warps=WARPS)
    return out


def move_kv(
    key_pages: Tensor, value_pages: Tensor, sources: Tensor, targets: Tensor, old: Tensor, new: Tensor, cos: Tensor,
    sin: Tensor,
) -> None:  # fmt: skip
    """Copy KV from slots `sources` to slots `targets`, int64 [N], none in both; keys turned from positions `old` to
    `new`, int64 [N], to the bits of rotary.turn_keys. Pages of float32 or bfloat16. Twin: reference.move_kv."""
    _, kv_heads, page_size, head_dim = key_pages.shape
    if len(sources):
        half = head_dim // 2
        move_kernel[(len(sources), kv_heads)](
            key_pages, value_pages, sources, targets, old, new, cos, sin, kv_heads, PAGE=page_size, HALF=half,
            BLOCK=next_power_of_2(half), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip

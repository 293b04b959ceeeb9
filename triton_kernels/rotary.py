"""Rotary positions: one program per token and head turns it by its position's angles. Twin: reference.rotate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotate"]


@triton.jit
def rotate_kernel(x, positions, cos, sin, out, token_stride, heads, HALF: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    source = x + token * token_stride + head * 2 * HALF
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + position * HALF + at, mask=inside, other=0.0)
    s = tl.load(sin + position * HALF + at, mask=inside, other=0.0)
    target = out + (token * heads + head) * 2 * HALF
    tl.store(target + at, first * c - second * s, mask=inside)
    tl.store(target + HALF + at, second * c + first * s, mask=inside)


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

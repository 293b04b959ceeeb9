"""Keys and values of a step's rows put into their pages by one program per token and head. Twin: reference.write_kv."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import narrow
from .tuning import next_power_of_2

__all__ = ["write_kv"]


@triton.jit
def write_kernel(
    key, value, key_pages, value_pages, slots, key_stride, value_stride, kv_heads,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    k = tl.load(key + token * key_stride + head * DIM + at, mask=inside, other=0.0)
    v = tl.load(value + token * value_stride + head * DIM + at, mask=inside, other=0.0)
    target = ((slot // PAGE * kv_heads + head) * PAGE + slot % PAGE) * DIM + at
    tl.store(key_pages + target, narrow(k) if HALF else k, mask=inside)
    tl.store(value_pages + target, narrow(v) if HALF else v, mask=inside)


def write_kv(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """float32 [T, kv_heads, head_dim] twice (heads contiguous) to int64 slots [T] of pages of float32 or bfloat16.

    pages: [pages, kv_heads, page_size, head_dim]; slot = page * page_size + offset. bfloat16 is rounded to the nearest,
    ties to even.
    """
    tokens, kv_heads, head_dim = key.shape
    if tokens:
        write_kernel[(tokens, kv_heads)](
            key, value, key_pages, value_pages, slots, key.stride(0), value.stride(0), kv_heads,
            PAGE=key_pages.shape[2], DIM=head_dim, BLOCK=next_power_of_2(head_dim),
            HALF=key_pages.dtype == torch.bfloat16,
        )  # fmt: skip

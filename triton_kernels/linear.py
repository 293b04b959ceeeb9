"""Matrix products y = x W^T (+ b) whose rows do not depend on each other's number: fixed blocks of k, in order.

An output is one chain of products over rising blocks of BLOCK_K; how many rows a program takes changes which outputs
share it, not the chain, and with `exact` not the instruction that multiplies. No split over k, no atomics. W is read in
the checkpoint's own [out, in] layout; weight-only int8 and e4m3 have a scale per row. Twins: reference.linear and
reference.scaled_linear.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import dot, narrow
from .tuning import linear_blocks, shared_bytes

__all__ = ["linear", "scaled_linear"]


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, weight, scales, bias, out, rows, outputs, inputs, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BANDS: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    # Programs go through BANDS blocks of rows for one block of weights before the next: W is read from memory once.
    blocks_m, blocks_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    band = tl.program_id(0) // (BANDS * blocks_n)
    height = tl.minimum(blocks_m - band * BANDS, BANDS)
    inner = tl.program_id(0) % (BANDS * blocks_n)
    m = (band * BANDS + inner % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = inner // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight + n.to(tl.int64)[:, None] * inputs + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        left = (start + k < inputs)[None, :]
        a = tl.load(x_at + start, mask=(m < rows)[:, None] & left, other=0.0)
        b = tl.load(weight_at + start, mask=(n < outputs)[:, None] & left, other=0.0)
        if HALF:
            total = dot(narrow(a), tl.trans(narrow(b)), total)
        else:
            total = dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), total)
    if SCALED:
        total *= tl.load(scales + n, mask=n < outputs, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(target, total, mask=(m < rows)[:, None] & (n < outputs)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, exact: bool = False) -> Tensor:
    """[T, in] (rows contiguous), [out, in], [out] -> float32 [T, out].

    With float32 weights products are float32; with bfloat16 weights x is rounded to bfloat16. Sums are float32.
    exact: a row's bits depend on nothing but the row.
    """
    return _launch(x, weight, None, bias, exact)


def scaled_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, *, exact: bool = False) -> Tensor:
    """[T, in], int8 or float8_e4m3fn [out, in], float32 [out], [out] -> float32 [T, out] = x (W * scales)^T + b.

    x is rounded to bfloat16, which holds every code exactly. exact: as in `linear`.
    """
    return _launch(x, weight, scales, bias, exact)


def _launch(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, exact: bool) -> Tensor:
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    if out.numel():
        blocks = linear_blocks(rows, weight.dtype, exact=exact, shared=shared_bytes(x.device))
        grid = (triton.cdiv(rows, blocks.m) * triton.cdiv(outputs, blocks.n),)
        linear_kernel[grid](
            x, weight, x if scales is None else scales, x if bias is None else bias, out,
            rows, outputs, inputs, x.stride(0), blocks.m, blocks.n, blocks.k, blocks.bands,
            scales is not None, bias is not None, weight.dtype != torch.float32,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return out

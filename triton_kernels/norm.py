"""RMSNorm over the last axis, one program per row, and its backward pass.

A row is reduced whole by one program, so its bits depend on no other row. Twin: reference.rms_norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tuning import next_power_of_2, row_warps

__all__ = ["rms_norm", "rms_norm_backward"]

# Rows and columns whose weight gradients one program of the backward pass sums up; torch adds the sums of the rows.
BACKWARD_ROWS, BACKWARD_COLUMNS = 32, 128


@triton.jit
def norm_kernel(x, weight, out, row_stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, values * scale * factors, mask=inside)


@triton.jit
def norm_backward_kernel(grad, x, weight, grad_x, scales, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    weighted = tl.load(grad + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    weighted *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
    shared = tl.sum(weighted * values, axis=0) / columns * scale * scale
    tl.store(grad_x + row * columns + at, (weighted - values * shared) * scale, mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def weight_gradient_kernel(grad, x, scales, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum over a block of rows of grad * x * scale, for a block of columns."""
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (at < columns)[None, :]
    places = row[:, None] * columns + at[None, :]
    given = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + row, mask=row < rows, other=0.0)
    total = tl.sum(given * values * scale[:, None], axis=0)
    tl.store(sums + tl.program_id(0) * columns + at, total, mask=at < columns)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., n] (last axis contiguous), [n] -> x / sqrt(mean(x^2) + eps) * weight, float32 (arXiv 1910.07467, eq. 4)."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    if len(rows):
        block = next_power_of_2(rows.shape[1])
        norm_kernel[(len(rows),)](
            rows, weight, out, rows.stride(0), rows.shape[1], eps, block, num_warps=row_warps(block)
        )
    return out.view(x.shape)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients float32 of x [T, n] and weight [n] for grad [T, n]. Twin: autograd of reference.rms_norm."""
    grad, x = grad.contiguous(), x.contiguous()
    rows, columns = x.shape
    grad_x = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(rows, BACKWARD_ROWS)
    sums = torch.empty(blocks, columns, dtype=torch.float32, device=x.device)
    if rows:
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = next_power_of_2(columns)
        norm_backward_kernel[(rows,)](grad, x, weight, grad_x, scales, columns, eps, block, num_warps=row_warps(block))
        grid = (blocks, triton.cdiv(columns, BACKWARD_COLUMNS))
        weight_gradient_kernel[grid](grad, x, scales, sums, rows, columns, BACKWARD_ROWS, BACKWARD_COLUMNS)
    return grad_x, sums.sum(dim=0)

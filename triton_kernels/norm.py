"""RMSNorm over the last axis, alone or after adding the residual; one program per row, and its backward pass.

A row is reduced whole by one program, so its bits depend on no other row. Twin: reference.rms_norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tuning import next_power_of_2, row_warps

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_backward"]

# Rows whose weight gradients one program of the backward pass sums up; the sums are then added in order.
BACKWARD_ROWS = 32


@triton.jit
def norm_kernel(x, residual, weight, total, out, row_stride, columns, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * columns + at, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, values * scale * factors, mask=inside)


@triton.jit
def norm_backward_kernel(
    grad, x, weight, grad_x, grad_weight, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.minimum(ROWS, rows - block * ROWS)):
        start = (block.to(tl.int64) * ROWS + i) * columns
        values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(grad + start + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
        weighted = given * factors
        shared = tl.sum(weighted * values, axis=0) / columns * scale * scale
        tl.store(grad_x + start + at, (weighted - values * shared) * scale, mask=inside)
        weight_sum += given * values * scale
    tl.store(grad_weight + block * columns + at, weight_sum, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., n] (last axis contiguous), [n] -> x / sqrt(mean(x^2) + eps) * weight, float32 (arXiv 1910.07467, eq. 4)."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    if len(rows):
        block = next_power_of_2(rows.shape[1])
        norm_kernel[(len(rows),)](
            rows, rows, weight, out, out, rows.stride(0), rows.shape[1], eps, False, block,
            num_warps=row_warps(block),
        )  # fmt: skip
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[T, n] twice, [n] -> (x + residual, its RMSNorm), both float32. Twin: the sum, then reference.rms_norm."""
    total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out = torch.empty_like(total)
    if len(x):
        block = next_power_of_2(x.shape[1])
        residual = residual.contiguous()
        norm_kernel[(len(x),)](
            x, residual, weight, total, out, x.stride(0), x.shape[1], eps, True, block, num_warps=row_warps(block)
        )
    return total, out


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients float32 of x [T, n] and weight [n] for grad [T, n]. Twin: autograd of reference.rms_norm."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(len(x), BACKWARD_ROWS)
    sums = torch.zeros(blocks, x.shape[1], dtype=torch.float32, device=x.device)
    if blocks:
        block = next_power_of_2(x.shape[1])
        norm_backward_kernel[(blocks,)](
            grad, x, weight, grad_x, sums, len(x), x.shape[1], eps, BACKWARD_ROWS, block, num_warps=row_warps(block)
        )
    return grad_x, sums.sum(dim=0)

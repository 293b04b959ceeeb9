"""RMSNorm over the last axis, alone or of a sum that it makes in the same pass, one program per row; and backward.

A row is reduced whole by one program, so its bits depend on no other row. Twins: reference.rms_norm and add_rms_norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tuning import next_power_of_2, row_warps

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_backward"]

# Rows and columns whose weight gradients one program of the backward pass sums up; torch adds the sums of the rows.
BACKWARD_ROWS, BACKWARD_COLUMNS = 32, 128


@triton.jit
def norm_kernel(
    x, added, weight, total, out, row_stride, added_stride, columns, eps, ADDED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(added + row * added_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * columns + at, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, values * scale * factors, mask=inside)


@triton.jit
def norm_backward_kernel(
    grad, x, weight, grad_total, grad_x, scales, columns, eps, ADDED: tl.constexpr, BLOCK: tl.constexpr
):
    """grad_total: what x, the sum, gets besides; only with ADDED."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    weighted = tl.load(grad + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    weighted *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
    shared = tl.sum(weighted * values, axis=0) / columns * scale * scale
    of_x = (weighted - values * shared) * scale
    if ADDED:
        of_x += tl.load(grad_total + row * columns + at, mask=inside, other=0.0)
    tl.store(grad_x + row * columns + at, of_x, mask=inside)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["rows"])
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
    _norm(rows, None, weight, eps, out, out)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[T, n] twice (last axis contiguous), [n] -> x + added, and its rms_norm, float32 [T, n]."""
    total, out = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    _norm(x, added, weight, eps, total, out)
    return total, out


def _norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, total: Tensor, out: Tensor) -> None:
    """Write the norm of x + added to `out`, and the sum, if there is anything added, to `total`."""
    rows, columns = x.shape
    if rows:
        block, other = next_power_of_2(columns), x if added is None else added
        norm_kernel[(rows,)](
            x, other, weight, total, out, x.stride(0), other.stride(0), columns, eps, added is not None, block,
            num_warps=row_warps(block),
        )  # fmt: skip


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, grad_total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients float32 of x [T, n] and weight [n] for grad [T, n]. Twin: autograd of reference.rms_norm.

    grad_total: [T, n]; then x is the sum of add_rms_norm, this is the sum's own gradient, and x's is that of either
    summand.
    """
    grad, x = grad.contiguous(), x.contiguous()
    rows, columns = x.shape
    grad_x = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(rows, BACKWARD_ROWS)
    sums = torch.empty(blocks, columns, dtype=torch.float32, device=x.device)
    if rows:
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = next_power_of_2(columns)
        extra = grad if grad_total is None else grad_total.contiguous()
        norm_backward_kernel[(rows,)](
            grad, x, weight, extra, grad_x, scales, columns, eps, grad_total is not None, block,
            num_warps=row_warps(block),
        )  # fmt: skip
        grid = (blocks, triton.cdiv(columns, BACKWARD_COLUMNS))
        weight_gradient_kernel[grid](grad, x, scales, sums, rows, columns, BACKWARD_ROWS, BACKWARD_COLUMNS)
    return grad_x, sums.sum(dim=0)

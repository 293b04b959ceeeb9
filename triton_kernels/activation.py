"""The SiLU product of a gated MLP and its backward pass. Twin: reference.silu_product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["silu_product", "silu_product_backward"]

BLOCK = 1024


@triton.jit
def silu_product_kernel(gate, up, out, columns, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    g = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, g / (1.0 + tl.exp(-g)) * u, mask=inside)


@triton.jit
def silu_product_backward_kernel(grad, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    tl.store(grad_up + at, d * g * sigmoid, mask=inside)
    tl.store(grad_gate + at, d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), mask=inside)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """[T, n] twice (last axis contiguous) -> gate * sigmoid(gate) * up, float32 (arXiv 2002.05202, eq. 6)."""
    out = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    if out.numel():
        rows, columns = gate.shape
        grid = (rows, triton.cdiv(columns, BLOCK))
        silu_product_kernel[grid](gate, up, out, columns, gate.stride(0), up.stride(0), BLOCK)
    return out


def silu_product_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients float32 of gate and up for grad, all of one shape."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = (torch.empty(gate.shape, dtype=torch.float32, device=gate.device) for _ in range(2))
    if gate.numel():
        grid = (triton.cdiv(gate.numel(), BLOCK),)
        silu_product_backward_kernel[grid](grad, gate, up, grad_gate, grad_up, gate.numel(), BLOCK)
    return grad_gate, grad_up

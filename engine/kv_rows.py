"""KV rows: how a token's key or value of one head lies in a page.

With a floating-point type a row is head_dim elements. With int8 it is head_dim codes and, in 4 more bytes, their
float32 scale: codes = x * (127 / m) to the nearest whole number, ties to even, with m = max |x|, 0 where m < 1e-30;
scale = m / 127. With float8_e4m3fn ("fp8") a row is head_dim codes and nothing else: x held to -448 .. 448, the ends of
the type, and rounded to the nearest, ties to even. The scale is 1: each number has an exponent, and rows stay aligned.
So a row depends on nothing but the token's own key or value, and a page is copied as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUNDED", "columns", "element_type", "pack", "unpack"]

SCALE = torch.float32
ROUNDED = (torch.int8, torch.float8_e4m3fn)  # too coarse to be trained with or turned to other positions


def element_type(name: str) -> torch.dtype:
    """Of pages with this EngineConfig.kv_dtype."""
    dtype: torch.dtype = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
    return dtype


def columns(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that a row takes."""
    return head_dim + SCALE.itemsize if dtype == torch.int8 else head_dim


def pack(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., head_dim] -> [..., columns] of `dtype`, the rows of pages."""
    if dtype == torch.float8_e4m3fn:
        end = torch.finfo(dtype).max
        return x.clamp(-end, end).to(dtype)
    if dtype != torch.int8:
        return x.to(dtype)
    x = x.to(SCALE)
    largest = x.abs().amax(dim=-1, keepdim=True)
    # A number divided by a tensor is computed as a product with the reciprocal: both operands must be tensors.
    most = torch.full_like(largest, 127.0)
    inverse = torch.where(largest >= 1e-30, most / largest, 0.0)
    codes = (x * inverse).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat((codes, (largest / most).view(torch.int8)), dim=-1)


def unpack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of pages [..., columns] -> [..., head_dim] of the floating-point type `dtype`."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    codes, scales = rows[..., : -SCALE.itemsize], rows[..., -SCALE.itemsize :].contiguous().view(SCALE)
    return codes.to(dtype) * scales.to(dtype)

"""Matrix products inside a kernel, the same under the interpreter as on a GPU."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "dot", "narrow", "narrow_to_float8"]

# Decided when the kernels are defined, as Triton itself does.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, total):
    """total + a b with float32 sums; float32 operands keep all their bits. The interpreter can't multiply bfloat16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def narrow(x):
    """x rounded to bfloat16, ties to even. The interpreter would cut bits off, so there it is done by hand."""
    x = x.to(tl.float32)
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def narrow_to_float8(x):
    """float32 x held to the ends of float8_e4m3fn and rounded to it, ties to even. By hand as in `narrow`."""
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        subnormal = (x + 24576.0) - 24576.0  # 1.5 * 2^14: to the nearest multiple of 2^-9
        x = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return x.to(tl.float8e4nv)

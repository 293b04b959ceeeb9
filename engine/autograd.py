"""The ops of cpu.py with gradients: the forward pass is the very kernel that inference runs, so its bits are the same.

Without an input that wants a gradient an op is a plain call of the kernel. Every sum has one order, so gradients depend
on neither threads nor the instruction set. A parameter's gradient has its dtype: summed up in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import cpu, cpu_backward

if TYPE_CHECKING:
    from .draw import Draw, Drawn
    from .ops import Spans
    from .packed_weight import PackedWeight

__all__ = [
    "attend",
    "draw",
    "embedding",
    "linear",
    "log_sum_exp",
    "quantised_linear",
    "rms_norm",
    "rotate",
    "silu_product",
]


def _wants_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.like = weight.shape, weight.dtype
        return cpu.embedding(ids, weight, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        shape, dtype = ctx.like
        total = torch.zeros(shape, dtype=torch.float32).index_add_(0, ids, grad)  # equal ids: in the order of the rows
        return None, total.to(dtype), None


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """cpu.embedding, differentiable in `weight`."""
    if _wants_gradient(weight):
        return _apply(_Embedding, ids, weight, dtype)
    return cpu.embedding(ids, weight, dtype)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return cpu.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            cpu_backward.linear_input_grad(grad, weight) if of_x else None,
            cpu_backward.linear_weight_grad(grad, x).to(weight.dtype) if of_weight else None,
            cpu_backward.column_sums(grad).to(ctx.bias_dtype) if of_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """cpu.linear, differentiable in all inputs: dx = dy W, dW = dy^T x, db = the sum of dy's rows."""
    if _wants_gradient(x, weight, bias):
        return _apply(_Linear, x, weight, bias)
    return cpu.linear(x, weight, bias)


def quantised_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """cpu.quantised_linear, for inference only: ValueError when a gradient is wanted, which rounding does not have."""
    if _wants_gradient(x, bias):
        raise ValueError("a quantised linear layer has no gradient; train the model with its native weights")
    return cpu.quantised_linear(x, weight, bias)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return cpu.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + ctx.eps)
        normed, towards = x * scale, grad * weight.float()
        x_grad = scale * (towards - normed * (towards * normed).mean(dim=-1, keepdim=True))
        products = (grad * normed).reshape(-1, len(weight))
        return x_grad, cpu_backward.column_sums(products).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """cpu.rms_norm, differentiable in x and weight."""
    if _wants_gradient(x, weight):
        return _apply(_RmsNorm, x, weight, eps)
    return cpu.rms_norm(x, weight, eps)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(positions, cos, sin)
        return cpu.rotate(x, positions, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, cos, sin = ctx.saved_tensors
        rows = torch.arange(len(positions))
        # The transpose of a turn is the turn back.
        return cpu.rotate(grad.contiguous(), rows, cos[positions], -sin[positions]), None, None, None


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """cpu.rotate, differentiable in x."""
    if _wants_gradient(x):
        return _apply(_Rotate, x, positions, cos, sin)
    return cpu.rotate(x, positions, cos, sin)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor,
        spans: Spans, scale: float,
    ) -> Tensor:  # fmt: skip
        rows = _rows_by_position(slots, spans, key_pages)
        stats = torch.empty(*query.shape[:2], 2, dtype=torch.float32)
        cpu.write_kv(key, value, key_pages, value_pages, slots)
        out = cpu.paged_attention(query, key_pages, value_pages, spans, scale, stats)
        # Keys and values as the pages hold them, but not the pages, which later steps may overwrite.
        kept = (x.to(key_pages.dtype) for x in (key, value))
        ctx.save_for_backward(query, *kept, spans.query_start, spans.kv_length, rows, stats, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, query_start, kv_length, rows, stats, out = ctx.saved_tensors
        query, key, value, grad = (x.float().contiguous() for x in (query, key, value, grad))
        grads = cpu_backward.attention_grads(
            query, key, value, query_start, kv_length, rows, ctx.scale, stats, out, grad
        )
        return *grads, None, None, None, None, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor, spans: Spans,
    scale: float,
) -> Tensor:  # fmt: skip
    """cpu.attend, differentiable in query, key and value.

    The gradient passes through bfloat16 pages as if they did not round. Raises ValueError when a gradient is wanted and
    the pages are int8, a span reads a slot that this batch does not write, or two rows write one slot.
    """
    if _wants_gradient(query, key, value):
        if key_pages.dtype == torch.int8:
            raise ValueError("attention over int8 pages has no gradient; train the model with float32 or bfloat16 KV")
        return _apply(_Attend, query, key, value, key_pages, value_pages, slots, spans, scale)
    return cpu.attend(query, key, value, key_pages, value_pages, slots, spans, scale)


def _rows_by_position(slots: Tensor, spans: Spans, pages: Tensor) -> Tensor:
    """Which row of the batch holds the key of each position of each span: int32 [spans, positions], -1 for none."""
    page_count, _, page_size, _ = pages.shape
    rows = torch.arange(len(slots), dtype=torch.int32)
    row_of_slot = torch.full((page_count * page_size,), -1, dtype=torch.int32)
    row_of_slot[slots] = rows
    if not torch.equal(row_of_slot[slots], rows):
        raise ValueError("attend: two rows of the batch write one slot, so its gradient has no single owner")
    table = row_of_slot.view(page_count, page_size)[spans.pages.long()].flatten(1)
    seen = torch.arange(table.shape[1]) < spans.kv_length[:, None]
    missing = int(((table < 0) & seen).sum())
    if missing:
        raise ValueError(
            f"attend: {missing} of the keys that spans read come from an earlier step and can get no gradient; compute "
            "sequences and the prefixes that they share in one batch, or without gradients"
        )
    return table


class _SiluProduct(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return cpu.silu_product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return cpu_backward.silu_product_grads(gate, up, grad.contiguous())


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """cpu.silu_product, differentiable in gate and up."""
    if _wants_gradient(gate, up):
        return _apply(_SiluProduct, gate, up)
    return cpu.silu_product(gate, up)


class _LogSumExp(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        result = cpu.log_sum_exp(logits)
        ctx.save_for_backward(logits, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, result = ctx.saved_tensors
        return cpu_backward.log_sum_exp_grad(logits, result, grad.contiguous())


def log_sum_exp(logits: Tensor) -> Tensor:
    """cpu.log_sum_exp, differentiable: the gradient is the softmax of each row times that of its sum."""
    if _wants_gradient(logits):
        return _apply(_LogSumExp, logits)
    return cpu.log_sum_exp(logits)


def draw(logits: Tensor, rows: Sequence[Draw]) -> list[Drawn]:
    """cpu.draw: a token has no gradient."""
    return cpu.draw(logits, rows)


def _apply(function: type[Function], *inputs: object) -> Tensor:
    result: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return result

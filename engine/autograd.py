"""Kernels with gradients: the forward pass is the very kernel that inference runs, so its bits are the same.

Without an input that wants a gradient an op is a plain call of the kernel. A parameter's gradient has its dtype: summed
up in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import kv_rows

if TYPE_CHECKING:
    from .draw import Draw, Drawn
    from .ops import Spans, Turn
    from .packed_weight import PackedWeight

__all__ = ["Differentiable"]


class Differentiable:
    """The ops of `ops.Ops` by `kernels`, with their gradients by `gradients`.

    kernels: functions as in cpu.py. gradients: as in cpu_backward.py.
    """

    def __init__(self, kernels: Any, gradients: Any) -> None:
        self.kernels, self.gradients = kernels, gradients

    def embedding(self, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Differentiable in `weight`."""
        if _wants_gradient(weight):
            return _apply(_Embedding, self, ids, weight, dtype)
        return self._plain("embedding", ids, weight, dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Differentiable in all inputs: dx = dy W, dW = dy^T x, db = the sum of dy's rows."""
        if _wants_gradient(x, weight, bias):
            return _apply(_Linear, self, x, weight, bias)
        return self._plain("linear", x, weight, bias)

    def quantised_linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """For inference only: ValueError when a gradient is wanted, which rounding does not have."""
        _refuse_gradient(x, bias)
        return self._plain("quantised_linear", x, weight, bias)

    def scaled_linear(self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """As quantised_linear: for inference only."""
        _refuse_gradient(x, bias)
        return self._plain("scaled_linear", x, codes, scales, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Differentiable in x and weight."""
        if _wants_gradient(x, weight):
            return _apply(_RmsNorm, self, x, weight, eps)
        return self._plain("rms_norm", x, weight, eps)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Differentiable in x, added and weight."""
        wanted = _wants_gradient(x, added, weight)
        total, normed = (
            _AddRmsNorm.apply(self, x, added, weight, eps)  # type: ignore[no-untyped-call]
            if wanted
            else self.kernels.add_rms_norm(x, added, weight, eps)
        )
        return total, normed

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, turn: Turn, key_pages: Tensor, value_pages: Tensor,
        slots: Tensor, spans: Spans, scale: float,
    ) -> Tensor:  # fmt: skip
        """Differentiable in query, key, value and both norms.

        The gradient passes through bfloat16 pages as if they did not round. Raises ValueError when a gradient is wanted
        and the pages have 8 bits, a span reads a slot that this batch does not write, or two rows write one slot.
        """
        heads, pages = (query, key, value), (key_pages, value_pages, slots, spans, scale)
        norms = turn.query_norm, turn.key_norm
        if not _wants_gradient(*heads, *norms):
            return self._plain("attend", *heads, turn, *pages)
        if key_pages.dtype in kv_rows.ROUNDED:
            raise ValueError("attention over 8-bit pages has no gradient; train the model with float32 or bfloat16 KV")
        return _apply(_Attend, self, *heads, *norms, turn, *pages)

    def move_kv(self, *inputs: Any) -> None:
        """What was carried has no gradient."""
        self.kernels.move_kv(*inputs)

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """Differentiable in gate and up."""
        if _wants_gradient(gate, up):
            return _apply(_SiluProduct, self, gate, up)
        return self._plain("silu_product", gate, up)

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """Differentiable: the gradient is the softmax of each row times that of its sum."""
        if _wants_gradient(logits):
            return _apply(_LogSumExp, self, logits)
        return self._plain("log_sum_exp", logits)

    def draw(self, logits: Tensor, rows: Sequence[Draw]) -> list[Drawn]:
        """A token has no gradient."""
        drawn: list[Drawn] = self.kernels.draw(logits, rows)
        return drawn

    def _plain(self, name: str, *inputs: object) -> Tensor:
        result: Tensor = getattr(self.kernels, name)(*inputs)
        return result


def _wants_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _refuse_gradient(*inputs: Tensor | None) -> None:
    if _wants_gradient(*inputs):
        raise ValueError("a quantised linear layer has no gradient; train the model with its native weights")


def _apply(function: type[Function], *inputs: object) -> Tensor:
    result: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ops: Differentiable, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.ops, ctx.rows, ctx.dtype = ops, len(weight), weight.dtype
        return ops._plain("embedding", ids, weight, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        return None, None, ctx.ops.gradients.embedding_grad(ids, grad, ctx.rows).to(ctx.dtype), None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, ops: Differentiable, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ops, ctx.bias_dtype = ops, None if bias is None else bias.dtype
        return ops._plain("linear", x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, weight and bias those that are wanted: a gradient costs as much as the product itself."""
        x, weight = ctx.saved_tensors
        grad, gradients = grad.contiguous(), ctx.ops.gradients
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            None,
            gradients.linear_input_grad(grad, weight) if of_x else None,
            gradients.linear_weight_grad(grad, x).to(weight.dtype) if of_weight else None,
            gradients.column_sums(grad).to(ctx.bias_dtype) if of_bias else None,
        )


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, ops: Differentiable, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ops, ctx.eps = ops, eps
        return ops._plain("rms_norm", x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.ops.gradients.rms_norm_grads(x, weight, ctx.eps, grad)
        return None, of_x, of_weight.to(weight.dtype), None


class _AddRmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, ops: Differentiable, x: Tensor, added: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = ops.kernels.add_rms_norm(x, added, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.ops, ctx.eps = ops, eps
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        of_sum, of_weight = ctx.ops.gradients.add_rms_norm_grads(total, weight, ctx.eps, grad_total, grad)
        return None, of_sum, of_sum, of_weight.to(weight.dtype), None


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, ops: Differentiable, query: Tensor, key: Tensor, value: Tensor, query_norm: Tensor | None,
        key_norm: Tensor | None, turn: Turn, key_pages: Tensor, value_pages: Tensor, slots: Tensor, spans: Spans,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Keys and values must all be of this batch, since each of their rows gets a gradient."""
        rows = _rows_by_position(slots, spans, key_pages)
        turned = ops.kernels.turn_and_write(query, key, value, turn, key_pages, value_pages, slots)
        out, stats = ops.kernels.attention_with_stats(turned, key_pages, value_pages, spans, scale)
        # Keys and values as the pages hold them, but not the pages, which later steps may overwrite.
        page, offset = slots // key_pages.shape[2], slots % key_pages.shape[2]
        kept = (pages[page, :, offset] for pages in (key_pages, value_pages))
        norms = () if query_norm is None else (query, query_norm, key, key_norm)
        arrays = turned, *kept, spans.query_start, spans.kv_length, rows, stats, out
        ctx.save_for_backward(*arrays, turn.positions, turn.cos, turn.sin, *norms)
        ctx.ops, ctx.scale, ctx.eps = ops, scale, turn.eps
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        turned, key, value, query_start, kv_length, rows, stats, out, positions, cos, sin, *norms = ctx.saved_tensors
        of_query, of_key, of_value = ctx.ops.gradients.attention_grads(
            turned.contiguous(), key.contiguous(), value.contiguous(), query_start, kv_length, rows, ctx.scale, stats,
            out, grad.contiguous(),
        )  # fmt: skip
        # The transpose of a turn is the turn back.
        back = torch.arange(len(positions), device=grad.device), cos[positions], -sin[positions]
        of_query, of_key = (ctx.ops.kernels.rotate(part, *back) for part in (of_query, of_key))
        of_norms = None, None
        if norms:
            query, query_norm, key, key_norm = norms
            norm_grads = ctx.ops.gradients.rms_norm_grads
            of_query, of_query_norm = norm_grads(query, query_norm, ctx.eps, of_query)
            of_key, of_key_norm = norm_grads(key, key_norm, ctx.eps, of_key)
            of_norms = of_query_norm.to(query_norm.dtype), of_key_norm.to(key_norm.dtype)
        return None, of_query, of_key, of_value, *of_norms, None, None, None, None, None, None


def _rows_by_position(slots: Tensor, spans: Spans, pages: Tensor) -> Tensor:
    """Which row of the batch holds the key of each position of each span: int32 [spans, positions], -1 for none."""
    page_count, _, page_size, _ = pages.shape
    rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    row_of_slot = torch.full((page_count * page_size,), -1, dtype=torch.int32, device=slots.device)
    row_of_slot[slots] = rows
    if not torch.equal(row_of_slot[slots], rows):
        raise ValueError("attend: two rows of the batch write one slot, so its gradient has no single owner")
    table = row_of_slot.view(page_count, page_size)[spans.pages.long()].flatten(1)
    seen = torch.arange(table.shape[1], device=table.device) < spans.kv_length[:, None]
    missing = int(((table < 0) & seen).sum())
    if missing:
        raise ValueError(
            f"attend: {missing} of the keys that spans read come from an earlier step and can get no gradient; compute "
            "sequences and the prefixes that they share in one batch, or without gradients"
        )
    return table


class _SiluProduct(Function):
    @staticmethod
    def forward(ctx: Any, ops: Differentiable, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.ops = ops
        return ops._plain("silu_product", gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return None, *ctx.ops.gradients.silu_product_grads(gate, up, grad.contiguous())


class _LogSumExp(Function):
    @staticmethod
    def forward(ctx: Any, ops: Differentiable, logits: Tensor) -> Tensor:
        result = ops._plain("log_sum_exp", logits)
        ctx.save_for_backward(logits, result)
        ctx.ops = ops
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, result = ctx.saved_tensors
        return None, ctx.ops.gradients.log_sum_exp_grad(logits, result, grad.contiguous())

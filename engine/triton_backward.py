"""The gradients of triton_ops.py, with the names and shapes of cpu_backward.py; its docstrings hold here too.

Products are torch's own, in float32. No sum is made by atomics, so a gradient has the same bits each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_kernels import activation, norm
from ..triton_kernels.attention_backward import paged_attention_backward
from ..triton_kernels.token_scores import token_scores, token_scores_grad
from .reference import linear_input_grad

__all__ = [
    "add_rms_norm_grads",
    "attention_grads",
    "column_sums",
    "embedding_grad",
    "linear_input_grad",
    "linear_weight_grad",
    "log_sum_exp_grad",
    "rms_norm_grads",
    "silu_product_grads",
    "token_scores",
    "token_scores_grad",
]


def embedding_grad(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    # Sorted by id, unlike index_add_, which takes atomics on a GPU.
    return grad.new_zeros(rows, grad.shape[1]).index_put_((ids,), grad, accumulate=True)


def linear_weight_grad(grad: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
    return grad.t() @ x if into is None else into.addmm_(grad.t(), x)


def column_sums(x: Tensor) -> Tensor:
    return x.sum(dim=0)


def rms_norm_grads(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    n = len(weight)
    of_x, of_weight = norm.rms_norm_backward(grad.reshape(-1, n), x.reshape(-1, n), weight, eps)
    return of_x.view(x.shape), of_weight


def add_rms_norm_grads(
    total: Tensor, weight: Tensor, eps: float, grad_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    return norm.rms_norm_backward(grad, total, weight, eps, grad_total)


def silu_product_grads(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return activation.silu_product_backward(grad, gate, up)


def log_sum_exp_grad(logits: Tensor, result: Tensor, grad: Tensor) -> Tensor:
    return (logits - result[:, None]).exp_().mul_(grad[:, None])


def attention_grads(
    query: Tensor, key: Tensor, value: Tensor, query_start: Tensor, kv_length: Tensor, rows: Tensor,
    scale: float, stats: Tensor, out: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """stats: the log2 of each row's sum [T, heads]."""
    pages = key.unsqueeze(2), value.unsqueeze(2)  # of one token each
    of_query, *of_context = paged_attention_backward(
        grad, query, out, stats, *pages, query_start, kv_length, rows, scale
    )
    of_key, of_value = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
    first = 0
    for span, length in enumerate(kv_length.tolist()):  # one after the other: spans may share rows
        at = rows[span, :length].long()
        of_key[at] += of_context[0][first : first + length]
        of_value[at] += of_context[1][first : first + length]
        first += length
    return of_query, of_key, of_value

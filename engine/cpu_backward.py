"""The gradients that have a C++ kernel: checks, then a call with raw addresses, as in cpu.py.

csrc/cpu/*_backward.h say in which order each sums up. All gradients are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu
from .cpu import _check, _is_parameter, _is_rows

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


def linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """float32 dense [T, out], [out, in] -> [T, in] = grad W. Raises ValueError for anything else."""
    rows, out = grad.shape
    size = weight.shape[1]
    ok = grad.is_contiguous() and _is_rows(grad) and _is_parameter(weight) and weight.shape == (out, size)
    _check(ok, "linear_input_grad", grad, weight)
    result = torch.empty(rows, size, dtype=torch.float32)
    cpu._kernels.linear_input_grad(
        *(grad.data_ptr(), weight.data_ptr(), weight.dtype == torch.bfloat16, result.data_ptr(), rows, size, out)
    )
    return result


def linear_weight_grad(grad: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
    """float32 dense [T, out], [T, in] with dense rows -> [out, in] = grad^T x, added to `into` where that is given.

    Parts of whole blocks (256 rows) that are added in order have the bits of one call. Raises ValueError for anything
    else.
    """
    rows, out = grad.shape
    size = x.shape[1]
    result = torch.empty(out, size, dtype=torch.float32) if into is None else into
    ok = grad.is_contiguous() and _is_rows(grad) and _is_rows(x) and x.shape == (rows, size)
    ok = ok and result.is_contiguous() and _is_rows(result) and result.shape == (out, size)
    _check(ok, "linear_weight_grad", grad, x, result)
    cpu._kernels.linear_weight_grad(
        *(grad.data_ptr(), x.data_ptr(), x.stride(0), result.data_ptr(), rows, size, out, into is not None)
    )
    return result


def embedding_grad(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    """int64 [T], float32 [T, n] -> [rows, n]: the sum of each id's rows, in their order."""
    return torch.zeros(rows, grad.shape[1], dtype=torch.float32).index_add_(0, ids, grad)


def rms_norm_grads(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., n], [n], float32 [..., n] -> the gradients of x [..., n] and weight [n]."""
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    normed, towards = x * scale, grad * weight.float()
    x_grad = scale * (towards - normed * (towards * normed).mean(dim=-1, keepdim=True))
    return x_grad, column_sums((grad * normed).reshape(-1, len(weight)))


def add_rms_norm_grads(
    total: Tensor, weight: Tensor, eps: float, grad_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """total, grad_total, grad: float32 [T, n] -> the gradients of either summand [T, n] and of weight [n]."""
    of_sum, of_weight = rms_norm_grads(total, weight, eps, grad)
    return of_sum.add_(grad_total), of_weight


def column_sums(x: Tensor) -> Tensor:
    """float32 dense [T, n] -> [n], the sum over the rows. Raises ValueError for anything else."""
    rows, n = x.shape
    _check(x.is_contiguous() and _is_rows(x), "column_sums", x)
    result = torch.empty(n, dtype=torch.float32)
    cpu._kernels.column_sums(x.data_ptr(), result.data_ptr(), rows, n)
    return result


def silu_product_grads(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [T, n] three times, gate and up with dense rows, grad dense -> the gradients of gate and up, [T, n] each.

    Raises ValueError for anything else.
    """
    ok = _is_rows(gate) and _is_rows(up) and _is_rows(grad) and grad.is_contiguous()
    _check(ok and gate.shape == up.shape == grad.shape, "silu_product_grads", gate, up, grad)
    gate_grad, up_grad = (torch.empty(grad.shape, dtype=torch.float32) for _ in range(2))
    cpu._kernels.silu_product_grad(
        *(gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), grad.data_ptr()),
        *(gate_grad.data_ptr(), up_grad.data_ptr(), *grad.shape),
    )
    return gate_grad, up_grad


def log_sum_exp_grad(logits: Tensor, result: Tensor, grad: Tensor) -> Tensor:
    """float32 [R, n] with dense rows, what log_sum_exp made of it [R], grad [R] -> [R, n] = softmax(logits) * grad.

    Raises ValueError for anything else.
    """
    rows, n = logits.shape
    ok = _is_rows(logits) and all(x.is_contiguous() and _is_rows(x) for x in (result, grad))
    _check(ok and result.shape == grad.shape == (rows,), "log_sum_exp_grad", logits, result, grad)
    out = torch.empty(rows, n, dtype=torch.float32)
    cpu._kernels.log_sum_exp_grad(
        *(logits.data_ptr(), logits.stride(0), result.data_ptr(), grad.data_ptr(), out.data_ptr(), rows, n)
    )
    return out


def token_scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Divide logits (float32 dense [R, n]) by the temperature in place; -> log-probability, entropy, log-sum-exp, [R].

    targets: int64 [R]. The first is to the bit what sampler.sample reports. Raises ValueError for anything else.
    """
    rows, n = logits.shape
    ok = logits.is_contiguous() and _is_rows(logits) and n > 0 and cpu._is_index(targets, rows)
    _check(ok, "token_scores", logits, targets)
    logprobs, entropies, log_sums = (torch.empty(rows, dtype=torch.float32) for _ in range(3))
    cpu._kernels.token_scores(
        *(logits.data_ptr(), temperature, targets.data_ptr(), logprobs.data_ptr(), entropies.data_ptr()),
        *(log_sums.data_ptr(), rows, n),
    )
    return logprobs, entropies, log_sums


def token_scores_grad(
    logits: Tensor, targets: Tensor, temperature: float, entropies: Tensor, log_sums: Tensor, logprob_grads: Tensor,
    entropy_grads: Tensor,
) -> None:  # fmt: skip
    """Put the gradient of the undivided logits in the place of what token_scores left, [R, n]; the others are [R].

    Raises ValueError for anything else.
    """
    rows, n = logits.shape
    vectors = (entropies, log_sums, logprob_grads, entropy_grads)
    ok = logits.is_contiguous() and _is_rows(logits) and n > 0 and cpu._is_index(targets, rows)
    ok = ok and all(x.is_contiguous() and _is_rows(x) and x.shape == (rows,) for x in vectors)
    _check(ok, "token_scores_grad", logits, targets, *vectors)
    cpu._kernels.token_scores_grad(
        *(logits.data_ptr(), temperature, targets.data_ptr(), entropies.data_ptr(), log_sums.data_ptr()),
        *(logprob_grads.data_ptr(), entropy_grads.data_ptr(), rows, n),
    )


def attention_grads(
    query: Tensor, key: Tensor, value: Tensor, query_start: Tensor, kv_length: Tensor, rows: Tensor,
    scale: float, stats: Tensor, out: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, each in its own shape.

    query, out, grad: float32 dense [T, heads, head_dim]; out and stats are what paged_attention gave.
    key, value: dense [T, kv_heads, head_dim], as they were read from the pages: float32, or bfloat16 of such pages.
    query_start, kv_length: of Spans. rows: int32 [spans, most tokens], which row of the batch holds the key of each
    position. Raises ValueError for anything else, and when a row is seen at two different positions.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    key, value = key.float(), value.float()
    floats = (query, key, value, stats, out, grad)
    ok = all(x.is_contiguous() and x.dtype == torch.float32 and x.device.type == "cpu" for x in floats)
    ok = ok and query.shape == out.shape == grad.shape and key.shape == value.shape == (tokens, kv_heads, head_dim)
    ok = ok and head_dim <= cpu.LARGEST_HEAD and heads % kv_heads == 0 and heads // kv_heads <= cpu.LARGEST_GROUP
    _check(ok and stats.shape == (tokens, heads, 2), "attention_grads", *floats)
    ok = all(x.is_contiguous() and x.dtype == torch.int32 for x in (query_start, kv_length, rows))
    ok = ok and query_start.shape == (len(kv_length) + 1,) and rows.dim() == 2 and len(rows) == len(kv_length)
    _check(ok and int(query_start[-1]) == tokens, "attention_grads", query_start, kv_length, rows)
    delta = (out * grad).sum(dim=-1)
    query_grad, key_grad, value_grad = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    cpu._kernels.attention_backward(
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), query_start.data_ptr(), kv_length.data_ptr()),
        *(rows.data_ptr(), rows.shape[1], len(kv_length), tokens, heads, kv_heads, head_dim),
        scale,
        *(stats.data_ptr(), grad.data_ptr(), delta.data_ptr()),
        *(query_grad.data_ptr(), key_grad.data_ptr(), value_grad.data_ptr()),
    )
    return query_grad, key_grad, value_grad

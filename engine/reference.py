"""Every op in plain torch: the specification that the kernels are tested against. Contracts are in ops.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kv_rows
from .draw import draw_rows
from .rotary import turn_keys

if TYPE_CHECKING:
    from .draw import Draw, Drawn
    from .ops import Spans, Turn
    from .packed_weight import PackedWeight

__all__ = [
    "add_rms_norm",
    "attend",
    "draw",
    "embedding",
    "linear",
    "linear_input_grad",
    "linear_weight_grad",
    "log_sum_exp",
    "move_kv",
    "paged_attention",
    "quantised_linear",
    "rms_norm",
    "rotate",
    "scaled_linear",
    "silu_product",
    "token_scores",
    "token_scores_grad",
    "write_kv",
]

# Query rows scored at once: bounds the [heads, rows, context] scores of a long prefill piece.
QUERY_TILE = 64


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.embedding(ids, weight).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def quantised_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """See ops.Ops.quantised_linear."""
    groups = F.pad(x, (0, -x.shape[1] % 32)).unfold(1, 32, 32)
    largest = groups.abs().amax(dim=2, keepdim=True)
    # A number divided by a tensor is computed as a product with the reciprocal: both operands must be tensors.
    inverse = torch.where(largest >= 1e-30, torch.full_like(largest, 127.0) / largest, 0.0)
    values, x_scales = (groups * inverse).round(), largest / torch.full_like(largest, 127.0)
    codes = weight.codes().view(weight.out_size, -1, 32).to(x.dtype) - weight.zero
    scales = weight.per_group(weight.scales).to(x.dtype)
    total = x.new_zeros(len(x), weight.out_size)
    for g in range(groups.shape[1]):
        dots = values[:, g] @ codes[:, g].t()  # whole numbers below 2^24: exact
        total = total + dots * (x_scales[:, g] * scales[:, g])
        if weight.minima is not None:
            minimum = weight.per_group(weight.minima)[:, g].to(x.dtype)
            total = total + (values[:, g].sum(dim=1, keepdim=True) * x_scales[:, g]) * minimum
    return total if bias is None else total + bias.to(x.dtype)


def scaled_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See ops.Ops.scaled_linear."""
    out = (x.bfloat16().to(x.dtype) @ codes.to(x.dtype).t()) * scales.to(x.dtype)
    return out if bias is None else out + bias.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * scale * weight.to(x.dtype)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + added
    return total, rms_norm(total, weight, eps)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos[positions].unsqueeze(1).to(x.dtype), sin[positions].unsqueeze(1).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def write_kv(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    page_size = key_pages.shape[2]
    page, offset = slots // page_size, slots % page_size
    key_pages[page, :, offset] = kv_rows.pack(key, key_pages.dtype)
    value_pages[page, :, offset] = kv_rows.pack(value, value_pages.dtype)


def move_kv(
    key_pages: Tensor, value_pages: Tensor, sources: Tensor, targets: Tensor, old: Tensor, new: Tensor, cos: Tensor,
    sin: Tensor,
) -> None:  # fmt: skip
    """See ops.Ops.move_kv."""
    page_size = key_pages.shape[2]
    source, target = ((slots // page_size, slice(None), slots % page_size) for slots in (sources, targets))
    key_pages[target] = turn_keys(key_pages[source], old, new, cos, sin)
    value_pages[target] = value_pages[source]


def attend(
    query: Tensor, key: Tensor, value: Tensor, turn: Turn, key_pages: Tensor, value_pages: Tensor, slots: Tensor,
    spans: Spans, scale: float,
) -> Tensor:  # fmt: skip
    """See ops.Ops.attend."""
    kernels = rms_norm, rotate
    query, key = turn(query, turn.query_norm, kernels), turn(key, turn.key_norm, kernels)
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if wants_gradient and key_pages.dtype in kv_rows.ROUNDED:
        raise ValueError("attention over 8-bit pages has no gradient; train the model with float32 or bfloat16 KV")
    write_kv(key.detach(), value.detach(), key_pages, value_pages, slots)
    if wants_gradient:
        # Autograd follows keys and values through a copy of the pages.
        key_pages, value_pages = key_pages.clone(), value_pages.clone()
        write_kv(key, value, key_pages, value_pages, slots)
    return paged_attention(query, key_pages, value_pages, spans, scale)


def _gather(pages: Tensor, numbers: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a page list as rows [kv_heads, length, columns]."""
    return pages[numbers].transpose(0, 1).flatten(1, 2)[:, :length]


def paged_attention(query: Tensor, key_pages: Tensor, value_pages: Tensor, spans: Spans, scale: float) -> Tensor:
    """The attending half of ops.Ops.attend: [T, heads, head_dim] over the spans' pages."""
    out = torch.empty_like(query)
    page_size = key_pages.shape[2]
    starts = spans.query_start.tolist()
    for i, length in enumerate(spans.kv_length.tolist()):
        numbers = spans.pages[i, : -(-length // page_size)].long()
        key = kv_rows.unpack(_gather(key_pages, numbers, length), query.dtype)
        value = kv_rows.unpack(_gather(value_pages, numbers, length), query.dtype)
        first = length - (starts[i + 1] - starts[i])
        for start in range(starts[i], starts[i + 1], QUERY_TILE):
            rows = slice(start, min(start + QUERY_TILE, starts[i + 1]))
            position = first + start - starts[i]
            out[rows] = _causal_attention(query[rows], key, value, position, scale)
    return out


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, position: int, scale: float) -> Tensor:
    """[T, heads, d] at positions position .. position + T - 1 over [kv_heads, length, d] -> [T, heads, d]."""
    rows, heads, head_dim = query.shape
    kv_heads = key.shape[0]
    seen = position + rows
    q = query.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # [kv_heads, group * T, d]
    scores = (q @ key[:, :seen].transpose(1, 2) * scale).view(kv_heads, -1, rows, seen)
    hidden = torch.ones(rows, seen, dtype=torch.bool, device=query.device).triu(position + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    out = weights.view(kv_heads, -1, seen) @ value[:, :seen]
    return out.view(heads, rows, head_dim).transpose(0, 1)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def log_sum_exp(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, dim=-1)


def draw(logits: Tensor, rows: Sequence[Draw]) -> list[Drawn]:
    return draw_rows(logits, rows, log_sum_exp)


# ---- of the fused loss (rl/fused_loss.py), which makes its gradients itself ----


def linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """[T, out], [out, in] -> [T, in] = grad W."""
    return grad @ weight.to(grad.dtype)


def linear_weight_grad(grad: Tensor, x: Tensor, into: Tensor) -> Tensor:
    """[T, out], [T, in] -> into [out, in] += grad^T x."""
    return into.addmm_(grad.t(), x)


def token_scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Divide logits [R, n] by the temperature in place; -> [R] each: log-probability, entropy, log-sum-exp.

    targets: int64 [R], whose log-probability: to the bit what sampler.sample reports.
    """
    if temperature != 1.0:
        logits.div_(logits.new_tensor(temperature))
    log_sums = log_sum_exp(logits)
    entropies = torch.special.entr((logits - log_sums[:, None]).exp_()).sum(dim=1)
    return logits.gather(1, targets[:, None])[:, 0] - log_sums, entropies, log_sums


def token_scores_grad(
    logits: Tensor, targets: Tensor, temperature: float, entropies: Tensor, log_sums: Tensor, logprob_grads: Tensor,
    entropy_grads: Tensor,
) -> None:  # fmt: skip
    """Put the gradient of the undivided logits in the place of what token_scores left.

    With p the softmax and H the entropy: d logprob = onehot - p, dH = -p (log p + H), both / temperature.
    """
    p = (logits - log_sums[:, None]).exp_()
    grad = torch.special.entr(p).sub_(p * entropies[:, None]).mul_(entropy_grads[:, None])
    grad.sub_(p.mul_(logprob_grads[:, None]))
    grad[torch.arange(len(grad)), targets] += logprob_grads
    torch.div(grad, logits.new_tensor(temperature), out=logits)

"""The ops of `ops.Ops` that have a C++ kernel: checks, then a call with raw addresses. csrc/cpu says how each is exact.

Parameters are float32 or bfloat16 in the checkpoint's layout, read in place; activations are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import kv_rows
from .draw import Drawn
from .reference import move_kv

if TYPE_CHECKING:
    from .draw import Draw
    from .ops import Spans, Turn
    from .packed_weight import PackedWeight

try:
    from .. import _C
except ImportError:  # an installation without a compiler: `ops.select` falls back to plain torch
    BUILT = False
else:
    BUILT = True
    _kernels = _C.CpuKernels("best")

__all__ = [
    "add_rms_norm",
    "attend",
    "draw",
    "embedding",
    "linear",
    "log_sum_exp",
    "make_decoder",
    "move_kv",
    "packed_argument",
    "paged_attention",
    "quantised_linear",
    "rms_norm",
    "rotate",
    "silu_product",
    "turn_and_write",
    "unavailable",
    "use_huge_pages",
    "write_kv",
]

PARAMETER_DTYPES = (torch.float32, torch.bfloat16)
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as in csrc/cpu/kernels.h
LARGEST_HEAD, LARGEST_GROUP = 256, 96


def unavailable(parameters: torch.dtype, pages: torch.dtype, head_dim: int, group: int) -> str | None:
    """Why the kernels cannot run a model with these element types, head size and query heads per key head, or None."""
    if not BUILT:
        return "the extension palimpsest._C is not built (run `make build`)"
    if parameters not in PARAMETER_DTYPES:
        return f"the kernels take float32 and bfloat16 parameters, not {parameters}"
    if pages not in KV_TYPES:
        return f"the kernels take float32, bfloat16 and int8 KV pages, not {pages}"
    if head_dim % 2 or head_dim > LARGEST_HEAD:
        return f"the kernels take even head sizes up to {LARGEST_HEAD}, not {head_dim}"
    if group > LARGEST_GROUP:
        return f"the kernels take up to {LARGEST_GROUP} query heads per key head, not {group}"
    return None


def _check(condition: bool, op: str, *tensors: Tensor) -> None:
    """These are the engine's own mistakes, not a user's: a kernel must never read beyond a tensor."""
    if not condition:
        given = ", ".join(f"{tuple(t.shape)} {t.dtype} strides {t.stride()} on {t.device}" for t in tensors)
        raise ValueError(f"cpu.{op} does not take {given}")


def _is_rows(x: Tensor) -> bool:
    """Float32 on the CPU and dense along the last axis."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and (x.stride(-1) == 1 or x.shape[-1] <= 1)


def _is_parameter(weight: Tensor) -> bool:
    return weight.dtype in PARAMETER_DTYPES and weight.device.type == "cpu" and weight.is_contiguous()


def _is_heads(x: Tensor) -> bool:
    """[T, heads, head_dim] rows whose heads lie side by side."""
    return x.dim() == 3 and _is_rows(x) and (x.shape[1] <= 1 or x.stride(1) == x.shape[2])


def _are_pages(key_pages: Tensor, value_pages: Tensor, head_dim: int) -> bool:
    alike = key_pages.dtype == value_pages.dtype and key_pages.shape == value_pages.shape
    known = key_pages.dtype in KV_TYPES and key_pages.shape[3] == kv_rows.columns(head_dim, key_pages.dtype)
    return alike and known and all(x.device.type == "cpu" and x.is_contiguous() for x in (key_pages, value_pages))


def _is_index(x: Tensor, rows: int) -> bool:
    return x.dtype == torch.int64 and x.device.type == "cpu" and x.is_contiguous() and x.shape == (rows,)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 [..., n], [n] -> float32 [..., n] dense. Raises ValueError for other dtypes, devices or shapes."""
    n = x.shape[-1]
    _check(_is_rows(x) and _is_parameter(weight) and weight.shape == (n,), "rms_norm", x, weight)
    rows = x.reshape(-1, n)
    out = torch.empty(x.shape, dtype=torch.float32)
    _kernels.rms_norm(
        *(rows.data_ptr(), weight.data_ptr(), weight.dtype == torch.bfloat16, out.data_ptr()),
        *(rows.shape[0], n, rows.stride(0), eps),
    )
    return out


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added, and its rms_norm: see there."""
    total = x + added
    return total, rms_norm(total, weight, eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [T, in] with dense rows, [out, in], [out] -> float32 [T, out]. Raises ValueError for anything else."""
    rows, size = x.shape
    out = weight.shape[0]
    ok = _is_rows(x) and _is_parameter(weight) and weight.shape == (out, size) and size > 0
    _check(ok and (bias is None or (_is_parameter(bias) and bias.shape == (out,))), "linear", x, weight)
    y = torch.empty(rows, out, dtype=torch.float32)
    _kernels.linear(
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), weight.dtype == torch.bfloat16),
        *(0 if bias is None else bias.data_ptr(), bias is not None and bias.dtype == torch.bfloat16),
        *(y.data_ptr(), rows, size, out),
    )
    return y


def use_huge_pages(tensors: list[Tensor]) -> None:
    """Ask Linux for huge pages under tensors that fill some, in place. Without effect where it has none to give."""
    _C.use_huge_pages([(t.data_ptr(), t.nbytes) for t in tensors if t.nbytes])


def packed_argument(weight: PackedWeight) -> tuple[int, int, int, int, int, int, int, int]:
    """A packed weight as the kernels take it; it must outlive their use."""
    values, scales, minima = weight.values, weight.scales, weight.minima
    return (
        *(values.data_ptr(), scales.data_ptr(), 0 if minima is None else minima.data_ptr(), weight.bits),
        *(weight.in_size, weight.out_size, scales.shape[1], weight.scale_shift),
    )


def quantised_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """float32 [T, in] with dense rows, packed [out, in], [out] -> float32 [T, out]. ValueError for anything else."""
    rows, size = x.shape
    out = weight.out_size
    ok = _is_rows(x) and size == weight.in_size and weight.values.device.type == "cpu"
    _check(ok and (bias is None or (_is_parameter(bias) and bias.shape == (out,))), "quantised_linear", x)
    y = torch.empty(rows, out, dtype=torch.float32)
    _kernels.quantised_linear(
        *(x.data_ptr(), x.stride(0), rows, packed_argument(weight), 0 if bias is None else bias.data_ptr()),
        *(bias is not None and bias.dtype == torch.bfloat16, y.data_ptr()),
    )
    return y


def paged_attention(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, spans: Spans, scale: float, stats: Tensor | None = None
) -> Tensor:
    """float32 [T, heads, head_dim] over dense float32, bfloat16 or int8 pages -> float32 [T, heads, head_dim].

    stats: takes what the backward pass needs, float32 [T, heads, 2]: each row's largest score and sum of weights.
    Raises ValueError for other layouts, head_dim above 256, groups above 96 heads, and spans that leave their pages.
    """
    tokens, heads, head_dim = query.shape
    page_count, kv_heads, page_size, _ = key_pages.shape
    ok = _is_heads(query) and _are_pages(key_pages, value_pages, head_dim)
    ok = ok and head_dim <= LARGEST_HEAD and heads % kv_heads == 0 and heads // kv_heads <= LARGEST_GROUP
    _check(ok, "paged_attention", query, key_pages, value_pages)
    if stats is not None:
        ok = _is_rows(stats) and stats.is_contiguous() and stats.shape == (tokens, heads, 2)
        _check(ok, "paged_attention", stats)
    tables = (spans.query_start, spans.kv_length, spans.pages)
    count = len(spans.kv_length)
    ok = all(t.dtype == torch.int32 and t.device.type == "cpu" and t.is_contiguous() for t in tables)
    ok = ok and spans.query_start.shape == (count + 1,) and spans.pages.shape[0] == count
    _check(ok and int(spans.query_start[-1]) == tokens, "paged_attention", *tables)
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float32)
    _kernels.paged_attention(
        *(query.data_ptr(), query.stride(0), key_pages.data_ptr(), value_pages.data_ptr(), KV_TYPES[key_pages.dtype]),
        *(
            spans.query_start.data_ptr(),
            spans.kv_length.data_ptr(),
            spans.pages.data_ptr(),
            spans.pages.shape[1],
            count,
        ),
        *(heads, kv_heads, head_dim, page_size, page_count),
        scale,
        out.data_ptr(),
        0 if stats is None else stats.data_ptr(),
    )
    return out


def attention_with_stats(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """paged_attention; -> (its result, its stats)."""
    stats = torch.empty(*query.shape[:2], 2, dtype=torch.float32)
    return paged_attention(query, key_pages, value_pages, spans, scale, stats), stats


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """float32 [T, n] twice, dense rows -> float32 [T, n]. Raises ValueError for anything else."""
    _check(gate.dim() == 2 and _is_rows(gate) and _is_rows(up) and gate.shape == up.shape, "silu_product", gate, up)
    out = torch.empty(gate.shape, dtype=torch.float32)
    _kernels.silu_product(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr(), gate.shape[0], gate.shape[1]
    )
    return out


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """float32 [T, heads, head_dim], int64 [T], float32 [window, head_dim / 2] twice -> float32 [T, heads, head_dim].

    Raises ValueError for anything else, and for a position outside of the window.
    """
    tokens, heads, head_dim = x.shape
    ok = _is_heads(x) and _is_index(positions, tokens) and _is_rows(cos) and _is_rows(sin)
    ok = ok and cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape == (len(cos), head_dim // 2)
    _check(ok and head_dim % 2 == 0, "rotate", x, positions, cos, sin)
    out = torch.empty(x.shape, dtype=torch.float32)
    _kernels.rotate(
        *(x.data_ptr(), x.stride(0), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), len(cos)),
        *(out.data_ptr(), tokens, heads, head_dim),
    )
    return out


def write_kv(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """float32 [T, kv_heads, head_dim] twice into dense float32, bfloat16 or int8 pages at int64 [T] slots.

    Raises ValueError for anything else, and for a slot outside of the pages.
    """
    page_count, kv_heads, page_size, _ = key_pages.shape
    tokens, _, head_dim = key.shape
    ok = _is_heads(key) and _is_heads(value) and key.shape == value.shape == (tokens, kv_heads, head_dim)
    ok = ok and _are_pages(key_pages, value_pages, head_dim) and _is_index(slots, tokens)
    _check(ok, "write_kv", key, value, key_pages, value_pages, slots)
    _kernels.write_kv(
        *(key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), key_pages.data_ptr()),
        *(value_pages.data_ptr(), KV_TYPES[key_pages.dtype], slots.data_ptr()),
        *(tokens, kv_heads, page_count, page_size, head_dim),
    )


def turn_and_write(
    query: Tensor, key: Tensor, value: Tensor, turn: Turn, key_pages: Tensor, value_pages: Tensor, slots: Tensor
) -> Tensor:
    """rms_norm, if any, and rotate of query and key, then write_kv: see there; -> the query that attends."""
    kernels = rms_norm, rotate
    write_kv(turn(key, turn.key_norm, kernels), value, key_pages, value_pages, slots)
    return turn(query, turn.query_norm, kernels)


def attend(
    query: Tensor, key: Tensor, value: Tensor, turn: Turn, key_pages: Tensor, value_pages: Tensor, slots: Tensor,
    spans: Spans, scale: float,
) -> Tensor:  # fmt: skip
    """turn_and_write, then paged_attention: see there."""
    query = turn_and_write(query, key, value, turn, key_pages, value_pages, slots)
    return paged_attention(query, key_pages, value_pages, spans, scale)


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 [T], [vocabulary, hidden] -> float32 [T, hidden]. Raises ValueError for all else, and for unknown ids."""
    vocabulary, hidden = weight.shape
    _check(_is_index(ids, len(ids)) and _is_parameter(weight) and dtype == torch.float32, "embedding", ids, weight)
    out = torch.empty(len(ids), hidden, dtype=torch.float32)
    _kernels.embedding(
        *(ids.data_ptr(), weight.data_ptr(), weight.dtype == torch.bfloat16, vocabulary),
        *(out.data_ptr(), len(ids), hidden),
    )
    return out


def log_sum_exp(logits: Tensor) -> Tensor:
    """float32 [R, vocabulary] with dense rows -> float32 [R]. Raises ValueError for anything else."""
    _check(logits.dim() == 2 and _is_rows(logits) and logits.shape[1] > 0, "log_sum_exp", logits)
    out = torch.empty(len(logits), dtype=torch.float32)
    _kernels.log_sum_exp(logits.data_ptr(), logits.stride(0), out.data_ptr(), logits.shape[0], logits.shape[1])
    return out


def draw(logits: Tensor, rows: Sequence[Draw]) -> list[Drawn]:
    """float32 [R, vocabulary] with dense rows, one Draw per row -> a token of each. ValueError for anything else."""
    _check(logits.dim() == 2 and _is_rows(logits) and logits.shape[1] > 0 and len(rows) == len(logits), "draw", logits)
    drawn = _kernels.draw(logits.data_ptr(), logits.stride(0), logits.shape[1], rows)
    return [Drawn(*values) for values in drawn]


def make_decoder(*arguments: Any) -> _C.CpuDecoder:
    """An empty layer stack on this machine's fastest kernels, for layer_stack.py, which knows the arguments."""
    return _C.CpuDecoder(_kernels.isa, *arguments)

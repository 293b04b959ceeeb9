"""The ops of `ops.Ops` on an NVIDIA GPU, by the Triton kernels; for inference. Imported when it is chosen.

Activations are float32 between the ops; with bfloat16 parameters products take them rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..triton_kernels import activation, attention, norm, rotary, vocabulary
from ..triton_kernels import linear as products
from ..triton_kernels.arithmetic import INTERPRETED
from . import reference
from .draw import draw_rows
from .errors import RequestError

if TYPE_CHECKING:
    from .draw import Draw, Drawn
    from .ops import Spans
    from .packed_weight import PackedWeight

__all__ = [
    "attend",
    "device",
    "draw",
    "embedding",
    "linear",
    "log_sum_exp",
    "quantised_linear",
    "rms_norm",
    "rotate",
    "silu_product",
]

DTYPES = (torch.float32, torch.bfloat16)
# Rows per span below which the tiles of the context go to programs of their own.
FEW_ROWS = 64


def device() -> torch.device | None:
    """Where the kernels run: the current GPU; the CPU under Triton's interpreter; None where there is neither."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if INTERPRETED.value else None


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    _refuse_gradient(weight)
    return F.embedding(ids, weight).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _refuse_gradient(weight)
    return products.linear(x, weight, bias)


def quantised_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Not there yet: `ops.select` refuses such a model."""
    raise NotImplementedError("the Triton kernels do not take packed weights")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(x, weight, eps)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotary.rotate(x, positions, cos, sin)


def attend(
    query: Tensor, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor, spans: Spans,
    scale: float,
) -> Tensor:  # fmt: skip
    """See ops.Ops.attend."""
    reference.write_kv(key, value, key_pages, value_pages, slots)
    return attention.paged_attention(
        query, key_pages, value_pages, spans.query_start, spans.kv_length, spans.pages, scale,
        few_rows=len(query) < FEW_ROWS * len(spans.kv_length),
    )  # fmt: skip


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return activation.silu_product(gate, up)


def log_sum_exp(logits: Tensor) -> Tensor:
    return vocabulary.log_sum_exp(logits)


def draw(logits: Tensor, rows: Sequence[Draw]) -> list[Drawn]:
    return draw_rows(logits, rows, log_sum_exp)


def _refuse_gradient(parameter: Tensor) -> None:
    if torch.is_grad_enabled() and parameter.requires_grad:
        raise RequestError("backend='triton' can't train yet; use backend='cpu' or 'reference'")

"""The ops of `ops.Ops` on an NVIDIA GPU, by Triton and CUDA C++ kernels. Imported when it is chosen.

Activations are float32 between the ops; with bfloat16 parameters products take them rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..triton_kernels import activation, attention, norm, rotary, sampling, vocabulary
from ..triton_kernels import linear as products
from ..triton_kernels.arithmetic import INTERPRETED
from . import cuda
from .draw import Drawn
from .draw_table import DrawTable
from .errors import ConfigError

if TYPE_CHECKING:
    from ..triton_kernels.attention import SharedPrefix
    from .draw import Draw
    from .ops import Attend, Spans, Turn
    from .packed_weight import PackedWeight

__all__ = ["TritonKernels", "device"]

DTYPES = (torch.float32, torch.bfloat16)
KV_DTYPES = (*DTYPES, torch.float8_e4m3fn)
LEAST_CAPABILITY = (8, 0)
# Rows per span below which the tiles of the context go to programs of their own.
FEW_ROWS = 64


def device() -> torch.device:
    """Where the kernels run: the current GPU, or the CPU under Triton's interpreter.

    Raises ConfigError when torch can't use a GPU, saying whether it, the driver or the GPU is why.
    """
    if INTERPRETED.value:
        return torch.device("cpu")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        capability = torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError) as error:  # torch says which: no CUDA in it, no driver, one too old, no GPU
        raise ConfigError(
            f"backend='triton' needs an NVIDIA GPU, and torch {torch.__version__} finds none: "
            f"{str(error).partition(chr(10))[0]}; use backend='cpu' or 'auto'"
        ) from error
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"backend='triton' needs compute capability {_dotted(LEAST_CAPABILITY)} (Ampere) or later, and "
            f"{torch.cuda.get_device_name()} has {_dotted(capability)}; use backend='cpu'"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class TritonKernels:
    """The forward ops; triton_backward.py has their gradients.

    exact: only kernels in which a row's bits depend on nothing but the row, whatever else is in its step.
    """

    def __init__(self, attention_kernels: str = "auto", *, exact: bool = False, attend: Attend | None = None) -> None:
        """attention_kernels: "triton", "cuda" (csrc/cuda for single rows, Triton for the rest), or "auto".

        attend: does it in place of these where no gradient is wanted.
        Raises ConfigError when "cuda" cannot run here, or contradicts `exact`.
        """
        reason = "Triton's interpreter keeps all on the CPU" if INTERPRETED.value else cuda.unavailable()
        if attention_kernels == "cuda" and reason is not None:
            raise ConfigError(f"attention='cuda' cannot run here: {reason}; use attention='auto' or 'triton'")
        if attention_kernels == "cuda" and exact:
            raise ConfigError(
                "attention='cuda' has other bits for single rows than for many, which exact=True rules out; use "
                "attention='triton', or exact=False"
            )
        self.exact = exact
        self._attend = attend
        self._few_rows_by_cuda = reason is None and not exact
        self._decode_by_cuda = self._few_rows_by_cuda and attention_kernels != "triton"
        self._found: tuple[Spans, bool, SharedPrefix | None] | None = None

    def embedding(self, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, weight).to(dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._few_rows_by_cuda and cuda.fits_gemv(x, weight):
            return cuda.gemv(x, weight, None, bias)
        return products.linear(x, weight, bias, exact=self.exact)

    def quantised_linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """Not there: ops.require_kinds refuses such weights, and quant.py gives others their form for a GPU."""
        raise NotImplementedError("the Triton kernels do not take packed weights")

    def scaled_linear(self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """See ops.Ops.scaled_linear."""
        if self._few_rows_by_cuda and cuda.fits_gemv(x, codes):
            return cuda.gemv(x, codes, scales, bias)
        return products.scaled_linear(x, codes, scales, bias, exact=self.exact)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, added, weight, eps)

    def rotate(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotary.rotate(x, positions, cos, sin)

    def turn_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, turn: Turn, key_pages: Tensor, value_pages: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        """The part of `attend` before attention, in one launch: -> the query, normed and turned."""
        return rotary.turn_and_write(
            query, key, value, turn.query_norm, turn.key_norm, turn.eps, turn.positions, turn.cos, turn.sin, key_pages,
            value_pages, slots,
        )  # fmt: skip

    def move_kv(
        self, key_pages: Tensor, value_pages: Tensor, sources: Tensor, targets: Tensor, old: Tensor, new: Tensor,
        cos: Tensor, sin: Tensor,
    ) -> None:  # fmt: skip
        rotary.move_kv(key_pages, value_pages, sources, targets, old, new, cos, sin)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, turn: Turn, key_pages: Tensor, value_pages: Tensor,
        slots: Tensor, spans: Spans, scale: float,
    ) -> Tensor:  # fmt: skip
        """See ops.Ops.attend."""
        query = self.turn_and_write(query, key, value, turn, key_pages, value_pages, slots)
        if self._attend is not None:
            return self._attend(query, key_pages, value_pages, spans, scale)
        few_rows = len(query) < FEW_ROWS * len(spans.kv_length)
        shared = self._shared_by(spans, len(query), key_pages.shape[2]) if few_rows else None
        by_cuda = self._decode_by_cuda and cuda.fits_decode(query, key_pages, len(spans.kv_length))
        if by_cuda and (shared is None or cuda.decode_tile() == attention.TILE):
            return _decode(query, key_pages, value_pages, spans, scale, shared)
        return attention.paged_attention(
            query, key_pages, value_pages, spans.query_start, spans.kv_length, spans.pages, scale,
            few_rows=few_rows, exact=self.exact, shared=shared,
        )  # fmt: skip

    def _shared_by(self, spans: Spans, tokens: int, page_size: int) -> SharedPrefix | None:
        """What the spans of a step of few rows share: found at its first layer, for all of them.

        Found anew for a graph that is captured, of which nothing is part that ran before.
        """
        capturing = spans.pages.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._found is None or self._found[0] is not spans or self._found[1] != capturing:
            arrays = spans.query_start, spans.kv_length, spans.pages
            self._found = spans, capturing, attention.SharedPrefix.find(tokens, *arrays, page_size)
        return self._found[2]

    def attention_with_stats(
        self, query: Tensor, key_pages: Tensor, value_pages: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The attending half of attend; -> (its result, the log2 of each row's sum [T, heads])."""
        log_sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        out = attention.paged_attention(
            query, key_pages, value_pages, spans.query_start, spans.kv_length, spans.pages, scale,
            few_rows=False, exact=self.exact, log_sums=log_sums,
        )  # fmt: skip
        return out, log_sums

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        return activation.silu_product(gate, up)

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        return vocabulary.log_sum_exp(logits)

    def draw(self, logits: Tensor, rows: Sequence[Draw]) -> list[Drawn]:
        """See ops.Ops.draw."""
        table = DrawTable.of(rows, logits.device)
        *columns, cut, filtered = table
        return Drawn.of_columns(sampling.draw(logits.contiguous(), *columns, cut=cut, filtered=filtered))


def _decode(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, spans: Spans, scale: float, shared: SharedPrefix | None
) -> Tensor:
    """Attention of one row per span."""
    query = query.contiguous()
    peaks, totals, partials, tile = cuda.paged_decode_partials(
        query, key_pages, value_pages, spans.kv_length, spans.pages, scale * attention.LOG2E,
        None if shared is None else shared.skipped,
    )  # fmt: skip
    if shared is not None:
        attention.shared_partials(query, key_pages, value_pages, shared, scale, peaks, totals, partials)
    return attention.merge_tiles(peaks, totals, partials, spans.query_start, spans.kv_length, tile)

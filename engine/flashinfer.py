"""Attention by FlashInfer (arXiv 2501.01005), where it is installed. Imported when it is chosen.

A step is planned once, at its first layer, and the plan serves all of them: it depends on the spans alone. Queries are
rounded to bfloat16, as FlashInfer wants them in the type of the pages, and so are its results. Its splits of a context
depend on what else is in the step, so rows are not exact. Twin: reference.paged_attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import ConfigError

if TYPE_CHECKING:
    from .ops import Spans

__all__ = ["FlashInfer"]

WORKSPACE_BYTES = 128 * 2**20
HEAD_DIMS = (64, 128, 256)


class FlashInfer:
    """Attends over pages as ops.Ops.attend has them, after the keys and values are written."""

    def __init__(self, pages: torch.dtype, head_dim: int, device: torch.device) -> None:
        """pages, head_dim: of the model's KV. Raises ConfigError when the package is absent or cannot serve these."""
        if pages != torch.bfloat16 or head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"attention='flashinfer' takes bfloat16 KV and heads of {', '.join(map(str, HEAD_DIMS))}, not {pages} "
                f"and {head_dim}; set kv_dtype='bfloat16', or use attention='auto'"
            )
        try:
            import flashinfer
        except ImportError as error:
            raise ConfigError(
                f"attention='flashinfer' needs the package flashinfer-python ({error}): pip install "
                "'palimpsest-rl[cuda]', or use attention='auto'"
            ) from error
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._planned: Spans | None = None

    def __call__(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, spans: Spans, scale: float) -> Tensor:
        """query float32 [T, heads, head_dim] -> float32 of its shape."""
        if spans is not self._planned:
            self._plan(query, key_pages, spans, scale)
            self._planned = spans
        result: Tensor = self._wrapper.run(query.to(key_pages.dtype), (key_pages, value_pages))
        return result.float()

    def _plan(self, query: Tensor, pages: Tensor, spans: Spans, scale: float) -> None:
        _, kv_heads, page_size, head_dim = pages.shape
        counts = (spans.kv_length + page_size - 1) // page_size
        used = torch.arange(spans.pages.shape[1], device=counts.device) < counts[:, None]
        self._wrapper.plan(
            spans.query_start,
            torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
            spans.pages[used],
            spans.kv_length - (counts - 1) * page_size,
            *(query.shape[1], kv_heads, head_dim, page_size),
            causal=True,
            sm_scale=scale,
            q_data_type=pages.dtype,
            kv_data_type=pages.dtype,
        )

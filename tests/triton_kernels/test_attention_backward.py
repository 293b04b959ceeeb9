"""Gradients of paged attention against autograd of the plain version, over ragged spans and a shared page."""

from __future__ import annotations

import pytest
import torch
from palimpsest.engine import reference
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch
from palimpsest.tests.triton_kernels.test_products import Case
from torch import Tensor


def plain(case: Case, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries and of each page's keys and values, by autograd."""
    inputs = [x.to(dtype).nan_to_num().requires_grad_() for x in (case.query, case.key, case.value)]
    out = torch.zeros_like(inputs[0])
    starts = case.spans.query_start.tolist()
    for i, length in enumerate(case.spans.kv_length.tolist()):
        numbers = case.spans.pages[i].long()
        key, value = (x[numbers].transpose(0, 1).flatten(1, 2)[:, :length] for x in inputs[1:])
        rows = slice(starts[i], starts[i + 1])
        position = length - (starts[i + 1] - starts[i])
        part = reference._causal_attention(inputs[0][rows], key, value, position, case.scale)
        out = torch.cat((out[: starts[i]], part, out[starts[i + 1] :]))
    return torch.autograd.grad(out, inputs, grad.to(dtype))  # type: ignore[return-value]


def onto_pages(case: Case, packed: Tensor) -> Tensor:
    """Add gradients per span and token up to gradients per slot."""
    total = torch.zeros(case.key.shape, device=packed.device)
    page_size, first = case.key.shape[2], 0
    for i, length in enumerate(case.spans.kv_length.tolist()):
        tokens = torch.arange(length, device=packed.device)
        page = case.spans.pages[i].long()[tokens // page_size]
        total[page, :, tokens % page_size] += packed[first : first + length]
        first += length
    return total


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (5, 1, 24)])
def test_gradients(device: torch.device, heads: int, kv_heads: int, dim: int) -> None:
    from palimpsest.triton_kernels.attention_backward import paged_attention_backward

    case = Case(device, [40, 1, 9], [40, 12, 50], heads, kv_heads, dim, torch.float32)
    case.spans.pages[2, :1] = case.spans.pages[0, :1]  # the last span reads a page of the first
    log_sums = torch.empty(case.query.shape[:2], device=device)
    out = case.run(few_rows=False, log_sums=log_sums)
    grad = torch.randn_like(out)
    arrays = case.spans.query_start, case.spans.kv_length, case.spans.pages
    results = paged_attention_backward(
        grad, case.query, out, log_sums, case.key.nan_to_num(), case.value.nan_to_num(), *arrays, case.scale
    )
    kernel = [results[0], *(onto_pages(case, packed) for packed in results[1:])]
    for ours, twin, exact in zip(
        kernel, plain(case, grad, torch.float32), plain(case, grad, torch.float64), strict=True
    ):
        assert_as_exact_as_torch(ours.cpu(), twin.cpu(), exact.cpu())

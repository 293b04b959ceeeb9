"""Kernels against their twins over shapes that hypothesis draws: spans of all kinds, head sizes, odd widths."""

from __future__ import annotations

import pytest
import torch
from palimpsest.engine import reference
from palimpsest.tests.triton_kernels.test_products import Case, assert_like_twin

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU each shape has to be compiled")
FEW = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SPANS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 90)), min_size=1, max_size=3)  # rows, tokens before them


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palimpsest.triton_kernels.attention.TILE", 64)


@given(
    spans=SPANS,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    few_rows=st.booleans(),
    exact=st.booleans(),
)
@FEW
def test_attention(
    device: torch.device, spans: list[tuple[int, int]], kv_heads: int, group: int, dim: int, few_rows: bool, exact: bool
) -> None:
    counts, lengths = [rows for rows, _ in spans], [rows + before for rows, before in spans]
    case = Case(device, counts, lengths, kv_heads * group, kv_heads, dim, torch.float32)
    assert_like_twin(case.run(few_rows=few_rows, exact=exact), case.twin(torch.float32), case.twin(torch.float64))


@given(rows=st.integers(1, 90), inputs=st.integers(1, 150), outputs=st.integers(1, 70), exact=st.booleans())
@FEW
def test_linear(device: torch.device, rows: int, inputs: int, outputs: int, exact: bool) -> None:
    from palimpsest.triton_kernels.linear import linear

    x, weight = torch.randn(rows, inputs, device=device), torch.randn(outputs, inputs, device=device).bfloat16()
    rounded = x.bfloat16().float()
    plain, truth = (reference.linear(part, weight, None) for part in (rounded, rounded.double()))
    assert_like_twin(linear(x, weight, None, exact=exact), plain, truth)


@given(rows=st.integers(1, 6), columns=st.integers(1, 2100), eps=st.sampled_from([1e-6, 1e-5]))
@FEW
def test_rms_norm(device: torch.device, rows: int, columns: int, eps: float) -> None:
    from palimpsest.triton_kernels.norm import rms_norm

    x, weight = torch.randn(rows, columns, device=device), torch.randn(columns, device=device)
    assert_like_twin(
        rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps), reference.rms_norm(x.double(), weight, eps)
    )


@given(rows=st.integers(1, 4), vocabulary=st.integers(1, 9000), spread=st.sampled_from([0.0, 1.0, 30.0]))
@FEW
def test_log_sum_exp(device: torch.device, rows: int, vocabulary: int, spread: float) -> None:
    from palimpsest.triton_kernels.vocabulary import log_sum_exp

    logits = torch.randn(rows, vocabulary, device=device) * spread
    assert_like_twin(log_sum_exp(logits), logits.logsumexp(1), logits.double().logsumexp(1))

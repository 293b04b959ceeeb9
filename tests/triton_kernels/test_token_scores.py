"""The kernels of the fused loss against their twins."""

from __future__ import annotations

import pytest
import torch
from palimpsest.engine import reference
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from palimpsest.tests.csrc.test_token_scores import scores_and_gradient


@pytest.mark.parametrize(("rows", "n", "temperature"), [(0, 5, 1.0), (1, 1, 0.6), (3, 100, 1.0), (2, 9003, 0.6)])
def test_exact_as_torch(device: torch.device, rows: int, n: int, temperature: float) -> None:
    from palimpsest.triton_kernels import token_scores

    logits, targets = torch.randn(rows, n, device=device) * 4, torch.randint(0, n, (rows,), device=device)
    if n > 1:
        logits[:, n // 3] = float("-inf")  # a token that cannot come
    exact = scores_and_gradient(reference, logits.double(), targets, temperature)
    plain = scores_and_gradient(reference, logits, targets, temperature)
    ours = scores_and_gradient(token_scores, logits, targets, temperature)
    for kernel, twin, truth in zip(ours, plain, exact, strict=True):
        assert_as_exact_as_torch(kernel.cpu(), twin.cpu(), truth.cpu())


def test_the_sum_is_that_of_the_sampler(device: torch.device) -> None:
    from palimpsest.triton_kernels import token_scores, vocabulary

    logits = torch.randn(2, 5000, device=device)
    _, _, log_sums = token_scores.token_scores(logits, torch.zeros(2, dtype=torch.int64, device=device), 0.7)
    assert_same_bits([log_sums, vocabulary.log_sum_exp(logits)])

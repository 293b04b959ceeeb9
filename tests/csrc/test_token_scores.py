"""Log-probabilities, entropies and their gradient: accuracy against float64, and the bits of log_sum_exp."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from palimpsest.engine import cpu, cpu_backward, reference
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from torch import Tensor

OnEachIsa = Callable[[Callable[[], Tensor]], list[Tensor]]


def scores_and_gradient(ops: object, logits: Tensor, targets: Tensor, temperature: float) -> list[Tensor]:
    logits = logits.clone()
    logprobs, entropies, log_sums = ops.token_scores(logits, targets, temperature)  # type: ignore[attr-defined]
    torch.manual_seed(2)
    towards = [torch.randn(len(logits)).to(logits.dtype) for _ in range(2)]
    ops.token_scores_grad(logits, targets, temperature, entropies, log_sums, *towards)  # type: ignore[attr-defined]
    return [logprobs, entropies, log_sums, logits]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("n", [1, 16, 100, 4096, 9003])
def test_exact_as_torch(isa: str, n: int, temperature: float) -> None:
    logits, targets = torch.randn(13, n) * 4, torch.randint(0, n, (13,))
    logits[3, n // 2] = 60.0  # a sure token
    exact = scores_and_gradient(reference, logits.double(), targets, temperature)
    plain = scores_and_gradient(reference, logits, targets, temperature)
    for ours, theirs, truth in zip(
        scores_and_gradient(cpu_backward, logits, targets, temperature), plain, exact, strict=True
    ):
        assert_as_exact_as_torch(ours, theirs, truth)


def test_the_twin_has_the_gradient_of_autograd() -> None:
    logits = torch.randn(7, 50, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (7,))
    *_, ours = scores_and_gradient(reference, logits.detach(), targets, 0.7)
    every = (logits / 0.7).log_softmax(1)
    torch.manual_seed(2)
    by_logprob, by_entropy = (torch.randn(7).double() for _ in range(2))
    total = (every.gather(1, targets[:, None])[:, 0] * by_logprob).sum()
    total = total - ((every.exp() * every).sum(1) * by_entropy).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(total, logits)[0], rtol=1e-10, atol=1e-12)


def test_one_order(on_each_isa: OnEachIsa) -> None:
    logits, targets = torch.randn(9, 9003) * 5, torch.randint(0, 9003, (9,))

    def flat(rows: slice = slice(None)) -> Tensor:
        return torch.cat([x.flatten() for x in scores_and_gradient(cpu_backward, logits[rows], targets[rows], 0.7)])

    torch.set_num_threads(1)
    results = on_each_isa(flat)
    torch.set_num_threads(2)
    assert_same_bits([*results, flat()])
    together, alone = logits.clone(), logits[4:5].clone()
    for a, b in zip(
        cpu_backward.token_scores(together, targets, 0.7),
        cpu_backward.token_scores(alone, targets[4:5], 0.7),
        strict=True,
    ):
        assert_same_bits([a[4:5], b])


def test_the_sum_is_that_of_log_sum_exp(isa: str) -> None:
    logits, targets = torch.randn(5, 9003) * 5, torch.zeros(5, dtype=torch.int64)
    scaled = logits / torch.full((5, 1), 0.7)
    logprobs, _, log_sums = cpu_backward.token_scores(logits, targets, 0.7)
    assert_same_bits([logits, scaled])
    assert_same_bits([log_sums, cpu.log_sum_exp(scaled)])
    assert_same_bits([logprobs, scaled[:, 0] - log_sums])


def test_impossible_tokens(isa: str) -> None:
    """-inf is a token that cannot come: no entropy, no gradient, even where a whole tile is full of them."""
    logits = torch.full((1, 9000), -math.inf)
    logits[0, 5000:5004] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    few = logits[:, 5000:5004].clone()
    targets = torch.tensor([5001])
    ours = scores_and_gradient(cpu_backward, logits, targets, 1.0)
    plain = scores_and_gradient(reference, few, targets - 5000, 1.0)
    torch.testing.assert_close(ours[:3], plain[:3])
    torch.testing.assert_close(ours[3][:, 5000:5004], plain[3])
    assert ours[3].isfinite().all() and ours[3][:, :5000].abs().max() < 1e-30


def test_other_layouts_and_unknown_tokens_are_refused(isa: str) -> None:
    logits, rows = torch.randn(4, 8), torch.zeros(4)
    for call in (
        lambda: cpu_backward.token_scores(logits.t(), torch.zeros(8, dtype=torch.int64), 1.0),
        lambda: cpu_backward.token_scores(logits, torch.zeros(4, dtype=torch.int32), 1.0),
        lambda: cpu_backward.token_scores_grad(logits, torch.zeros(4, dtype=torch.int64), 1.0, *[rows] * 3, rows[:3]),
        lambda: cpu_backward.linear_weight_grad(logits, logits, torch.zeros(8, 9)),
    ):
        with pytest.raises(ValueError, match=r"cpu\.\w+ does not take"):
            call()
    with pytest.raises(ValueError, match="token id 8 is not below 8"):
        cpu_backward.token_scores(logits, torch.tensor([0, 1, 8, 2]), 1.0)

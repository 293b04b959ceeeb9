"""The fused loss is the plain one: the sampler's log-probabilities, and gradients as exact as plain torch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from palimpsest.engine import cpu
from palimpsest.engine.ops import Ops, select
from palimpsest.rl.config import PRESETS, AlgorithmConfig
from palimpsest.rl.fused_loss import Head, fused_policy_loss
from palimpsest.rl.loss import TokenRows, policy_loss
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch
from torch import Tensor

needs_extension = pytest.mark.skipif(not cpu.BUILT, reason="the extension is not built")
BACKENDS = [pytest.param("cpu", marks=needs_extension), "reference"]
TEMPERATURE = 0.7
VOCABULARY = 5000  # more than a tile of the log-sum-exp
CONFIGS = {name: AlgorithmConfig.preset(name, kl=0.01, entropy=0.02) for name in PRESETS} | {
    "corrected turns": AlgorithmConfig(correction="mask", correction_level="turn", correction_low=0.3)
}


@pytest.fixture(autouse=True)
def _fixed_numbers_and_threads() -> Iterator[None]:
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_ops(backend: str, dtype: torch.dtype) -> Ops:
    return select(backend, dtype, dtype, 64, 1)


class Case:
    """T tokens in turns of 7 whose old log-probabilities lie near those of the head, so that some are clipped."""

    def __init__(self, tokens: int, hidden: int = 24, vocabulary: int = VOCABULARY, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.hidden = torch.randn(tokens, hidden, dtype=torch.float32)
        self.weight = torch.randn(vocabulary, hidden) / hidden**0.5
        self.targets = torch.randint(0, vocabulary, (tokens,))
        turns = torch.arange(tokens) // 7
        near = (self.hidden @ self.weight.t() / TEMPERATURE).log_softmax(1).gather(1, self.targets[:, None])[:, 0]
        self.rows = TokenRows(
            advantages=torch.randn(tokens // 7 + 1)[turns],
            weights=torch.rand(tokens) + 0.1,
            turns=turns,
            old_logprobs=near + 0.2 * torch.randn(tokens),
            rollout_logprobs=near + 0.2 * torch.randn(tokens),
            reference_logprobs=near + 0.2 * torch.randn(tokens),
        )

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another float type."""
        case = object.__new__(Case)
        case.hidden, case.weight, case.targets = self.hidden.to(dtype), self.weight.to(dtype), self.targets
        values = {name: value.to(dtype) for name, value in vars(self.rows).items() if name != "turns"}
        case.rows = replace(self.rows, **values)
        return case

    def fused(self, backend: str, config: AlgorithmConfig, denominator: float = 50.0) -> list[Tensor]:
        """Loss, and the gradients of hidden rows and head weight."""
        hidden, weight = (x.clone().requires_grad_() for x in (self.hidden, self.weight))
        head = Head(weight, TEMPERATURE, make_ops(backend, self.weight.dtype))
        loss = fused_policy_loss(hidden, self.targets, head, self.rows, config, denominator).loss
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def plain(self, config: AlgorithmConfig, denominator: float = 50.0) -> list[Tensor]:
        """The same through one tensor of all logits."""
        hidden, weight = (x.clone().requires_grad_() for x in (self.hidden, self.weight))
        every = (hidden @ weight.t() / TEMPERATURE).log_softmax(1)
        logprobs, entropies = every.gather(1, self.targets[:, None])[:, 0], -(every.exp() * every).sum(1)
        loss, _ = policy_loss(logprobs, self.rows, config, entropies=entropies, denominator=denominator)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


@needs_extension
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernels_are_as_exact_as_plain_torch(name: str) -> None:
    case, config = Case(300), CONFIGS[name]
    for ours, theirs, exact in zip(
        case.fused("cpu", config), case.plain(config), case.to(torch.float64).plain(config), strict=True
    ):
        assert exact.abs().max() > 0
        assert_as_exact_as_torch(ours, theirs, exact)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_twin_is_the_plain_loss(name: str) -> None:
    case, config = Case(300).to(torch.float64), CONFIGS[name]
    for ours, exact in zip(case.fused("reference", config), case.plain(config), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)

"""The fused loss is the plain one: the sampler's log-probabilities, and gradients as exact as plain torch's."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from palimpsest.engine import cpu, cpu_backward, reference
from palimpsest.engine.config import SamplingParams
from palimpsest.engine.ops import Ops, select
from palimpsest.engine.sampler import SampleRow, sample
from palimpsest.rl.config import PRESETS, AlgorithmConfig
from palimpsest.rl.fused_loss import Head, fused_policy_loss, token_logprobs
from palimpsest.rl.loss import TokenRows, policy_loss
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fixed_numbers_and_threads")
needs_extension = pytest.mark.skipif(not cpu.BUILT, reason="the extension is not built")
BACKENDS = [pytest.param("cpu", marks=needs_extension), "reference"]
TEMPERATURE = 0.7
VOCABULARY = 5000  # more than a tile of the log-sum-exp
CONFIGS = {name: AlgorithmConfig.preset(name, kl=0.01, entropy=0.02) for name in PRESETS} | {
    "corrected turns": AlgorithmConfig(correction="mask", correction_level="turn", correction_low=0.3)
}


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


@pytest.mark.parametrize("name", ["memagent", "dr_grpo"])
def test_gradcheck_of_the_twin(name: str) -> None:
    """(What the other presets hold constant, a ratio or a turn's mean, a finite difference would move.)"""
    case = Case(15, hidden=5, vocabulary=11).to(torch.float64)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        head = Head(weight, TEMPERATURE, make_ops("reference", torch.float64))
        return fused_policy_loss(hidden, case.targets, head, case.rows, CONFIGS[name], 7.0).loss

    inputs = case.hidden.requires_grad_(), case.weight.requires_grad_()
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_log_probabilities_are_the_samplers(backend: str, temperature: float) -> None:
    """To the bit: the first update of a batch sees the ratio 1 and no difference."""
    case, ops = Case(300), make_ops(backend, torch.float32)
    params = SamplingParams(temperature=temperature)
    sample_rows = [SampleRow(params, i, 0, 0, array("i"), array("i"), ()) for i in range(300)]
    logits = ops.linear(case.hidden, case.weight, None)
    parts = [slice(i, i + 50) for i in range(0, 300, 50)]
    drawn = [one for part in parts for one in sample(logits[part], sample_rows[part], ops)]
    targets = torch.tensor([one.token_id for one in drawn])
    reported = torch.tensor([one.logprob for one in drawn])
    head = Head(case.weight.requires_grad_(), temperature, ops)
    assert_same_bits([token_logprobs(case.hidden, targets, head)[0], reported])
    rows = replace(case.rows, old_logprobs=reported, rollout_logprobs=None)
    fused = fused_policy_loss(case.hidden, targets, head, rows, AlgorithmConfig())
    assert_same_bits([fused.logprobs, reported])
    seen = fused.statistics.means()
    assert seen["ratio"] == 1 and seen["largest_difference"] == seen["mismatch_kl"] == seen["clipped_high"] == 0


@needs_extension
def test_one_order_of_all_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(600)
    case.rows.advantages[:290] = 0.0  # a whole chunk, and some rows of the next one, have no gradient
    config = AlgorithmConfig(kl=0.0)
    torch.set_num_threads(1)
    one = case.fused("cpu", config)
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu, "_kernels", cpu._C.CpuKernels("scalar"))
    for a, b in zip(one, case.fused("cpu", config), strict=True):
        assert_same_bits([a, b])


@needs_extension
def test_the_weight_gradient_is_that_of_one_product_over_all_rows() -> None:
    """However rows are cut into chunks, and whether those without a gradient are skipped or multiplied by 0."""
    case, config = Case(600), AlgorithmConfig(kl=0.0)
    case.rows.advantages[:290] = 0.0
    case.rows.advantages[400:420] = 0.0
    loss, of_hidden, of_weight = case.fused("cpu", config)
    assert loss != 0 and of_hidden[:290].eq(0).all()
    logits = cpu.linear(case.hidden, case.weight, None)
    logprobs, entropies, log_sums = cpu_backward.token_scores(logits, case.targets, TEMPERATURE)
    leaf = logprobs.requires_grad_()
    (towards,) = torch.autograd.grad(policy_loss(leaf, case.rows, config, denominator=50.0)[0], leaf)
    assert 290 < int((towards == 0).sum()) < 500  # clipped tokens have none, either
    cpu_backward.token_scores_grad(
        logits, case.targets, TEMPERATURE, entropies, log_sums, towards, torch.zeros_like(towards)
    )
    assert_same_bits([of_weight, cpu_backward.linear_weight_grad(logits, case.hidden)])
    assert_same_bits([of_hidden, cpu_backward.linear_input_grad(logits, case.weight)])


@pytest.mark.parametrize("name", ["memagent", "gspo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_add_up(backend: str, name: str) -> None:
    """Turns one by one, three at a time and all, in another order: to 1e-6 of the gradient's norm."""
    case, config = Case(301), CONFIGS[name]
    whole = case.fused(backend, config)
    for turns in (1, 3, 43):
        total = [torch.zeros_like(x) for x in whole]
        for start in reversed(range(0, 301, 7 * turns)):
            part, which = object.__new__(Case), slice(start, start + 7 * turns)
            part.hidden, part.targets, part.weight = case.hidden[which], case.targets[which], case.weight
            part.rows = case.rows[which]
            loss, of_hidden, of_weight = part.fused(backend, config)
            total[0] += loss
            total[1][which] += of_hidden
            total[2] += of_weight
        torch.testing.assert_close(total[0], whole[0], rtol=1e-5, atol=0)
        for ours, exact in zip(total[1:], whole[1:], strict=True):
            assert float((ours - exact).norm()) <= 1e-6 * float(exact.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["memagent", "gspo"])
def test_masked_rows_may_hold_anything(backend: str, name: str) -> None:
    case, config = Case(60), CONFIGS[name]
    masked = torch.zeros(60, dtype=torch.bool)
    masked[[0, 9, 10, 11, 12, 13, 59]] = True
    case.rows.weights[masked] = 0.0
    clean = case.fused(backend, config)
    case.hidden[masked] = torch.nan
    for a, b in zip(clean, case.fused(backend, config), strict=True):
        assert_same_bits([a, b])
    assert clean[1][masked].eq(0).all() and clean[1][~masked].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_rows_and_none(backend: str) -> None:
    for name, config in CONFIGS.items():
        for tokens in (0, 1):
            loss, of_hidden, of_weight = Case(tokens).fused(backend, config)
            assert bool(loss != 0) == bool(of_hidden.any()) == bool(of_weight.any()) == bool(tokens), name
            assert of_hidden.shape == (tokens, 24)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_advantages_there_is_no_gradient_and_no_product(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(300)
    case.rows.advantages.zero_()
    for name in ("linear_input_grad", "linear_weight_grad", "token_scores_grad"):
        for gradients in (cpu_backward, reference):
            monkeypatch.delattr(gradients, name)
    for name in ("dapo", "gspo", "cispo"):
        loss, of_hidden, of_weight = case.fused(backend, AlgorithmConfig.preset(name))
        assert loss == 0 and not of_hidden.any() and not of_weight.any()


@needs_extension
def test_gradients_only_where_they_are_wanted() -> None:
    case, config, ops = Case(50), AlgorithmConfig(), make_ops("cpu", torch.float32)
    _, of_hidden, of_weight = case.fused("cpu", config, 1.0)
    for wanted in (True, False):
        hidden, weight = case.hidden.clone().requires_grad_(wanted), case.weight.clone().requires_grad_(not wanted)
        loss = fused_policy_loss(hidden, case.targets, Head(weight, TEMPERATURE, ops), case.rows, config).loss
        (3 * loss).backward()  # type: ignore[no-untyped-call]
        for leaf, grad in ((hidden, of_hidden), (weight, of_weight)):
            assert leaf.grad is None if not leaf.requires_grad else torch.allclose(leaf.grad, 3 * grad)
    with torch.no_grad():
        loss = fused_policy_loss(hidden, case.targets, Head(weight, TEMPERATURE, ops), case.rows, config).loss
    assert not loss.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bfloat16_weight_gets_a_float32_sum_rounded_once(backend: str) -> None:
    case, config = Case(600), AlgorithmConfig()
    narrow = case.weight.bfloat16()
    case.weight = narrow.float()
    wide = case.fused(backend, config)
    case.weight = narrow
    ours = case.fused(backend, config)
    assert ours[2].dtype == torch.bfloat16 and torch.equal(ours[2], wide[2].bfloat16())
    assert_same_bits([ours[1], wide[1]])

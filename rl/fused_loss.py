"""The head, the log-probabilities and the policy loss in one, without any [tokens, vocabulary] tensor.

Rows go through the head a chunk at a time. Where the loss of a token depends on its own log-probability alone, its
gradient is made at once, while the chunk's logits are there; else (GSPO, corrections of whole turns) a first pass gives
all log-probabilities, and a second one makes the gradients of the rows that have any. So the loss must know everything
about its tokens, weights and denominator included, when it is called.

Exactness: log-probabilities are those that the sampler reports at this temperature, to the bit. The hidden rows'
gradient depends on each row alone. The weight's gradient is the sum over the rows in order, in blocks of ROWS, each
without the rows whose gradient is 0; in float32 even for bfloat16 weights, rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..engine.ops import Ops
from .config import AlgorithmConfig
from .loss import TokenRows, needs_whole_turns, policy_loss
from .statistics import LossStatistics

__all__ = ["FusedLoss", "Head", "fused_policy_loss", "token_logprobs"]

ROWS = 256  # of a chunk: a block of csrc/cpu/chains.h, so sums over chunks have the order of one product over all rows


class Head(NamedTuple):
    """The last layer as a distribution over tokens.

    weight: [vocabulary, hidden], of the head or the tied embedding. temperature: of the rollout, 1 for a
    greedy one, as in the sampler. ops: the model's.
    """

    weight: Tensor
    temperature: float
    ops: Ops

    def score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[R, hidden], int64 [R] -> logits / temperature [R, vocabulary]; log-probability, entropy, log-sum-exp [R]."""
        logits = self.ops.linear(hidden, self.weight, None)
        return (logits, *self.ops.loss.token_scores(logits, targets, self.temperature))


class FusedLoss(NamedTuple):
    """loss: [], differentiable in hidden rows and head weight. logprobs, entropies: [T], without gradient."""

    loss: Tensor
    logprobs: Tensor
    entropies: Tensor
    statistics: LossStatistics


@torch.no_grad()
def token_logprobs(hidden: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """[T, hidden], int64 [T] -> log-probabilities of the targets and entropies of the rows, nats, [T] each."""
    scored = [head.score(hidden[part], targets[part])[1:3] for part in _chunks(len(hidden))]
    if not scored:
        return hidden.new_empty(0), hidden.new_empty(0)
    logprobs, entropies = zip(*scored, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def fused_policy_loss(
    hidden: Tensor, targets: Tensor, head: Head, rows: TokenRows, config: AlgorithmConfig, denominator: float = 1.0
) -> FusedLoss:
    """policy_loss over T tokens, from the hidden rows before the head.

    hidden: [T, hidden], float32 (float64 with float64 weights); row i gives the distribution of token i. targets: int64
    [T], the tokens. rows: see TokenRows, floats of hidden's dtype. `hidden` and `head.weight` get gradients where they
    want one. Raises ValueError as policy_loss does.
    """
    run = _Run(targets, head, rows, config, denominator)
    loss: Tensor = _Fused.apply(hidden, head.weight, run)  # type: ignore[no-untyped-call]
    return FusedLoss(loss, run.logprobs, run.entropies, run.statistics)


class _Fused(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, run: _Run) -> Tensor:
        of_hidden, of_weight, _ = ctx.needs_input_grad
        loss = run(hidden, of_hidden, of_weight)
        ctx.save_for_backward(run.hidden_grad, run.weight_grad)
        run.hidden_grad = run.weight_grad = None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = float(grad)
        grads = (saved if saved is None or scale == 1.0 else saved * scale for saved in ctx.saved_tensors)
        return *grads, None


class _Run:
    """One evaluation of the loss; afterwards it holds what came of it."""

    def __init__(
        self, targets: Tensor, head: Head, rows: TokenRows, config: AlgorithmConfig, denominator: float
    ) -> None:
        self.targets, self.head, self.rows = targets, head, rows
        self.config, self.denominator = config, denominator
        self.statistics = LossStatistics.nothing()
        self.hidden_grad: Tensor | None = None
        self.weight_grad: Tensor | None = None

    def __call__(self, hidden: Tensor, of_hidden: bool, of_weight: bool) -> Tensor:
        self.hidden = hidden
        self.logprobs, self.entropies = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
        self.total = hidden.new_zeros((), dtype=torch.float64)
        if of_hidden:
            self.hidden_grad = torch.zeros_like(hidden)
        if of_weight:
            self.weight_grad = torch.zeros_like(self.head.weight, dtype=hidden.dtype)
        if needs_whole_turns(self.config):
            self._two_passes(of_hidden or of_weight)
        else:
            self._one_pass(of_hidden or of_weight)
        if self.weight_grad is not None:
            self.weight_grad = self.weight_grad.to(self.head.weight.dtype)
        return self.total.to(hidden.dtype)

    def _one_pass(self, wanted: bool) -> None:
        def run(part: slice) -> None:
            logits, self.logprobs[part], self.entropies[part], log_sums = self._score(part)
            towards = self._towards(part)
            if wanted:
                self._add_gradients(part, logits, log_sums, *towards)

        for part in _chunks(len(self.hidden)):
            run(part)  # a function, so that one chunk's logits are gone before the next one's come

    def _two_passes(self, wanted: bool) -> None:
        self.logprobs, self.entropies = token_logprobs(self.hidden, self.targets, self.head)
        of_logprobs, of_entropies = self._towards(slice(None))

        def run(part: slice) -> None:
            if bool(of_logprobs[part].any()) or bool(of_entropies[part].any()):
                logits, _, _, log_sums = self._score(part)
                self._add_gradients(part, logits, log_sums, of_logprobs[part], of_entropies[part])

        for part in _chunks(len(self.hidden)) if wanted else ():
            run(part)

    def _score(self, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.head.score(self.hidden[part], self.targets[part])

    def _towards(self, part: slice) -> tuple[Tensor, Tensor]:
        """Add the loss of some rows; -> its gradients for their log-probabilities and entropies."""
        with torch.enable_grad():
            logprobs, entropies = (x[part].detach().requires_grad_() for x in (self.logprobs, self.entropies))
            loss, statistics = policy_loss(
                logprobs, self.rows[part], self.config, entropies=entropies, denominator=self.denominator
            )
        self.total += loss.detach()
        self.statistics += statistics
        of_logprobs, of_entropies = torch.autograd.grad(loss, (logprobs, entropies), materialize_grads=True)
        return of_logprobs, of_entropies

    def _add_gradients(
        self, part: slice, logits: Tensor, log_sums: Tensor, of_logprobs: Tensor, of_entropies: Tensor
    ) -> None:
        moved = (of_logprobs != 0) | (of_entropies != 0)
        if not bool(moved.any()):
            return
        values = [self.hidden[part], logits, self.targets[part], self.entropies[part], log_sums]
        values += [of_logprobs, of_entropies]
        if not bool(moved.all()):
            values = [value[moved] for value in values]
        hidden, logits, targets, entropies, log_sums, of_logprobs, of_entropies = values
        head, kernels = self.head, self.head.ops.loss
        kernels.token_scores_grad(logits, targets, head.temperature, entropies, log_sums, of_logprobs, of_entropies)
        if self.hidden_grad is not None:
            self.hidden_grad[part][moved] = kernels.linear_input_grad(logits, head.weight)
        if self.weight_grad is not None:
            kernels.linear_weight_grad(logits, hidden, self.weight_grad)


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, rows)) for start in range(0, rows, ROWS))

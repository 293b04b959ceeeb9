"""The fused loss beside the plain one, which keeps all logits: `python -m palimpsest.bench.loss`.

Both take the same hidden rows, head and objective, forward and backward. Plain: torch's linear, log_softmax and gather.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.memory import available_bytes
from ..engine.ops import select
from ..rl.config import AlgorithmConfig
from ..rl.fused_loss import ROWS, Head, fused_policy_loss
from ..rl.loss import TokenRows, policy_loss
from . import options
from .clock import timed
from .costs import Cost
from .limits import Probe
from .memory import grown
from .options import Options
from .report import Report, Target, describe_machine, row
from .rounds import Entry, alternate, ratio

__all__ = ["Work", "main", "run"]

LEAST_MEMORY_RATIO = 20.0  # plain over fused, beyond inputs and gradients
LEAST_SPEED_RATIO = 1 / 1.3
PLAIN_TENSORS = 3  # of [tokens, vocabulary] at the plain loss's peak: log-probabilities, and two in the backward pass
PLAIN_SHARE = 1 / 3  # of the memory that is free
SMALL = 16  # tokens, before memory is measured


@dataclass(frozen=True)
class Work:
    """tokens: of the memory's measurement. timed: tokens whose time is taken; it grows in proportion."""

    tokens: int
    timed: int
    vocabulary: int
    hidden: int


FULL = Work(tokens=8192, timed=1024, vocabulary=151_936, hidden=896)  # the head of Qwen2.5-0.5B
QUICK = Work(tokens=2048, timed=512, vocabulary=49_152, hidden=576)  # that of SmolLM2-135M


class Inputs:
    """Random numbers for `tokens` rows, on policy; float32."""

    def __init__(self, work: Work, tokens: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(tokens, work.hidden, generator=generator).requires_grad_()
        self.weight = torch.randn(work.vocabulary, work.hidden, generator=generator)
        self.weight.mul_(work.hidden**-0.5).requires_grad_()
        self.targets = torch.randint(work.vocabulary, (tokens,), generator=generator)
        advantages = torch.randn(tokens, generator=generator)
        self.rows = TokenRows(advantages, torch.ones(tokens), torch.zeros(tokens, dtype=torch.int64))
        self.config = AlgorithmConfig(kl=0.0)

    def fused(self) -> tuple[Tensor, ...]:
        """-> the gradients of the hidden rows and the weight."""
        head = Head(self.weight, 1.0, select("cpu", torch.float32, torch.float32, 64, 1))
        loss = fused_policy_loss(self.hidden, self.targets, head, self.rows, self.config, len(self.hidden)).loss
        return torch.autograd.grad(loss, (self.hidden, self.weight))

    def plain(self) -> tuple[Tensor, ...]:
        """The same."""
        logprobs = F.linear(self.hidden, self.weight).log_softmax(dim=1).gather(1, self.targets[:, None])[:, 0]
        loss, _ = policy_loss(logprobs, self.rows, self.config, denominator=len(self.hidden))
        return torch.autograd.grad(loss, (self.hidden, self.weight))


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit code."""
    return options.main("loss", run, argv)


def run(chosen: Options) -> Report:
    """Measure memory, then time. Raises ConfigError for options of other benchmarks and without the extension."""
    if chosen.model is not None or chosen.works or chosen.peers is not None or chosen.profile:
        raise ConfigError(
            "the loss is measured at a fixed size and beside torch: leave out --model, --works, --peers, --profile"
        )
    torch.set_num_threads(chosen.threads)
    work = QUICK if chosen.quick else FULL
    probe = Probe()
    memory = _memory_target(work, chosen.threads)
    inputs = Inputs(work, work.timed)
    plain, fused = alternate(_entries(work, inputs), chosen.rounds, probe)
    faster = Target(f"loss.{work.timed}.float32.speed_vs_plain", ratio(fused, plain), LEAST_SPEED_RATIO)
    return Report("loss", describe_machine(probe.isa, probe.best), [row(fused), row(plain)], [memory, faster])


def _entries(work: Work, inputs: Inputs) -> list[Entry]:
    """Three products of rows and head: forward, and one for each gradient. The head is read, its gradient written."""
    products = 3 * 2.0 * work.timed * work.vocabulary * work.hidden
    cost = Cost(products, 2.0 * inputs.weight.nbytes)

    def entry(engine: str, compute: Callable[[], object]) -> Entry:
        return Entry(engine, "loss", "float32", work.timed, 1, work.timed, cost, lambda _: timed(compute))

    return [entry("torch, all logits", inputs.plain), entry(f"palimpsest, {ROWS} rows at once", inputs.fused)]


def _memory_target(work: Work, threads: int) -> Target:
    """The plain loss is measured with as many tokens as fit well, and taken times the rest: its logits decide."""
    fitting = int(available_bytes(torch.device("cpu")) * PLAIN_SHARE) // (PLAIN_TENSORS * 4 * work.vocabulary)
    tokens = max(min(work.tokens, fitting // ROWS * ROWS), ROWS)
    fused, plain = _measured("fused", work, work.tokens, threads), _measured("plain", work, tokens, threads)
    scaled = plain * work.tokens // tokens
    how = "measured" if tokens == work.tokens else f"{plain / 1e6:.0f} MB with {tokens} tokens, scaled"
    print(
        f"memory beyond inputs and gradients, {work.tokens} tokens, head {work.vocabulary} x {work.hidden}: "
        f"{fused / 1e6:.0f} MB; plain {scaled / 1e6:.0f} MB ({how})"
    )
    return Target(f"loss.{work.tokens}.float32.memory_vs_plain", scaled / fused, LEAST_MEMORY_RATIO)


def _measured(which: str, work: Work, tokens: int, threads: int) -> int:
    """Bytes, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_beyond, (which, work, tokens, threads))


def _beyond(which: str, work: Work, tokens: int, threads: int) -> int:
    torch.set_num_threads(threads)
    getattr(Inputs(work, SMALL), which)()  # what libraries set up once
    inputs = Inputs(work, tokens)
    return grown(getattr(inputs, which)) - inputs.hidden.nbytes - inputs.weight.nbytes


if __name__ == "__main__":
    raise SystemExit(main())

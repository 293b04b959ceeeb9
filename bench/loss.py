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
from .device import synchronize
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


WORKS = {
    "full": Work(tokens=8192, timed=1024, vocabulary=151_936, hidden=896),  # the head of Qwen2.5-0.5B
    "quick": Work(tokens=2048, timed=512, vocabulary=49_152, hidden=576),  # that of SmolLM2-135M
    "gpu": Work(tokens=8192, timed=8192, vocabulary=152_064, hidden=3584),  # that of Qwen2.5-7B
    "tiny": Work(tokens=20, timed=20, vocabulary=300, hidden=24),
}


class Inputs:
    """Random numbers for `tokens` rows, on policy. The head is float32 on the CPU, bfloat16 for Triton's kernels."""

    def __init__(self, work: Work, tokens: int, backend: str = "cpu") -> None:
        dtype = torch.bfloat16 if backend == "triton" else torch.float32
        self.ops = select(backend, dtype, dtype, 64, 1)
        self.device = device = self.ops.device
        generator = torch.Generator(device).manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.hidden = normal(tokens, work.hidden).requires_grad_()
        self.weight = normal(work.vocabulary, work.hidden).mul_(work.hidden**-0.5).to(dtype).requires_grad_()
        self.targets = torch.randint(work.vocabulary, (tokens,), generator=generator, device=device)
        turns = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.rows = TokenRows(normal(tokens), torch.ones(tokens, device=device), turns)
        self.config = AlgorithmConfig(kl=0.0)

    def fused(self) -> tuple[Tensor, ...]:
        """-> the gradients of the hidden rows and the weight."""
        head = Head(self.weight, 1.0, self.ops)
        loss = fused_policy_loss(self.hidden, self.targets, head, self.rows, self.config, len(self.hidden)).loss
        return self._gradients(loss)

    def plain(self) -> tuple[Tensor, ...]:
        """The same."""
        logits = F.linear(self.hidden.to(self.weight.dtype), self.weight).float()
        logprobs = logits.log_softmax(dim=1).gather(1, self.targets[:, None])[:, 0]
        loss, _ = policy_loss(logprobs, self.rows, self.config, denominator=len(self.hidden))
        return self._gradients(loss)

    def _gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(loss, (self.hidden, self.weight))
        synchronize(self.device)
        return gradients


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
    work = WORKS[chosen.scale]
    backend = "triton" if chosen.by_triton else "cpu"
    probe = chosen.probe()
    memory = _memory_target(work, backend, chosen.threads)
    inputs = Inputs(work, work.timed, backend)
    plain, fused = alternate(_entries(work, inputs), chosen.rounds, probe)
    dtype = fused.entry.dtype
    faster = Target(f"loss.{work.timed}.{dtype}.speed_vs_plain", ratio(fused, plain), LEAST_SPEED_RATIO)
    return Report("loss", describe_machine(probe.isa, probe.best), [row(fused), row(plain)], [memory, faster])


def _entries(work: Work, inputs: Inputs) -> list[Entry]:
    """Three products of rows and head: forward, and one for each gradient. The head is read, its gradient written."""
    products = 3 * 2.0 * work.timed * work.vocabulary * work.hidden
    cost = Cost(products, 2.0 * inputs.weight.nbytes)
    dtype = str(inputs.weight.dtype).removeprefix("torch.")

    def entry(engine: str, compute: Callable[[], object]) -> Entry:
        return Entry(engine, "loss", dtype, work.timed, 1, work.timed, cost, lambda _: timed(compute))

    return [entry("torch, all logits", inputs.plain), entry(f"palimpsest, {ROWS} rows at once", inputs.fused)]


def _memory_target(work: Work, backend: str, threads: int) -> Target:
    """The plain loss is measured with as many tokens as fit well, and taken times the rest: its logits decide."""
    on_gpu = backend == "triton" and torch.cuda.is_available()
    free = available_bytes(torch.device("cuda" if on_gpu else "cpu"))
    fitting = int(free * PLAIN_SHARE) // (PLAIN_TENSORS * 4 * work.vocabulary)
    tokens = max(min(work.tokens, fitting // ROWS * ROWS), ROWS)
    fused, plain = (
        _measured(which, work, count, backend, threads) for which, count in (("fused", work.tokens), ("plain", tokens))
    )
    scaled = plain * work.tokens // tokens
    how = "measured" if tokens == work.tokens else f"{plain / 1e6:.0f} MB with {tokens} tokens, scaled"
    print(
        f"memory beyond inputs and gradients, {work.tokens} tokens, head {work.vocabulary} x {work.hidden}: "
        f"{fused / 1e6:.0f} MB; plain {scaled / 1e6:.0f} MB ({how})"
    )
    dtype = "bfloat16" if backend == "triton" else "float32"
    return Target(f"loss.{work.tokens}.{dtype}.memory_vs_plain", scaled / max(fused, 1), LEAST_MEMORY_RATIO)


def _measured(which: str, work: Work, tokens: int, backend: str, threads: int) -> int:
    """Bytes, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_beyond, (which, work, tokens, backend, threads))


def _beyond(which: str, work: Work, tokens: int, backend: str, threads: int) -> int:
    torch.set_num_threads(threads)
    getattr(Inputs(work, SMALL, backend), which)()  # what libraries set up once
    inputs = Inputs(work, tokens, backend)
    return grown(getattr(inputs, which), inputs.device) - inputs.hidden.nbytes - inputs.weight.nbytes


if __name__ == "__main__":
    raise SystemExit(main())

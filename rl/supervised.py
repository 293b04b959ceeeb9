"""Supervised training on single turns: a prompt, and the response that is wanted.

The same packing, head and optimizer as the policy's loss: with advantage 1 and no ratio that loss is the cross-entropy.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..engine import lora
from ..engine.engine import Engine
from ..engine.errors import RequestError
from ..engine.sequence import Segment, joined
from .config import AlgorithmConfig
from .fused_loss import Head, fused_policy_loss
from .loss import TokenRows
from .optimizer import Optimizer
from .packing import Ids, Pack, pack_turns, response_rows
from .trainer_config import TrainerConfig

__all__ = ["Example", "Examples", "SupervisedReport", "SupervisedTrainer"]

CROSS_ENTROPY = AlgorithmConfig(surrogate="cispo", dual_clip=None, kl=0.0)


@dataclass(frozen=True)
class Example:
    """int32 ids of a prompt and of the response to it, with the id that ends it."""

    prompt_ids: array[int]
    response_ids: array[int]

    @classmethod
    def of(cls, segments: Iterable[Segment], response: array[int], end: int) -> Example:
        """From a prompt's segments. end: the id that ends the response."""
        return cls(joined(segments), response + array("i", [end]))


class Examples(Protocol):
    """Where examples come from."""

    def example(self, index: int) -> Example:
        """The same example for the same index, which counts up without end."""


@dataclass
class SupervisedReport:
    """loss: cross-entropy, the mean over the response tokens, nats. gradient_norm: before clipping. seconds: of the
    whole step."""

    step: int
    examples: int = 0
    tokens: int = 0
    loss: float = 0.0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"step {self.step}: loss {self.loss:.4f}, gradient norm {self.gradient_norm:.3g}, "
            f"{self.examples} examples, {self.tokens} tokens, {self.seconds:.1f} s"
        )


class SupervisedTrainer:
    """Trains an engine's model, or adapters on it, to give the responses of examples.

    steps: taken so far.
    """

    def __init__(self, engine: Engine, config: TrainerConfig | None = None) -> None:
        """config: its algorithm counts for nothing here. Raises ConfigError as Trainer does."""
        self.engine = engine
        self.config = TrainerConfig() if config is None else config
        if self.config.lora is not None:
            lora.add(engine, self.config.lora)
        self._kv_dtype = engine.runner.pages[0].key.dtype
        trained = lora.trained_parameters(engine.model)
        if engine.parallel is not None:
            engine.parallel.agree("configuration", repr(self.config).encode())
        self._optimizer = Optimizer(trained, self.config.optimizer, parallel=engine.parallel)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """As Trainer.state_dict."""
        state = {"steps": self.steps, "weights_version": self.engine.weights_version}
        return state | {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As Trainer.load_state_dict."""
        with self.engine.update():
            self._optimizer.load_state_dict(state["optimizer"])
        self.engine.weights_version = state["weights_version"]
        self.steps = state["steps"]

    def step(self, examples: Iterable[Example]) -> SupervisedReport:
        """One update on the mean over all response tokens.

        Raises RequestError without examples, ConfigError for one longer than train_tokens. If anything fails, the
        parameters are as they were.
        """
        started, report = time.perf_counter(), SupervisedReport(self.steps)
        turns = [(example.prompt_ids, example.response_ids) for example in examples]
        if not turns:
            raise RequestError("a step needs at least one example")
        report.examples = len(turns)
        report.tokens = sum(len(response) for _, response in turns)
        total, config = 0.0, self.config
        try:
            with self._together(turns):
                for pack in pack_turns(turns, config.train_tokens, self.engine.config.page_size, config.share_prefixes):
                    total += self._backward(pack)
            with self.engine.update():
                report.gradient_norm, report.learning_rate = self._optimizer.step(report.tokens)
        except BaseException:
            self._optimizer.forget()
            raise
        report.loss = total / report.tokens
        report.seconds = time.perf_counter() - started
        self.steps += 1
        return report

    def _together(self, turns: list[Ids]) -> AbstractContextManager[None]:
        """The block in which ranks that hold parts of the model run the same turns."""
        parallel = self.engine.parallel
        if parallel is None:
            return nullcontext()
        return parallel.together("training pass", b"|".join(part.tobytes() for turn in turns for part in turn))

    def _backward(self, pack: Pack) -> float:
        """Add a pack's gradient, undivided; -> its cross-entropy, a sum."""
        model, page_size = self.engine.model, self.engine.config.page_size
        hidden = response_rows(model, pack, page_size, self._kv_dtype, self.config.recompute)
        ones = torch.ones(len(pack.targets), dtype=model.activation_dtype)
        turns = torch.arange(len(pack.turns)).repeat_interleave(torch.tensor(pack.lengths))
        rows = TokenRows(advantages=ones, weights=ones, turns=turns)
        result = fused_policy_loss(hidden, pack.targets, Head(model.head_weight, 1.0, model.ops), rows, CROSS_ENTROPY)
        result.loss.backward()  # type: ignore[no-untyped-call]
        return -float(result.logprobs.sum(dtype=torch.float64))

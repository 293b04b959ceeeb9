"""Trainer: optimises the parameters that the engine rolls out with, in place. No second copy, no weight sync.

A step takes groups as they come. While other groups still roll out, a group's gradient is added to those before it, not
yet divided by the number of tokens, which nobody knows; the update waits until the rollout has ended.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from ..engine import lora
from ..engine.config import DTYPES
from ..engine.engine import Engine
from ..engine.errors import ConfigError, RequestError
from ..engine.memory import available_bytes
from ..engine.runner import page_bytes
from .group_loss import GroupLoss, OldLogprobs
from .memory_plan import MemoryPlan, plan_memory
from .optimizer import Optimizer
from .statistics import LossStatistics
from .trainer_config import TrainerConfig
from .trajectory import Group, require_policy

__all__ = ["StepReport", "Trainer"]


@dataclass
class StepReport:
    """What a step did.

    reward, correct: means over its trajectories, with and without shaping. truncated: share of turns cut at a limit.
    first: LossStatistics.means of the first mini-batch, whose policy is still the rollout's: largest_difference is the
    mismatch. all: those of the whole step. updates: made; gradient_norms, learning_rates: of each mini-batch.
    recomputed: log-probabilities of the old policy that were computed again.
    seconds: of "rollout", "loss" (forward and backward), "update".
    """

    step: int
    groups: int = 0
    trajectories: int = 0
    turns: int = 0
    tokens: int = 0
    reward: float = 0.0
    correct: float = 0.0
    truncated: float = 0.0
    updates: int = 0
    gradient_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    all: dict[str, float] = field(default_factory=dict)
    recomputed: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"rollout": 0.0, "loss": 0.0, "update": 0.0})

    def __str__(self) -> str:
        norm = max(self.gradient_norms, default=0.0)
        return (
            f"step {self.step}: reward {self.reward:.3f}, correct {self.correct:.3f}, gradient norm {norm:.3g}, "
            f"mismatch {self.first.get('largest_difference', 0.0):.3g}, truncated {self.truncated:.0%}, "
            + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        )


class Trainer:
    """Trains an engine's model, or adapters on it, on groups of trajectories.

        trainer = Trainer(engine, TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-5)))
        report = trainer.step(Rollout(agent, "boxed_exact", trainer.config.algorithm).groups(problems, 8))

    plan: what it takes of the memory. steps: taken so far.
    """

    def __init__(self, engine: Engine, config: TrainerConfig | None = None) -> None:
        """Raises ConfigError for an engine with quantised weights or KV or on a GPU, for a reference without its
        adapters, and when the memory does not suffice."""
        self.engine = engine
        self.config = config = TrainerConfig() if config is None else config
        for name, value in (("weights", engine.config.weights), ("kv_dtype", engine.config.kv_dtype)):
            if value not in ("native", None, *DTYPES):
                raise ConfigError(f"this engine has {name}={value!r}: quantised numbers have no gradient; leave it out")
        if engine.model.ops.backend == "triton":
            raise ConfigError("the Triton backend does not train yet; make the engine with backend='cpu'")
        self.plan = _plan(engine, config)
        print(self.plan, file=sys.stderr)
        if config.lora is not None:
            lora.add(engine, config.lora)
        adapters = lora.adapters(engine.model)
        if config.reference == "lora_off" and not adapters:
            raise ConfigError(
                "reference='lora_off' needs adapters to turn off; give lora=LoraConfig(...), or use 'copy'"
            )
        if config.reference == "copy" and adapters:
            raise ConfigError("a model with adapters has its reference in itself; use reference='lora_off'")
        self._loss = GroupLoss(engine, config)
        trained = lora.trained_parameters(engine.model)
        self._trained = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
        norm = None
        if engine.parallel is not None:
            engine.parallel.agree("configuration", repr(config).encode())
            norm = partial(engine.parallel.norm, list(self._trained))
        self._optimizer = Optimizer(trained, config.optimizer, norm)
        self.steps = 0

    def step(self, groups: Iterable[Group]) -> StepReport:
        """Train on groups: a list, or a generator whose rollout goes on while the first mini-batch is worked on.

        Without groups nothing is updated. Raises ConfigError for groups that were drawn greedily, with filters or
        penalties, and, unless an importance correction is on, RequestError for those of other weights. If anything
        fails, the parameters are as they were after the last update, and a generator's rollout is ended.
        """
        report, seen = StepReport(self.steps), LossStatistics.nothing()
        size, held = self.config.mini_batch, list[Group]()
        try:
            batch = _MiniBatch()
            for group in self._timed(groups, report):
                self._require_own(group)
                _count(group, report)
                if size is None or report.groups <= size:
                    self._add(group, None, batch, report)
                else:
                    held.append(group)
            report.first = batch.statistics.means()
            olds = self._old_logprobs(held, report)
            while True:
                self._update(batch, report)
                seen += batch.statistics
                if not held:
                    break
                batch = _MiniBatch()
                for group in held[:size]:
                    self._add(group, olds.get(id(group)), batch, report)
                del held[:size]
        except BaseException:
            self._optimizer.forget()
            if isinstance(groups, Generator):
                groups.close()  # while its sequences live, the engine refuses the next update
            raise
        report.all = seen.means()
        report.recomputed, self._loss.recomputed = self._loss.recomputed, 0
        _average(report)
        self.steps += 1
        return report

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on besides the model's parameters: whole numbers, and the optimizer's tensors."""
        state = {"steps": self.steps, "weights_version": self.engine.weights_version}
        return state | {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the trainer went on that gave this state; the parameters must be those of then already.

        Raises CheckpointError when it is that of other parameters, RequestError as Engine.update does.
        """
        with self.engine.update():
            self._optimizer.load_state_dict(state["optimizer"])
        self.engine.weights_version = state["weights_version"]  # no KV of before the update is left
        self.steps = state["steps"]

    def _timed(self, groups: Iterable[Group], report: StepReport) -> Iterator[Group]:
        source = iter(groups)
        while True:
            started = time.perf_counter()
            group = next(source, None)
            report.seconds["rollout"] += time.perf_counter() - started
            if group is None:
                return
            yield group

    def _require_own(self, group: Group) -> None:
        """Refuse what would make the ratio of new to old probability wrong."""
        require_policy(group.sampling)
        if any(turn.carried_tokens for trajectory in group.trajectories for turn in trajectory.turns):
            raise RequestError(
                "these rollouts were drawn with memory_kv='carried', whose approximate KV the trainer does not "
                "compute; roll out with AgentConfig(memory_kv='exact')"
            )
        if self.config.algorithm.correction != "none":
            return
        if group.weights_version != self.engine.weights_version:
            raise RequestError(
                f"these rollouts are of weights version {group.weights_version}, the engine is at "
                f"{self.engine.weights_version}; roll out again, or set AlgorithmConfig.correction"
            )

    def _add(self, group: Group, old: OldLogprobs | None, batch: _MiniBatch, report: StepReport) -> None:
        started = time.perf_counter()
        denominator, statistics = self._loss.backward(group, old)
        batch.denominator += denominator
        batch.statistics += statistics
        report.seconds["loss"] += time.perf_counter() - started

    def _old_logprobs(self, held: list[Group], report: StepReport) -> dict[int, OldLogprobs]:
        """For corrections, of the groups whose mini-batches come after an update."""
        if self.config.algorithm.correction == "none":
            return {}
        started = time.perf_counter()
        olds = {id(group): self._loss.old_logprobs(group) for group in held}
        report.seconds["loss"] += time.perf_counter() - started
        return olds

    def _update(self, batch: _MiniBatch, report: StepReport) -> None:
        if not float(batch.statistics.sums[0]):  # no token of it can change anything
            return
        started = time.perf_counter()
        parallel = self.engine.parallel
        content = repr((batch.denominator, self._optimizer.updates)).encode()
        with self.engine.update(), nullcontext() if parallel is None else parallel.together("update", content):
            if parallel is not None:
                parallel.sum_gradients(self._trained)
            norm, rate = self._optimizer.step(batch.denominator)
        if not math.isfinite(norm):
            warnings.warn(f"step {self.steps}: the gradient's norm is {norm}, so nothing was updated", stacklevel=3)
        report.gradient_norms.append(norm)
        report.learning_rates.append(rate)
        report.updates += math.isfinite(norm)
        report.seconds["update"] += time.perf_counter() - started


def _plan(engine: Engine, config: TrainerConfig) -> MemoryPlan:
    """For an engine that is there: within what this process holds and what is free."""
    pool = engine.scheduler.pool.num_pages * page_bytes(
        engine.model.config, engine.config.page_size, engine.runner.pages[0].key.dtype
    )
    adapters = sum(p.numel() for name, p in engine.model.named_parameters() if "lora_" in name)
    held = psutil.Process().memory_info().rss
    sized = dataclasses.replace(engine.config, kv_bytes=pool)
    return plan_memory(engine.model.config, sized, config, available_bytes(engine.model.ops.device) + held, adapters)


@dataclass
class _MiniBatch:
    denominator: float = 0.0
    statistics: LossStatistics = field(default_factory=LossStatistics.nothing)


def _count(group: Group, report: StepReport) -> None:
    """Sums, of which _average makes means."""
    report.groups += 1
    for trajectory in group.trajectories:
        report.trajectories += 1
        report.reward += trajectory.reward
        report.correct += trajectory.correct
        for turn in trajectory.turns:
            report.turns += 1
            report.tokens += len(turn.response_ids)
            report.truncated += turn.finish_reason == "length"


def _average(report: StepReport) -> None:
    report.reward /= max(report.trajectories, 1)
    report.correct /= max(report.trajectories, 1)
    report.truncated /= max(report.turns, 1)

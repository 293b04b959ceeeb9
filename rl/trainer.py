"""Trainer: optimises the parameters that the engine rolls out with, in place. No second copy, no weight sync.

A step takes groups as they come. While other groups still roll out, a group's gradient is added to those before it, not
yet divided by the number of tokens, which nobody knows; the update waits until the rollout has ended.

Several ranks work on different groups and meet where the rollout has ended, and at every update, whose gradient is that
of all their groups, divided by the tokens of all. A report is that of all ranks, the same on each.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil
import torch

from ..engine import lora
from ..engine.config import DTYPES
from ..engine.engine import Engine
from ..engine.errors import ConfigError, RankError, RequestError
from ..engine.memory import available_bytes, explained
from ..engine.runner import page_bytes
from .group_loss import GroupLoss, OldLogprobs
from .memory_plan import MemoryPlan, plan_memory
from .optimizer import Optimizer
from .process_group import ProcessGroup
from .statistics import LossStatistics
from .step_report import GroupCounts, StepReport
from .trainer_config import TrainerConfig
from .trajectory import Group, require_policy

__all__ = ["Trainer"]

T = TypeVar("T")

ROOM = "lower TrainerConfig.train_tokens, or EngineConfig.kv_share or kv_bytes"


class Trainer:
    """Trains an engine's model, or adapters on it, on groups of trajectories.

        trainer = Trainer(engine, TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-5)))
        report = trainer.step(Rollout(agent, "boxed_exact", trainer.config.algorithm).groups(problems, 8))

    plan: what it takes of the memory. steps: taken so far.
    """

    def __init__(
        self, engine: Engine, config: TrainerConfig | None = None, process_group: ProcessGroup | None = None
    ) -> None:
        """process_group: the ranks that train together; where their weights differ, those of rank 0 are taken.

        Raises ConfigError for an engine with quantised weights or KV, for a reference without its adapters, and
        when the memory does not suffice."""
        self.engine = engine
        self._ranks = ProcessGroup() if process_group is None else process_group
        self.config = config = TrainerConfig() if config is None else config
        for name, value in (("weights", engine.config.weights), ("kv_dtype", engine.config.kv_dtype)):
            if value not in ("native", None, *DTYPES):
                raise ConfigError(f"this engine has {name}={value!r}: quantised numbers have no gradient; leave it out")
        self.plan = _plan(engine, config, self._ranks)
        if self._ranks.main:
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
        if len(set(self._ranks.gather(self._fingerprint()))) > 1:
            with engine.update():
                self._ranks.broadcast(list(engine.model.parameters()), 0)
        self._loss = GroupLoss(engine, config)
        trained = lora.trained_parameters(engine.model)
        if engine.parallel is not None:
            engine.parallel.agree("configuration", repr(config).encode())
        self._optimizer = Optimizer(trained, config.optimizer, self._ranks, engine.parallel)
        self.steps = 0

    def step(self, groups: Iterable[Group]) -> StepReport:
        """Train on groups: a list, or a generator whose rollout goes on while the first mini-batch is worked on.

        Without groups nothing is updated; a rank that has none takes part in the updates of the others. Raises
        ConfigError for groups that were drawn greedily, with filters or penalties, and when a GPU's memory does not
        suffice, RequestError for those of other weights, unless an importance correction is on, and RankError when
        another rank has failed. If anything fails, the parameters are as they were after the last update, a generator's
        rollout is ended, and so are the other ranks.
        """
        try:
            with explained("a training step", self.engine.runner.device, ROOM):
                return self._step(groups)
        except BaseException as error:
            self._optimizer.forget()
            if isinstance(groups, Generator):
                groups.close()  # while its sequences live, the engine refuses the next update
            self._ranks.fail(error)
            raise

    def _step(self, groups: Iterable[Group]) -> StepReport:
        report, seen = StepReport(self.steps), LossStatistics.nothing()
        size = self.config.mini_batch or sys.maxsize
        batch, held, own = _MiniBatch(), list[tuple[int, Group]](), list[GroupCounts]()
        for group in self._timed(groups, report):
            self._ranks.check()
            self._require_own(group)
            place = self._ranks.rank + len(own) * self._ranks.size if group.place is None else group.place
            own.append(GroupCounts.of(group, place))
            if place < size:
                self._add(group, place, None, batch, report)
            else:
                held.append((place, group))
        counts = [count for rank in self._gather(own, report) for count in rank]
        report.count(counts)
        olds = self._old_logprobs([group for _, group in held], report)
        for number in range(1 + max((count.place for count in counts), default=0) // size):
            for place, group in held:
                if place // size == number:
                    self._add(group, place, olds.get(id(group)), batch, report)
            statistics = self._update(batch, report)
            seen += statistics
            if not number:
                report.first = statistics.means()
            batch = _MiniBatch()
        report.all = seen.means()
        self._conclude(report)
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

    def _add(self, group: Group, place: int, old: OldLogprobs | None, batch: _MiniBatch, report: StepReport) -> None:
        started = time.perf_counter()
        batch.parts.append((place, *self._loss.backward(group, old)))
        report.seconds["loss"] += time.perf_counter() - started

    def _gather(self, value: T, report: StepReport) -> list[T]:
        """That of all ranks."""
        started = time.perf_counter()
        values = self._ranks.gather(value)
        if self._ranks.size > 1:
            report.seconds["wait"] = report.seconds.get("wait", 0.0) + time.perf_counter() - started
        return values

    def _old_logprobs(self, held: list[Group], report: StepReport) -> dict[int, OldLogprobs]:
        """For corrections, of the groups whose mini-batches come after an update."""
        if self.config.algorithm.correction == "none":
            return {}
        started = time.perf_counter()
        olds = {id(group): self._loss.old_logprobs(group) for group in held}
        report.seconds["loss"] += time.perf_counter() - started
        return olds

    def _update(self, batch: _MiniBatch, report: StepReport) -> LossStatistics:
        """Make the update of a mini-batch, if any token of it can change anything; -> what its loss saw."""
        denominator, statistics = 0.0, LossStatistics.nothing()
        parts = [part for rank in self._gather(batch.parts, report) for part in rank]
        for _, part, seen in sorted(parts, key=lambda part: part[0]):  # one order of sums for any number of ranks
            denominator += part
            statistics += seen
        if not float(statistics.sums[0]):
            return statistics
        started = time.perf_counter()
        with self.engine.update():
            norm, rate = self._optimizer.step(denominator)
        if not math.isfinite(norm) and self._ranks.main:
            warnings.warn(f"step {self.steps}: the gradient's norm is {norm}, so nothing was updated", stacklevel=4)
        report.gradient_norms.append(norm)
        report.learning_rates.append(rate)
        report.updates += math.isfinite(norm)
        report.seconds["update"] += time.perf_counter() - started
        return statistics

    def _conclude(self, report: StepReport) -> None:
        """Complete what is known to each rank alone, and see that they go on with the same weights."""
        recomputed, self._loss.recomputed = self._loss.recomputed, 0
        ranks = self._gather((recomputed, report.seconds, self._fingerprint()), report)
        report.recomputed = sum(recomputed for recomputed, _, _ in ranks)
        report.seconds = {name: max(seconds[name] for _, seconds, _ in ranks) for name in report.seconds}
        wrong = [str(rank) for rank, (_, _, weights) in enumerate(ranks) if weights != ranks[0][2]]
        if wrong:
            raise RankError(
                f"after step {self.steps} rank {', '.join(wrong)} has other weights than rank 0; change weights on all "
                "ranks alike, and check the memory of these machines"
            )

    def _fingerprint(self) -> int:
        """Of the weights, to compare those of several ranks."""
        if self._ranks.size == 1:
            return 0
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        parameters = [parameter.detach() for parameter in self.engine.model.parameters()]
        return hash(tuple(int(p.view(whole[p.element_size()]).sum(dtype=torch.int64)) for p in parameters))


def _plan(engine: Engine, config: TrainerConfig, ranks: ProcessGroup) -> MemoryPlan:
    """For an engine that is there: within what this process holds and its part of what is free; a GPU is its own."""
    pool = engine.scheduler.pool.num_pages * page_bytes(
        engine.model.config, engine.config.page_size, engine.runner.pages[0].key.dtype
    )
    adapters = sum(p.numel() for name, p in engine.model.named_parameters() if "lora_" in name)
    device = engine.model.ops.device
    if device.type == "cuda":
        held, free = torch.cuda.memory_reserved(device), available_bytes(device)
    else:
        held, free = psutil.Process().memory_info().rss, available_bytes(device) // ranks.local_size
    sized = dataclasses.replace(engine.config, kv_bytes=pool)
    return plan_memory(engine.model.config, sized, config, free + held, adapters, ranks.size, engine.graph_bytes)


@dataclass
class _MiniBatch:
    """parts: of each group its place, its part of the denominator and what its loss saw."""

    parts: list[tuple[int, float, LossStatistics]] = field(default_factory=list)

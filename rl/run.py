"""Run: a whole training run, from its configuration to its last step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import psutil

from ..engine import lora
from ..engine.defaults import embedded_model_path
from ..engine.engine import Engine
from ..engine.errors import ConfigError
from ..engine.memory_agent import MemoryAgent
from .agent_function import FunctionAgent, FunctionConfig
from .checkpoint import Checkpoints
from .curriculum import Curriculum
from .data import DataConfig, FileSource, Source
from .diagnostics import Diagnostics
from .display import Display
from .episodes import Agent
from .evaluator import Evaluator
from .log import RunLog, warnings_noticed
from .problem_stream import ProblemStream
from .process_group import ProcessGroup
from .random_state import random_state, set_random_state
from .replay import dumped, recorded
from .rewards import Scorer
from .rollout import Rollout
from .run_config import AnyData, RunConfig
from .step_report import StepReport
from .tasks import TaskConfig
from .termination import Terminated, Termination
from .trackers import trackers
from .trainer import Trainer
from .trajectory import Group

__all__ = ["Run"]


class Run:
    """Trains as a RunConfig says; everything that it writes is in config.log.folder.

        Run(load_config("train.yaml")).train()

    The ranks of a process group make a Run each, with the same configuration. Main is the one that writes log.jsonl.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: bool = False,
        replay: str | Path | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """resume: go on from the newest checkpoint in the folder, or start where there is none. replay: train on the
        trajectories that another run left in this folder, without rolling out.

        Raises PalimpsestError for whatever cannot work.
        """
        self.config, self.folder = config, Path(config.log.folder)
        self._ranks = ranks = ProcessGroup() if process_group is None else process_group
        self._replay, self._step = replay, 0
        self._score: float | None = None
        trainer_config = config.trainer
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint.keep, ranks)
        self.termination = Termination()
        self._saved = saved = self.checkpoints.start(resume)
        self._resumed = saved is not None
        self.log = self._log((-1 if saved is None else saved) if resume else None)
        self._trajectories = self.folder / ("trajectories" if ranks.size == 1 else f"trajectories/rank{ranks.rank}")
        self.display = Display(config.rollout.steps, saved or 0, config.rollout.problems, quiet=not ranks.main)
        self.engine = Engine(
            config.model.path or embedded_model_path(), config.model.engine, process_group=ranks.tensor
        )
        if config.model.adapter is not None:
            lora.load(self.engine, config.model.adapter)
        self.trainer = Trainer(self.engine, trainer_config, ranks)
        self.agent = self._agent()
        reward = Scorer(config.reward.name, timeout=config.reward.timeout, workers=config.reward.workers)
        self.rollout = Rollout(self.agent, reward, config.algorithm, ranks, config.parallel.deterministic)
        self.curriculum = Curriculum(config.rollout.curriculum)
        self.problems = ProblemStream(self._source(config.data), self.agent, self.notice)
        self.evaluator = Evaluator(config, self.agent, reward, ranks, self._source, self.notice)
        state = self.checkpoints.restore(self.trainer) if resume else None
        if state is not None:
            self._step = self.trainer.steps
            self._tell_changes(state["config"])
            self._set_state(state)

    def train(self) -> None:
        """Take the steps that are left, and save. Raises Terminated when a signal has ended that, with all saved."""
        config = self.config
        self.log.add("start", self.trainer.steps, {"config": config.plain(), "data": str(config.data)})
        self.display.tell(str(config.data))
        if self._resumed:
            left = "goes on" if self.trainer.steps < config.rollout.steps else "nothing is left to do"
            self.display.tell(f"{self.trainer.steps} of {config.rollout.steps} steps were taken before; {left}")
        with (
            closing(self.log),
            closing(self.rollout.scorer),
            self.display,
            warnings_noticed(self.notice),
            self.termination,
        ):
            if self.trainer.steps == 0:
                self.evaluate()
            while self.trainer.steps < config.rollout.steps:
                before = self._state()
                try:
                    self.step()
                except Terminated:  # out of the rollout, before anything was updated
                    self._set_state(before)
                    self.save()
                    raise
                self.evaluate()
                if not self.trainer.steps % config.checkpoint.every:
                    self.save()
                self._end_if_told()
            self.save()

    def save(self) -> None:
        """Leave a checkpoint of the steps taken so far, unless there is one."""
        if self._saved != self.trainer.steps:
            self.checkpoints.save(self.trainer, self._state(), self._score)
            self._saved = self.trainer.steps

    def evaluate(self) -> None:
        """Evaluate if it is due, with a line in the log. Its reward is what makes a checkpoint the best."""
        if self.evaluator.due(self.trainer.steps):
            values, self._score = self.evaluator.run()
            self.log.add("eval", self.trainer.steps, values)
            self.log.flush()
            rewards = ", ".join(f"{name} {means['reward']:.3f}" for name, means in values["sets"].items())
            self.display.say(f"evaluation after step {self.trainer.steps}: {rewards}")

    def step(self) -> StepReport:
        """One step, and its line in the log."""
        started, events = time.perf_counter(), Counter(self.log.events)
        seen, self._step = Diagnostics(), self.trainer.steps + 1
        if self._replay is None:
            groups = self.rollout.groups(self.problems, self.config.rollout.problems)
        else:
            groups = recorded(self._replay, self.trainer.steps, self._ranks)
        if self.config.log.trajectories and self._leads:
            groups = dumped(groups, self._trajectories, self.trainer.steps)
        report = self.trainer.step(self._watched(groups, seen))
        seen, correct, failures = self._of_all_ranks(seen)
        self._score = None if self.config.eval.sets else report.correct
        values = dataclasses.asdict(report)
        del values["step"]
        seconds = {**values.pop("seconds"), "step": time.perf_counter() - started}
        self.log.add(
            "step",
            self._step,
            {
                **values,
                "position": self.problems.position,
                "stage": self.curriculum.stage,
                "groups_rolled": self.rollout.rolled,
                "correct_of_rolled": correct,
                "failures": failures,
                "diagnostics": seen.record(),
                "events": dict(self.log.events - events),
                "machine": {
                    "seconds": seconds,
                    "tokens_per_second": report.tokens / seconds["step"],
                    "draft_acceptance": seen.acceptance(),
                    "memory_mib": psutil.Process().memory_info().rss / 2**20,
                },
            },
        )
        self.log.flush()
        what = str(report).partition(": ")[2]  # the trainer counts from 0, a run how many are done
        self.display.step(f"step {self._step} of {self.config.rollout.steps}: {what}")
        if self.curriculum.add(correct):
            self._enter_stage()
        return report

    def notice(self, name: str, message: str) -> None:
        """Log an event of the current step; those of the start stand in the log of a run that goes on."""
        if self._step or not self._resumed:
            self.log.event(name, message, self._step)
        self.display.tell(f"{name}: {message}")

    def _log(self, keep_steps: int | None) -> RunLog:
        if not self._ranks.main:
            return RunLog(None)
        log = RunLog(self.folder / "log.jsonl", keep_steps=keep_steps)
        log.trackers += trackers(self.config.log, self.config.plain())
        return log

    @property
    def _leads(self) -> bool:
        """Whether this is the first of the ranks that hold one model together."""
        return self.engine.parallel is None or self.engine.parallel.rank == 0

    @property
    def _alone(self) -> bool:
        return self._ranks.size == 1 and self.engine.parallel is None

    def _end_if_told(self) -> None:
        """Save and raise Terminated if a signal came to any rank."""
        if self._alone:
            return  # the next rollout ends at once
        told = self.termination.requested or 0
        if self.engine.parallel is not None:
            told = -self.engine.parallel.least(-told)
        told = max(self._ranks.gather(told))
        if told:
            self.save()
            raise Terminated(told)

    def _of_all_ranks(self, seen: Diagnostics) -> tuple[Diagnostics, float, dict[str, int]]:
        """-> diagnostics, mean answer of all groups that were rolled out, those left out too, and failures."""
        parts = self._ranks.gather((seen, self.rollout.correct, self.rollout.failures))
        correct = [value for _, values, _ in parts for value in values]
        failures = sum((Counter(counts) for *_, counts in parts), Counter[str]())
        merged = Diagnostics().merged(one for one, *_ in parts)
        return merged, math.fsum(correct) / max(len(correct), 1), dict(failures)

    def _enter_stage(self) -> None:
        """Take problems from the data of the curriculum's stage."""
        data = self.config.stages[self.curriculum.stage]
        self.problems.source = self._source(data)
        self.notice("stage", f"stage {self.curriculum.stage} of the curriculum begins: {data}")

    def _agent(self) -> Agent:
        config = self.config.agent
        if isinstance(config, FunctionConfig):
            return FunctionAgent(self.engine, config)
        return MemoryAgent(self.engine, config)

    def _source(self, data: AnyData) -> Source:
        if isinstance(data, DataConfig):
            return FileSource(data, self.engine.tokenizer, self.notice)
        if isinstance(data, TaskConfig):
            return data.source()
        raise ConfigError("an oracle's examples are for objective 'sft'; see SupervisedRun")

    def _watched(self, groups: Generator[Group, None, None], seen: Diagnostics) -> Generator[Group, None, None]:
        with closing(groups):
            while True:
                # several ranks end together, between two steps: one that left a step would be waited for
                with self.termination.breakable() if self._alone else nullcontext():
                    group = next(groups, None)
                if group is None:
                    return
                seen.add(group)
                self.display.group()
                yield group

    def _state(self) -> dict[str, Any]:
        """What decides the next steps, besides the trainer's state, as plain JSON values."""
        return {
            "position": self.problems.position,
            "curriculum": self.curriculum.state_dict(),
            "rollout": self.rollout.state_dict(),
            "random": random_state(),
            "config": self.config.plain(),
        }

    def _set_state(self, state: Mapping[str, Any]) -> None:
        self.problems.position = state["position"]
        self.curriculum.load_state_dict(state["curriculum"])
        if self.curriculum.stage:
            self.problems.source = self._source(self.config.stages[self.curriculum.stage])
        self.rollout.load_state_dict(state["rollout"])
        set_random_state(state["random"])

    def _tell_changes(self, before: Mapping[str, Any]) -> None:
        """Other values are allowed, but not silently: the run is not what it would have been."""
        for change in self.config.changes_since(before):
            self.notice("changed configuration", change)

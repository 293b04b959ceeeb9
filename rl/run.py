"""Run: a whole training run, from its configuration to its last step."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

from ..engine.defaults import embedded_model_path
from ..engine.engine import Engine
from ..engine.errors import ConfigError, RequestError
from ..engine.memory_agent import MemoryAgent
from ..engine.trace import differences
from .agent_function import FunctionAgent, FunctionConfig
from .checkpoint import Checkpoints
from .data import DataConfig, FileSource, Source
from .diagnostics import Diagnostics
from .display import Display
from .episodes import Agent
from .log import RunLog
from .random_state import random_state, set_random_state
from .replay import dumped
from .rewards import Scorer
from .rollout import Rollout
from .run_config import AnyData, RunConfig
from .step_report import StepReport
from .tasks import SlotsConfig
from .termination import Terminated, Termination
from .trainer import Trainer
from .trajectory import Group, Problem

__all__ = ["Run"]

NO_DIFFERENCE = ("log.", "checkpoint.", "rollout.steps")  # to what a step does
MOST_UNFIT = 100  # problems in a row that the agent has no room for


class Run:
    """Trains as a RunConfig says; everything that it writes is in config.log.folder.

        Run(load_config("train.yaml")).train()

    position: index of the source's next problem.
    """

    def __init__(self, config: RunConfig, *, resume: bool = False) -> None:
        """resume: go on from the newest checkpoint in the folder, or start where there is none.

        Raises PalimpsestError for whatever cannot work.
        """
        self.config = config
        self.folder = Path(config.log.folder)
        self.position = self._step = 0
        self._score: float | None = None
        trainer_config = config.trainer
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint.keep)
        self.termination = Termination()
        done = (self.checkpoints.steps or 0) if resume else 0
        self._resumed = resume and (self.folder / "log.jsonl").exists()
        self.log = RunLog(self.folder / "log.jsonl", keep_steps=done if resume else None)
        self.display = Display(config.rollout.steps, done, config.rollout.problems)
        self.engine = Engine(config.model.path or embedded_model_path(), config.model.engine)
        self.trainer = Trainer(self.engine, trainer_config)
        self.agent = self._agent()
        reward = Scorer(config.reward.name, timeout=config.reward.timeout, workers=config.reward.workers)
        self.rollout = Rollout(self.agent, reward, config.algorithm)
        self.source = self._source(config.data)
        state = self.checkpoints.restore(self.trainer) if resume else None
        if state is not None:
            self._step = self.trainer.steps
            self._tell_changes(state["config"])
            self._set_state(state)

    def train(self) -> None:
        """Take the steps that are left, and save. Raises Terminated when a signal has ended that, with all saved."""
        config = self.config
        self.log.add("start", self.trainer.steps, {"config": dataclasses.asdict(config), "data": str(config.data)})
        self.display.tell(str(config.data))
        with closing(self.log), closing(self.rollout.scorer), self.display, self._warnings_logged(), self.termination:
            while self.trainer.steps < config.rollout.steps:
                before = self._state()
                try:
                    self.step()
                except Terminated:  # out of the rollout, before anything was updated
                    self._set_state(before)
                    self.save()
                    raise
                if not self.trainer.steps % config.checkpoint.every:
                    self.save()
            self.save()

    def save(self) -> None:
        """Leave a checkpoint of the steps taken so far, unless there is one."""
        if self.checkpoints.steps != self.trainer.steps:
            self.checkpoints.save(self.trainer, self._state(), self._score)

    def step(self) -> StepReport:
        """One step, and its line in the log."""
        started, events = time.perf_counter(), Counter(self.log.events)
        seen, self._step = Diagnostics(), self.trainer.steps + 1
        groups = self.rollout.groups(self._problems(), self.config.rollout.problems)
        if self.config.log.trajectories:
            groups = dumped(groups, self.folder / "trajectories", self.trainer.steps)
        report = self.trainer.step(self._watched(groups, seen))
        self._score = report.correct
        values = dataclasses.asdict(report)
        del values["step"]
        seconds = {**values.pop("seconds"), "step": time.perf_counter() - started}
        self.log.add(
            "step",
            self._step,
            {
                **values,
                "position": self.position,
                "groups_rolled": self.rollout.rolled,
                "failures": self.rollout.failures,
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
        return report

    def notice(self, name: str, message: str) -> None:
        """Log an event of the current step; those of the start stand in the log of a run that goes on."""
        if self._step or not self._resumed:
            self.log.event(name, message, self._step)
        self.display.tell(f"{name}: {message}")

    def _agent(self) -> Agent:
        config = self.config.agent
        if isinstance(config, FunctionConfig):
            return FunctionAgent(self.engine, config)
        return MemoryAgent(self.engine, config)

    def _source(self, data: AnyData) -> Source:
        if isinstance(data, DataConfig):
            return FileSource(data, self.engine.tokenizer, self.notice)
        if isinstance(data, SlotsConfig):
            return data.source()
        raise ConfigError("an oracle's examples are for objective 'sft'; see SupervisedRun")

    def _watched(self, groups: Generator[Group, None, None], seen: Diagnostics) -> Generator[Group, None, None]:
        with closing(groups):
            while True:
                with self.termination.breakable():
                    group = next(groups, None)
                if group is None:
                    return
                seen.add(group)
                self.display.group()
                yield group

    def _state(self) -> dict[str, Any]:
        """What decides the next steps, besides the trainer's state, as plain JSON values."""
        return {
            "position": self.position,
            "rollout": self.rollout.state_dict(),
            "random": random_state(),
            "config": _plain(self.config),
        }

    def _set_state(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]
        self.rollout.load_state_dict(state["rollout"])
        set_random_state(state["random"])

    def _tell_changes(self, before: Mapping[str, Any]) -> None:
        """Other values are allowed, but not silently: the run is not what it would have been."""
        for key, (was, now) in differences(before, _plain(self.config)):
            if not key.startswith(NO_DIFFERENCE):
                self.notice("changed configuration", f"{key} was {was!r} and is {now!r} from here on")

    def _problems(self) -> Iterator[Problem]:
        """From the position on; those that the agent has no room for are left out, each with an event."""
        unfit = 0
        while True:
            problem = self.source.problem(self.position)
            self.position += 1
            try:
                self._require_room(problem)
            except RequestError as error:
                self.notice("no room for a problem", f"problem {problem.id} is left out: {error}")
                unfit += 1
                if unfit == MOST_UNFIT:
                    raise
                continue
            unfit = 0
            yield problem

    def _require_room(self, problem: Problem) -> None:
        """Raise RequestError for a question with which no turn of the memory agent fits."""
        if isinstance(self.agent, MemoryAgent):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the reading will say so
                self.agent.chunk_size(len(self.engine.tokenizer.encode(problem.question)))

    @contextmanager
    def _warnings_logged(self) -> Iterator[None]:
        """Inside the block a warning is an event, each time anew, so that a run done again logs it in the same step."""

        def log(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            self.notice("warning", str(message))

        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = log
            yield


def _plain(config: RunConfig) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))

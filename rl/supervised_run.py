"""SupervisedRun: training on examples, from its configuration to its last step."""

from __future__ import annotations

import dataclasses
import shutil
import time
from contextlib import closing
from pathlib import Path

import torch

from ..engine import lora, reading_file
from ..engine.config import AgentConfig
from ..engine.defaults import embedded_model_path
from ..engine.engine import Engine
from ..engine.errors import CheckpointError, ConfigError
from ..engine.memory_agent import MemoryAgent
from .checkpoint import ADAPTER, MODEL, Checkpoints
from .display import Display
from .log import RunLog
from .run_config import RunConfig
from .supervised import Examples, SupervisedReport, SupervisedTrainer
from .tasks import ExamplesConfig
from .termination import Termination
from .trackers import trackers

__all__ = ["SupervisedRun"]


class SupervisedRun:
    """Trains as a RunConfig with objective "sft" says; all that it writes is in config.log.folder: log.jsonl,
    checkpoints, and at the end `model`, or `adapter` in bfloat16 with palimpsest.json.

    SupervisedRun(load_config("warmup.yaml")).train()
    """

    def __init__(self, config: RunConfig, *, resume: bool = False) -> None:
        """resume: as in Run. Raises PalimpsestError for whatever cannot work."""
        if not isinstance(config.data, ExamplesConfig) or not isinstance(config.agent, AgentConfig):
            raise ConfigError(
                "objective 'sft' needs examples, a task with an oracle, as data.task=slots_oracle, and the memory "
                "agent, whose prompts they stand in"
            )
        self.config = config
        self.folder = Path(config.log.folder)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint.keep)
        self.termination = Termination()
        saved = self.checkpoints.start(resume)
        for name in (MODEL, ADAPTER):
            if saved is None and (self.folder / name).exists():
                raise CheckpointError(f"{self.folder / name} exists, where this run writes its own; set log.folder")
        self.log = RunLog(self.folder / "log.jsonl", keep_steps=(-1 if saved is None else saved) if resume else None)
        self.log.trackers += trackers(config.log, config.plain())
        self.display = Display(config.rollout.steps, saved or 0, config.rollout.problems)
        self.engine = Engine(config.model.path or embedded_model_path(), config.model.engine)
        if config.model.adapter is not None:
            lora.load(self.engine, config.model.adapter)
        self.trainer = SupervisedTrainer(self.engine, config.trainer)
        self.examples: Examples = config.data.examples(MemoryAgent(self.engine, config.agent))
        state = self.checkpoints.restore(self.trainer) if resume else None
        for change in config.changes_since(state["config"]) if state is not None else ():
            self.log.event("changed configuration", change, self.trainer.steps)
            self.display.tell(f"changed configuration: {change}")

    def train(self) -> None:
        """Take the steps that are left, and write the trained weights. Raises Terminated when a signal has ended that,
        with all saved."""
        config, trainer = self.config, self.trainer
        if trainer.steps and trainer.steps < config.rollout.steps:  # what was trained is about to be surpassed
            for name in (MODEL, ADAPTER):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        self.log.add("start", trainer.steps, {"config": config.plain(), "data": str(config.data)})
        with closing(self.log), self.display, self.termination:
            while trainer.steps < config.rollout.steps:
                self.step()
                if not trainer.steps % config.checkpoint.every or self.termination.requested is not None:
                    self.save()
                self.termination.check()
            self.save()
        self._write()

    def save(self) -> None:
        """Leave a checkpoint of the steps taken so far, unless there is one."""
        if self.checkpoints.steps != self.trainer.steps:
            self.checkpoints.save(self.trainer, {"config": self.config.plain()})

    def step(self) -> SupervisedReport:
        """One step, and its line in the log."""
        started, size, done = time.perf_counter(), self.config.rollout.problems, self.trainer.steps
        report = self.trainer.step([self.examples.example(i) for i in range(done * size, (done + 1) * size)])
        values = dataclasses.asdict(report)
        del values["step"], values["seconds"]
        self.log.add("step", done + 1, {**values, "machine": {"seconds": {"step": time.perf_counter() - started}}})
        self.log.flush()
        what = str(report).partition(": ")[2]
        self.display.step(f"step {done + 1} of {self.config.rollout.steps}: {what}")
        return report

    def _write(self) -> None:
        """The weights, unless a run that was resumed when it had ended finds them there."""
        model, agent = self.engine.model, self.config.agent
        assert isinstance(agent, AgentConfig)
        if not lora.adapters(model):
            if not (self.folder / MODEL).exists():
                self.engine.save(self.folder / MODEL)
        elif not (self.folder / ADAPTER).exists():
            lora.save(model, self.folder / ADAPTER, self.engine.model_path, torch.bfloat16)
            reading_file.write(self.folder / ADAPTER, agent)

"""SupervisedRun: training on examples, from its configuration to its last step."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from pathlib import Path

from ..engine import checkpoint
from ..engine.config import AgentConfig
from ..engine.defaults import embedded_model_path
from ..engine.engine import Engine
from ..engine.errors import ConfigError
from ..engine.memory_agent import MemoryAgent
from .display import Display
from .log import RunLog
from .run_config import RunConfig
from .supervised import Examples, SupervisedReport, SupervisedTrainer
from .tasks import OracleConfig
from .trackers import trackers

__all__ = ["SupervisedRun"]


class SupervisedRun:
    """Trains as a RunConfig with objective "sft" says; log.jsonl and the trained model are in config.log.folder.

    SupervisedRun(load_config("warmup.yaml")).train()
    """

    def __init__(self, config: RunConfig) -> None:
        """Raises PalimpsestError for whatever cannot work."""
        if not isinstance(config.data, OracleConfig) or not isinstance(config.agent, AgentConfig):
            raise ConfigError(
                "objective 'sft' needs examples, a task with an oracle, as data.task=slots_oracle, and the memory "
                "agent, whose prompts they stand in"
            )
        self.config = config
        self.folder = Path(config.log.folder)
        self.log = RunLog(self.folder / "log.jsonl", trackers(config.log, dataclasses.asdict(config)))
        self.display = Display(config.rollout.steps, 0, config.rollout.problems)
        self.engine = Engine(config.model.path or embedded_model_path(), config.model.engine)
        self.trainer = SupervisedTrainer(self.engine, config.trainer)
        self.examples: Examples = config.data.examples(MemoryAgent(self.engine, config.agent))

    def train(self) -> None:
        """Take all steps, then write the model to the folder `model` of the run."""
        config = self.config
        self.log.add("start", 0, {"config": dataclasses.asdict(config), "data": str(config.data)})
        with closing(self.log), self.display:
            while self.trainer.steps < config.rollout.steps:
                self.step()
        parameters = dict(self.engine.model.named_parameters())
        checkpoint.save(self.folder / "model", self.engine.model.config, parameters, self.engine.tokenizer_folder)

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

"""Evaluator: a run's agent on the sets of its configuration, the ranks sharing the problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..engine.errors import ConfigError, RequestError
from ..engine.memory_agent import MemoryAgent
from .data import FileSource, Notice, Source
from .episodes import Agent
from .evaluation import Evaluation, evaluate
from .problem_stream import fits
from .process_group import ProcessGroup
from .rewards import Scorer
from .run_config import AnyData, RunConfig

__all__ = ["Evaluator"]

TIMED = ("seconds", "tokens_per_second", "undecoded")  # depend on the machine


class Evaluator:
    """Evaluates before the first step, after every so many, and after the last; never, without sets."""

    def __init__(
        self,
        config: RunConfig,
        agent: Agent,
        scorer: Scorer,
        ranks: ProcessGroup,
        opened: Callable[[AnyData], Source],
        notice: Notice,
    ) -> None:
        """opened: makes a source of a set's data. notice: is told of problems that the agent has no room for.

        Raises ConfigError for sets with an agent that reads no documents, RequestError for one that it has no room for.
        """
        if config.eval.sets and not isinstance(agent, MemoryAgent):
            raise ConfigError("eval.sets are read by the memory agent; leave them out with agent.function")
        self._config, self._agent, self._scorer, self._ranks = config, agent, scorer, ranks
        self._sources = {name: opened(data) for name, data in config.eval_sets.items()}
        self._numbers = {name: self._fitting(name, source, notice) for name, source in self._sources.items()}

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step."""
        return bool(self._sources) and (step % self._config.eval.every == 0 or step == self._config.rollout.steps)

    def run(self) -> tuple[dict[str, Any], float]:
        """-> what the log is told, and the mean reward of all sets."""
        assert isinstance(self._agent, MemoryAgent)
        told: dict[str, Any] = {}
        timed: dict[str, Any] = {}
        for name, source in self._sources.items():
            numbers = self._numbers[name][self._ranks.rank :: self._ranks.size]
            own = evaluate(self._agent, source, numbers, self._scorer, sampling=self._config.eval.sampling)
            parts = self._ranks.gather(own)
            outcomes = sorted((one for part in parts for one in part.outcomes), key=lambda one: one.index)
            means = Evaluation(tuple(outcomes), max(part.seconds for part in parts)).means()
            timed[name] = {key: means.pop(key) for key in TIMED}
            told[name] = means
        reward = math.fsum(means["reward"] for means in told.values()) / len(told)
        return {"sets": told, "machine": timed}, reward

    def _fitting(self, name: str, source: Source, notice: Notice) -> list[int]:
        """Which of the set's problems are read; nearly always all."""
        count = self._config.eval.problems
        if isinstance(source, FileSource):
            count = min(count, source.places)
        numbers = [number for number in range(count) if fits(source.problem(number), self._agent, notice)]
        if not numbers:
            raise RequestError(
                f"the agent has no room for any problem of eval.sets.{name}; shorten the questions, or raise "
                "model.engine.max_context"
            )
        return numbers

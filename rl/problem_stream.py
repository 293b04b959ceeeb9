"""ProblemStream: the problems of a run, one after the other, from a source that may change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from ..engine.errors import RequestError
from ..engine.memory_agent import MemoryAgent
from .data import Notice, Source
from .episodes import Agent
from .trajectory import Problem

__all__ = ["ProblemStream"]

MOST_UNFIT = 100  # problems in a row that the agent has no room for


class ProblemStream(Iterator[Problem]):
    """Leaves out problems that the agent has no room for, and says so. position: the index that comes next."""

    def __init__(self, source: Source, agent: Agent, notice: Notice) -> None:
        self.source, self.position = source, 0
        self._agent, self._notice = agent, notice

    def __next__(self) -> Problem:
        """Raises RequestError when 100 in a row do not fit."""
        unfit = 0
        while True:
            problem = self.source.problem(self.position)
            self.position += 1
            try:
                self._require_room(problem)
            except RequestError as error:
                self._notice("no room for a problem", f"problem {problem.id} is left out: {error}")
                unfit += 1
                if unfit == MOST_UNFIT:
                    raise
                continue
            return problem

    def _require_room(self, problem: Problem) -> None:
        """Raise RequestError for a question with which no turn of a memory agent fits."""
        if isinstance(self._agent, MemoryAgent):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the reading will say so
                self._agent.chunk_size(len(self._agent.tokenizer.encode(problem.question)))

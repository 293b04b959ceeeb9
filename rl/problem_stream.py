"""ProblemStream: the problems of a run, one after the other, from a source that may change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from ..engine.errors import RequestError
from ..engine.memory_agent import MemoryAgent
from .data import FileSource, Notice, Source
from .episodes import Agent
from .trajectory import Problem

__all__ = ["ProblemStream", "fits"]

MOST_UNFIT = 100  # problems in a row that the agent has no room for, or all of a file that has more


class ProblemStream(Iterator[Problem]):
    """Leaves out problems that the agent has no room for, and says so. position: the index that comes next."""

    def __init__(self, source: Source, agent: Agent, notice: Notice) -> None:
        self.source, self.position = source, 0
        self._agent, self._notice = agent, notice

    def __next__(self) -> Problem:
        """Raises RequestError when 100 in a row do not fit, and of a file with more problems none."""
        most = max(MOST_UNFIT, self.source.places if isinstance(self.source, FileSource) else 0)
        for _ in range(most):
            problem = self.source.problem(self.position)
            self.position += 1
            if fits(problem, self._agent, self._notice):
                return problem
        raise RequestError(
            f"the agent has no room for any of {most} problems in a row, the last {problem.id!r}; shorten the "
            "questions, raise model.engine.max_context, or lower agent.memory_tokens or agent.answer_tokens"
        )


def fits(problem: Problem, agent: Agent, notice: Notice) -> bool:
    """Whether turns of a memory agent have room for the question; notice: is told of one for which they have none."""
    if isinstance(agent, MemoryAgent):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the reading will say so
                agent.chunk_size(len(agent.tokenizer.encode(problem.question)))
        except RequestError as error:
            notice("no room for a problem", f"problem {problem.id} is left out: {error}")
            return False
    return True

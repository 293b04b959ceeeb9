"""episodes: problems through an agent of either kind, many side by side."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from ..engine.config import AgentConfig
from ..engine.memory_agent import MemoryAgent
from ..engine.reading import Reading
from .agent_function import FunctionAgent
from .trajectory import Episode, Problem

__all__ = ["Agent", "episodes"]

Agent = MemoryAgent | FunctionAgent


def episodes(
    agent: Agent, problems: Sequence[Problem], n: int, *, first_sample: int = 0, stride: int | None = None
) -> Generator[tuple[int, int, Episode], None, None]:
    """Let an agent work on each problem n times; -> (number of the problem, place in its group, episode) as they end.

    Sample indices, closing and errors: see MemoryAgent.rollouts and FunctionAgent.episodes.
    """
    if isinstance(agent, FunctionAgent):
        yield from agent.episodes(problems, n, first_sample=first_sample, stride=stride)
        return
    tasks = [(problem.document, problem.question) for problem in problems]
    with closing(agent.rollouts(tasks, n, first_sample=first_sample, stride=stride)) as readings:
        for task, place, reading in readings:
            yield task, place, _episode(reading, agent.config)


def _episode(reading: Reading, config: AgentConfig) -> Episode:
    limits = [config.memory_tokens if turn.kind == "update" else config.answer_tokens for turn in reading.turns]
    return Episode(reading.answer, reading.turns, limits)

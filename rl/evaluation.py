"""Evaluation: how well an agent answers the problems of a source that it was not trained on."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..engine.config import SamplingParams
from ..engine.errors import RequestError
from ..engine.memory_agent import MemoryAgent
from ..engine.reading import Reading
from .data import Source
from .rewards import Reward, Scorer
from .trajectory import Problem

__all__ = ["Evaluation", "Outcome", "evaluate", "outcomes"]


@dataclass(frozen=True)
class Outcome:
    """What became of a problem. index: its number in the source. reward: of the answer. reading: without its turns."""

    index: int
    reward: float
    reading: Reading


@dataclass(frozen=True)
class Evaluation:
    """outcomes: by index. seconds: for all of them."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def reward(self) -> float:
        """The mean; 0 without outcomes."""
        return math.fsum(outcome.reward for outcome in self.outcomes) / max(len(self.outcomes), 1)

    @property
    def standard_error(self) -> float:
        """Of the mean, from the spread of the rewards; infinite for fewer than two."""
        count, mean = len(self.outcomes), self.reward
        if count < 2:
            return math.inf
        return math.sqrt(math.fsum((outcome.reward - mean) ** 2 for outcome in self.outcomes) / (count - 1) / count)

    def means(self) -> dict[str, float]:
        """By name, for logs. tokens_per_second: of the documents. undecoded: share of turns that took no decode step.
        truncated: share of turns whose memory was cut at its limit."""
        counters = [outcome.reading.counters for outcome in self.outcomes]
        turns = max(sum(each.turns for each in counters), 1)
        return {
            "problems": len(self.outcomes),
            "reward": self.reward,
            "standard_error": self.standard_error,
            "seconds": self.seconds,
            "tokens_per_second": sum(each.document_tokens for each in counters) / max(self.seconds, 1e-9),
            "undecoded": sum(each.undecoded_turns for each in counters) / turns,
            "truncated": sum(each.truncated_memories for each in counters) / turns,
        }


def evaluate(
    agent: MemoryAgent,
    source: Source,
    indices: Iterable[int],
    reward: str | Reward | Scorer,
    *,
    sampling: SamplingParams | None = None,
    told: Callable[[Outcome], None] | None = None,
) -> Evaluation:
    """Read the problems with these numbers, as many side by side as the engine has places, and reward the answers.

    sampling: instead of the agent's, for instance SamplingParams(temperature=0). told: called with each outcome as soon
    as it is there. Turns are not kept, so memory does not grow with the documents. The number of a problem is its
    sample index: each is answered the same whatever others are read. Raises as MemoryAgent.read does.
    """
    started, found = time.perf_counter(), list[Outcome]()
    for outcome in outcomes(agent, source, indices, reward, sampling=sampling):
        found.append(outcome)
        if told is not None:
            told(outcome)
    found.sort(key=lambda outcome: outcome.index)
    return Evaluation(tuple(found), time.perf_counter() - started)


def outcomes(
    agent: MemoryAgent,
    source: Source,
    indices: Iterable[int],
    reward: str | Reward | Scorer,
    *,
    sampling: SamplingParams | None = None,
) -> Iterator[Outcome]:
    """See evaluate; outcomes come as their readings end."""
    numbers = sorted(indices)
    if len(set(numbers)) < len(numbers):
        raise RequestError("the problems to evaluate on must have different numbers")
    scorer = reward if isinstance(reward, Scorer) else Scorer(reward)
    config = dataclasses.replace(agent.config, sampling=sampling or agent.config.sampling, keep_turns=False)
    reader = MemoryAgent(agent.engine, config)
    for run in _runs(numbers):
        asked = dict[int, Problem]()
        tasks = _tasks(source, run, asked)
        for task, _, reading in reader.rollouts(tasks, 1, first_sample=run.start, stride=run.step):
            problem = asked.pop(run[task])
            yield Outcome(run[task], scorer(reading.answer, problem.answers, problem.extra), reading)


def _tasks(source: Source, run: range, asked: dict[int, Problem]) -> Iterator[tuple[str | Iterable[str], str]]:
    for number in run:
        problem = asked[number] = source.problem(number)
        yield problem.document, problem.question


def _runs(numbers: list[int]) -> Iterator[range]:
    """Sorted numbers as ranges. A problem's number is its sample index, so that it always draws the same."""
    while numbers:
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        length = next((i for i, number in enumerate(numbers) if number != numbers[0] + i * step), len(numbers))
        yield range(numbers[0], numbers[0] + length * step, step)
        numbers = numbers[length:]

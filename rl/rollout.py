"""Rollout: problems in, groups of rewarded trajectories out, each as soon as its last reading ends."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from ..engine.config import _require_int
from ..engine.errors import ConfigError, RequestError
from ..engine.memory_agent import MemoryAgent
from ..engine.reading import Reading
from .advantage import is_mixed, shaping
from .config import AlgorithmConfig
from .rewards import Reward, Scorer
from .trajectory import Group, Problem, Trajectory, require_policy

__all__ = ["Rollout"]


class Rollout:
    """Samples groups with a memory agent.

    samples: readings begun so far; it is the sample index of the next, so no two draw the same random numbers.
    scorer: the reward, and how often it failed. rolled: groups that ended so far, those left out included.
    """

    def __init__(self, agent: MemoryAgent, reward: str | Reward, algorithm: AlgorithmConfig) -> None:
        """reward: see Scorer. Raises ConfigError for an agent that keeps no turns, what is trained on, that samples
        with more than a temperature, or that carries KV on: the trainer would compute other log-probabilities."""
        if not agent.config.keep_turns:
            raise ConfigError("AgentConfig.keep_turns is False, but turns are what is trained on; leave it True")
        require_policy(agent.config.sampling)
        if agent.config.memory_kv == "carried":
            raise ConfigError(
                "AgentConfig.memory_kv is 'carried', which is approximate: the log-probabilities would not be those "
                "that are trained on; use memory_kv='exact'"
            )
        self.agent, self.algorithm, self.scorer = agent, algorithm, Scorer(reward)
        self.samples = self.rolled = 0

    def groups(self, problems: Iterable[Problem], wanted: int) -> Generator[Group, None, None]:
        """Roll out `wanted` problems side by side; a group comes when it is complete, while others still run.

        problems: an iterator goes on where the last call stopped, a list begins anew.

        With dynamic sampling groups whose answers are all right or all wrong are left out, and as many further problems
        are taken, max_refills times; when then there is no group at all, it warns and gives those left out. Fewer come
        when problems run out. Closing the generator ends what still rolls out.
        Raises ConfigError for `wanted` below 1, RequestError for a problem that is no Problem and as MemoryAgent.read
        does.
        """
        _require_int("Rollout.groups", "wanted", wanted, 1)
        source = iter(problems)
        if not self.algorithm.dynamic_sampling:
            yield from self._roll(list(islice(source, wanted)))
            return
        given, dull = 0, list[Group]()
        for _ in range(1 + self.algorithm.max_refills):
            chosen = list(islice(source, wanted - given))
            for group in self._roll(chosen):
                if is_mixed(_correct(group)):
                    given += 1
                    yield group
                else:
                    dull.append(group)
            if given == wanted or not chosen:
                break
        if not given and dull:
            warnings.warn(
                f"of {len(dull)} groups none has both right and wrong answers, so no reward teaches anything; "
                "if it goes on, choose easier or harder problems or a larger group_size",
                stacklevel=2,
            )
            yield from dull[:wanted]

    def state_dict(self) -> dict[str, Any]:
        """What the next groups depend on besides the weights, and the counters, as plain JSON values."""
        scorer = self.scorer
        return {
            "samples": self.samples,
            "rolled": self.rolled,
            "failures": scorer.failures,
            "first_failure": scorer.first_failure,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the rollout went on that gave this state."""
        self.samples, self.rolled = state["samples"], state["rolled"]
        self.scorer.failures, self.scorer.first_failure = state["failures"], state["first_failure"]

    def _roll(self, problems: list[Problem]) -> Iterator[Group]:
        agent, size = self.agent, self.algorithm.group_size
        for problem in problems:
            if not isinstance(problem, Problem):
                raise RequestError(f"problems are rl.trajectory.Problem, got {problem!r:.60}")
        first, self.samples = self.samples, self.samples + size * len(problems)
        done: dict[int, dict[int, Reading]] = {}
        tasks = [(problem.document, problem.question) for problem in problems]
        for task, place, reading in agent.rollouts(tasks, size, first_sample=first):
            readings = done.setdefault(task, {})
            readings[place] = reading
            if len(readings) == size:
                self.rolled += 1
                del done[task]
                yield self._group([readings[i] for i in range(size)], problems[task])

    def _group(self, readings: list[Reading], problem: Problem) -> Group:
        trajectories = [self._trajectory(reading, problem) for reading in readings]
        return Group(trajectories, self.agent.config.sampling, self.agent.engine.weights_version)

    def _trajectory(self, reading: Reading, problem: Problem) -> Trajectory:
        config = self.agent.config
        correct = self.scorer(reading.answer, problem.answers)
        memories = [len(turn.response_ids) for turn in reading.turns if turn.kind == "update"]
        answer = len(reading.turns[-1].response_ids)
        shaped = shaping(memories, config.memory_tokens, answer, config.answer_tokens, self.algorithm)
        return Trajectory(reading.turns, correct + shaped, correct)


def _correct(group: Group) -> list[float]:
    return [trajectory.correct for trajectory in group.trajectories]

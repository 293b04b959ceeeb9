"""Rollout: problems in, groups of rewarded trajectories out, each as soon as its last trajectory is there."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..engine.config import _require_int
from ..engine.errors import ConfigError, RequestError
from ..engine.memory_agent import MemoryAgent
from .advantage import is_mixed, shaping
from .agent_function import FunctionAgent
from .config import AlgorithmConfig
from .episodes import Agent, episodes
from .failures import Failures
from .rewards import Reward, Score, Scorer, wait_for_any
from .trajectory import Episode, Group, Problem, Trajectory, require_policy

__all__ = ["Rollout"]


class Rollout:
    """Samples groups with an agent.

    samples: trajectories begun so far; it is the sample index of the next, so no two draw the same random numbers.
    scorer: the reward, and how often it failed. rolled: groups that ended so far, those left out included.
    """

    def __init__(self, agent: Agent, reward: str | Reward | Scorer, algorithm: AlgorithmConfig) -> None:
        """reward: a Scorer, or what one is made of. Raises ConfigError for an agent that keeps no turns, what is
        trained on, that samples with more than a temperature, or that carries KV on: the trainer would compute other
        log-probabilities."""
        if isinstance(agent, MemoryAgent):
            _require_exact(agent)
        require_policy(agent.config.sampling)
        self.agent, self.algorithm = agent, algorithm
        self.scorer = reward if isinstance(reward, Scorer) else Scorer(reward)
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

    @property
    def failures(self) -> dict[str, int]:
        """How often the agent's and the reward's function failed, by "agent.NAME" and "reward.NAME"."""
        return {f"{whose}.{name}": count for whose, one in self._watched() for name, count in one.counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """What the next groups depend on besides the weights, and the counters, as plain JSON values."""
        failures = {whose: one.state_dict() for whose, one in self._watched()}
        return {"samples": self.samples, "rolled": self.rolled, "failures": failures}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the rollout went on that gave this state."""
        self.samples, self.rolled = state["samples"], state["rolled"]
        for whose, one in self._watched():
            one.load_state_dict(state["failures"][whose])

    def _watched(self) -> list[tuple[str, Failures]]:
        agents = [("agent", self.agent.failures)] if isinstance(self.agent, FunctionAgent) else []
        return [*agents, ("reward", self.scorer.failures)]

    def _roll(self, problems: list[Problem]) -> Iterator[Group]:
        size = self.algorithm.group_size
        for problem in problems:
            if not isinstance(problem, Problem):
                raise RequestError(f"problems are rl.trajectory.Problem, got {problem!r:.60}")
        first, self.samples = self.samples, self.samples + size * len(problems)
        open_groups = {task: _OpenGroup(problem, size, {}) for task, problem in enumerate(problems)}
        try:
            with closing(episodes(self.agent, problems, size, first_sample=first)) as arriving:
                for task, place, episode in arriving:
                    open_groups[task].members[place] = episode, self._score(episode, problems[task])
                    yield from self._closed(open_groups)
            while open_groups:
                wait_for_any([score for group in open_groups.values() for score in group.scores])
                yield from self._closed(open_groups)
        finally:
            for group in open_groups.values():
                group.cancel()

    def _score(self, episode: Episode, problem: Problem) -> Score | float:
        """Scoring goes on beside the decoding of others."""
        if isinstance(episode.result, str):
            return self.scorer.submit(episode.result, problem.answers, problem.extra)
        return 0.0 if episode.result is None else episode.result

    def _closed(self, open_groups: dict[int, _OpenGroup]) -> Iterator[Group]:
        """Take those out that are complete, with all their scores."""
        for task in [task for task, group in open_groups.items() if group.complete]:
            group = open_groups.pop(task)
            members = group.members
            trajectories = [self._trajectory(*members[place]) for place in range(len(members))]
            self.rolled += 1
            version = self.agent.engine.weights_version
            yield Group(trajectories, self.agent.config.sampling, version, problem=group.problem)

    def _trajectory(self, episode: Episode, score: Score | float) -> Trajectory:
        correct = score.value() if isinstance(score, Score) else score
        lengths = [(len(turn.response_ids), limit) for turn, limit in zip(episode.turns, episode.limits, strict=True)]
        return Trajectory(episode.turns, correct + shaping(lengths, self.algorithm), correct)


@dataclass
class _OpenGroup:
    """A group in the making. members: by place, episodes that have ended, with their scores."""

    problem: Problem
    size: int
    members: dict[int, tuple[Episode, Score | float]]

    @property
    def scores(self) -> list[Score]:
        return [score for _, score in self.members.values() if isinstance(score, Score)]

    @property
    def complete(self) -> bool:
        return len(self.members) == self.size and all(score.done for score in self.scores)

    def cancel(self) -> None:
        for score in self.scores:
            score.cancel()


def _require_exact(agent: MemoryAgent) -> None:
    if not agent.config.keep_turns:
        raise ConfigError("AgentConfig.keep_turns is False, but turns are what is trained on; leave it True")
    if agent.config.memory_kv == "carried":
        raise ConfigError(
            "AgentConfig.memory_kv is 'carried', which is approximate: the log-probabilities would not be those "
            "that are trained on; use memory_kv='exact'"
        )


def _correct(group: Group) -> list[float]:
    return [trajectory.correct for trajectory in group.trajectories]

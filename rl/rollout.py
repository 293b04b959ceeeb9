"""Rollout: problems in, groups of rewarded trajectories out, each as soon as its last trajectory is there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
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
from .process_group import ProcessGroup
from .rewards import Reward, Score, Scorer, wait_for_any
from .trajectory import Episode, Group, Problem, Trajectory, require_policy

__all__ = ["Rollout"]


class Rollout:
    """Samples groups with an agent.

    Ranks deal the problems of a round out among them, one after the other; together they draw what one alone would.
    Ranks that hold parts of one model roll out the same; the first of them scores, and tells the others when and what.

    samples: trajectories begun so far; it is the sample index of the next, so no two draw the same random numbers.
    rolled: groups of the rounds that ended so far, those left out included. Both are those of all ranks.
    correct: mean answers of the groups that this rank has rolled since `groups` was called, those left out included.
    scorer: the reward, and how often it failed on this rank.
    """

    def __init__(
        self,
        agent: Agent,
        reward: str | Reward | Scorer,
        algorithm: AlgorithmConfig,
        process_group: ProcessGroup | None = None,
        deterministic: bool = True,
    ) -> None:
        """reward: a Scorer, or what one is made of. deterministic: a group that ends early waits for those before it,
        so that gradients add up in one order, whatever is fast and what is slow.

        Raises ConfigError for an agent that keeps no turns, what is trained on, that samples with more than a
        temperature, or that carries KV on: the trainer would compute other log-probabilities.
        """
        if isinstance(agent, MemoryAgent):
            _require_exact(agent)
        require_policy(agent.config.sampling)
        self.agent, self.algorithm = agent, algorithm
        self.scorer = reward if isinstance(reward, Scorer) else Scorer(reward)
        self.deterministic = deterministic
        self._ranks = ProcessGroup() if process_group is None else process_group
        self.samples = self.rolled = 0
        self.correct: list[float] = []

    def groups(self, problems: Iterable[Problem], wanted: int) -> Generator[Group, None, None]:
        """Roll out `wanted` problems side by side; -> this rank's groups, each when it is complete, while others run.

        problems: an iterator goes on where the last call stopped, a list begins anew. The same on all ranks.

        With dynamic sampling groups whose answers are all right or all wrong are left out, and further problems are
        taken for their places, max_refills times; when then there is no group at all, it warns and gives those of the
        first round. Fewer come when problems run out. Closing the generator ends what still rolls out.
        Raises ConfigError for `wanted` below 1, RequestError for a problem that is no Problem and as MemoryAgent.read
        does, RankError when another rank has failed.
        """
        _require_int("Rollout.groups", "wanted", wanted, 1)
        source = iter(problems)
        self.correct = []
        if not self.algorithm.dynamic_sampling:
            yield from self._round(list(islice(source, wanted)), range(wanted))
            return
        places, dull, tried = list(range(wanted)), list[Group](), 0
        for refills in range(1 + self.algorithm.max_refills):
            chosen, filled = list(islice(source, len(places))), list[int | None]()
            tried += len(chosen)
            for group in self._round(chosen, places):
                if is_mixed(_correct(group)):
                    filled.append(group.place)
                    yield group
                elif not refills:
                    dull.append(group)
            taken = {place for rank in self._ranks.gather(filled) for place in rank}
            places = [place for place in places if place not in taken]
            if not places or not chosen:
                break
        if len(places) == wanted and tried:
            if self._ranks.main:
                warnings.warn(
                    f"of {tried} groups none has both right and wrong answers, so no reward teaches anything; "
                    "if it goes on, choose easier or harder problems or a larger group_size",
                    stacklevel=2,
                )
            yield from dull

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

    def _round(self, problems: list[Problem], places: Sequence[int]) -> Iterator[Group]:
        """Roll out what is this rank's of the problems that are meant for these places of the step."""
        for problem in problems:
            if not isinstance(problem, Problem):
                raise RequestError(f"problems are rl.trajectory.Problem, got {problem!r:.60}")
        size, rank = self.algorithm.group_size, self._ranks.rank
        first, self.samples = self.samples, self.samples + size * len(problems)
        own = slice(rank, len(problems), self._ranks.size)
        with closing(self._roll(problems[own], places[own], first + size * rank)) as groups:
            yield from _in_order(groups, places[own]) if self.deterministic else groups
        self.rolled += len(problems)

    def _roll(self, problems: list[Problem], places: Sequence[int], first_sample: int) -> Generator[Group, None, None]:
        """-> groups as they are complete."""
        size = self.algorithm.group_size
        stride = size * self._ranks.size
        open_groups = {task: _OpenGroup(problem, size, places[task], {}) for task, problem in enumerate(problems)}
        try:
            with closing(episodes(self.agent, problems, size, first_sample=first_sample, stride=stride)) as arriving:
                for task, number, episode in arriving:
                    open_groups[task].members[number] = episode, self._score(episode, problems[task])
                    yield from self._closed(open_groups)
            while open_groups:
                wait_for_any([score for group in open_groups.values() for score in group.scores])
                yield from self._closed(open_groups)
        finally:
            for group in open_groups.values():
                group.cancel()

    def _score(self, episode: Episode, problem: Problem) -> Score | float:
        """Scoring goes on beside the decoding of others."""
        parallel = self.agent.engine.parallel
        if parallel is not None and parallel.rank != 0:
            return 0.0  # and the first rank's score later
        if isinstance(episode.result, str):
            return self.scorer.submit(episode.result, problem.answers, problem.extra)
        return 0.0 if episode.result is None else episode.result

    def _closed(self, open_groups: dict[int, _OpenGroup]) -> Iterator[Group]:
        """Take those out that are complete, with all their scores."""
        for task, scores in self._scored(open_groups).items():
            ended = open_groups.pop(task)
            members = [ended.members[number][0] for number in range(ended.size)]
            trajectories = [self._trajectory(*pair) for pair in zip(members, scores, strict=True)]
            self.correct.append(math.fsum(scores) / ended.size)
            version = self.agent.engine.weights_version
            yield Group(trajectories, self.agent.config.sampling, version, ended.place, ended.problem)

    def _scored(self, open_groups: dict[int, _OpenGroup]) -> dict[int, list[float]]:
        """The scores of the groups that are complete, the same on all ranks that hold parts of the model."""
        ended = {task: group for task, group in open_groups.items() if len(group.members) == group.size}
        scores = {task: group.values() for task, group in ended.items() if all(score.done for score in group.scores)}
        parallel = self.agent.engine.parallel
        return scores if parallel is None or not ended else parallel.lead(scores)

    def _trajectory(self, episode: Episode, correct: float) -> Trajectory:
        lengths = [(len(turn.response_ids), limit) for turn, limit in zip(episode.turns, episode.limits, strict=True)]
        return Trajectory(episode.turns, correct + shaping(lengths, self.algorithm), correct)


@dataclass
class _OpenGroup:
    """A group in the making. place: in the step. members: by number, episodes that have ended, with their scores."""

    problem: Problem
    size: int
    place: int
    members: dict[int, tuple[Episode, Score | float]]

    @property
    def scores(self) -> list[Score]:
        return [score for _, score in self.members.values() if isinstance(score, Score)]

    def values(self) -> list[float]:
        """By number, once all scores are done."""
        scores = [self.members[number][1] for number in range(self.size)]
        return [score.value() if isinstance(score, Score) else score for score in scores]

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


def _in_order(groups: Iterator[Group], places: Sequence[int]) -> Iterator[Group]:
    """Hold back each until those of the places before it have come."""
    expected, early = iter(places), dict[int | None, Group]()
    following = next(expected, None)
    for group in groups:
        early[group.place] = group
        while following in early:
            yield early.pop(following)
            following = next(expected, None)

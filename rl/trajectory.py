"""Trajectories: what a rollout gives and a trainer takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.config import FrozenDict, SamplingParams, _frozen, _require, _tuple
from ..engine.errors import ConfigError
from ..engine.reading import Turn

__all__ = ["Episode", "Group", "Problem", "Trajectory", "require_policy"]

# Everything else in SamplingParams changes what a token is drawn from, without a trace in its log-probability.
NOT_THE_DISTRIBUTION = frozenset(
    {"temperature", "seed", "max_tokens", "stop", "stop_ids", "ignore_eos", "top_logprobs", "prompt_logprobs"}
)


@dataclass(frozen=True)
class Problem:
    """document: text, whole or as a stream of texts. answers: each of them is right, for the reward.

    id: names it in logs. extra: what else is known of it, for the reward.
    Raises ConfigError for answers that are no list or tuple of str, and an extra that is no mapping.
    """

    document: str | Iterable[str]
    question: str
    answers: tuple[str, ...]
    id: str = ""
    extra: Mapping[str, Any] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", _frozen("Problem", "extra", self.extra))
        object.__setattr__(self, "answers", _tuple("Problem", "answers", self.answers))  # a str would be its letters
        for answer in self.answers:
            _require(isinstance(answer, str), f"Problem.answers must hold str, got {answer!r}")


@dataclass(frozen=True)
class Episode:
    """What an agent made of a problem, not rewarded yet.

    result: the answer, or, from an agent that rewards itself, its reward; None when it failed, which counts 0.
    turns: by number. limits: max_tokens of each.
    """

    result: str | float | None
    turns: Sequence[Turn]
    limits: Sequence[int]


@dataclass(frozen=True)
class Trajectory:
    """All turns of one reading. correct: the raw reward. reward: that with shaping, what advantages come from."""

    turns: Sequence[Turn]
    reward: float
    correct: float


@dataclass(frozen=True)
class Group:
    """The trajectories sampled for one problem.

    sampling: how all their tokens were drawn. weights_version: of the weights that drew them.
    place: its number among those of its step, over all ranks, by which mini-batches are cut; None is the order in which
    groups come.
    problem: for logs; the trainer does not read it.
    """

    trajectories: Sequence[Trajectory]
    sampling: SamplingParams
    weights_version: int
    place: int | None = None
    problem: Problem | None = None


def require_policy(sampling: SamplingParams) -> None:
    """Raise ConfigError for sampling that draws from anything but the policy, at whatever temperature."""
    if sampling.temperature == 0:
        raise ConfigError("temperature=0 is greedy, so all readings of a group would be the same; sample to train")
    plain = SamplingParams()
    for name in sorted(vars(sampling).keys() - NOT_THE_DISTRIBUTION):
        value = getattr(sampling, name)
        if value != getattr(plain, name):
            raise ConfigError(
                f"{name}={value!r} draws from something else than the policy whose log-probabilities are known (those "
                "before filters and penalties); to train leave it off, as in "
                "AgentConfig(sampling=SamplingParams(temperature=1.0))"
            )

"""Trajectories: what a rollout gives and a trainer takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..engine.config import SamplingParams
from ..engine.reading import Turn

__all__ = ["Group", "Problem", "Trajectory"]


@dataclass(frozen=True)
class Problem:
    """document: text, whole or as a stream of texts. answers: what is right, for the reward."""

    document: str | Iterable[str]
    question: str
    answers: tuple[str, ...]


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
    """

    trajectories: Sequence[Trajectory]
    sampling: SamplingParams
    weights_version: int

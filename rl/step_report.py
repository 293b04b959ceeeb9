"""StepReport: what a step of training did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .trajectory import Group

__all__ = ["GroupCounts", "StepReport"]


@dataclass(frozen=True)
class GroupCounts:
    """What a report says of the group at a place of the step, as sums."""

    place: int
    reward: float
    correct: float
    trajectories: int
    turns: int
    tokens: int
    truncated: int

    @classmethod
    def of(cls, group: Group, place: int) -> GroupCounts:
        """Those of one group."""
        trajectories = group.trajectories
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        return cls(
            place=place,
            reward=math.fsum(trajectory.reward for trajectory in trajectories),
            correct=math.fsum(trajectory.correct for trajectory in trajectories),
            trajectories=len(trajectories),
            turns=len(turns),
            tokens=sum(len(turn.response_ids) for turn in turns),
            truncated=sum(turn.finish_reason == "length" for turn in turns),
        )


@dataclass
class StepReport:
    """What a step did.

    reward, correct: means over its trajectories, with and without shaping. truncated: share of turns cut at a limit.
    first: LossStatistics.means of the first mini-batch, whose policy is still the rollout's: largest_difference is the
    mismatch. all: those of the whole step. updates: made; gradient_norms, learning_rates: of each mini-batch.
    recomputed: log-probabilities of the old policy that were computed again.
    seconds: of "rollout", "loss" (forward and backward), "update"; of several ranks each is the longest, and there is
    "wait", for the others.
    """

    step: int
    groups: int = 0
    trajectories: int = 0
    turns: int = 0
    tokens: int = 0
    reward: float = 0.0
    correct: float = 0.0
    truncated: float = 0.0
    updates: int = 0
    gradient_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    all: dict[str, float] = field(default_factory=dict)
    recomputed: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"rollout": 0.0, "loss": 0.0, "update": 0.0})

    def count(self, counts: Sequence[GroupCounts]) -> None:
        """Fill in what the groups come to."""
        self.groups = len(counts)
        self.trajectories = sum(count.trajectories for count in counts)
        self.turns = sum(count.turns for count in counts)
        self.tokens = sum(count.tokens for count in counts)
        self.reward = math.fsum(count.reward for count in counts) / max(self.trajectories, 1)
        self.correct = math.fsum(count.correct for count in counts) / max(self.trajectories, 1)
        self.truncated = sum(count.truncated for count in counts) / max(self.turns, 1)

    def __str__(self) -> str:
        norm = max(self.gradient_norms, default=0.0)
        return (
            f"step {self.step}: reward {self.reward:.3f}, correct {self.correct:.3f}, gradient norm {norm:.3g}, "
            f"mismatch {self.first.get('largest_difference', 0.0):.3g}, truncated {self.truncated:.0%}, "
            + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        )

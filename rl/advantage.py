"""From rewards to advantages: overlong shaping, group baselines, and which groups are worth training on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..engine.errors import RequestError
from .config import AlgorithmConfig

__all__ = ["advantages", "is_mixed", "overlong_penalty", "shaping"]

STD_EPSILON = 1e-6
SAME = 1e-6  # correctness within this is equal


def advantages(rewards: Sequence[float], config: AlgorithmConfig) -> list[float]:
    """One advantage for each trajectory of a group: of all tokens of all its turns.

    R - mean(R) (MemAgent, arXiv 2507.02259), or R - the mean of the others (RLOO, arXiv 2402.14740); with divide_by_std
    / (std(R) + 1e-6). A group of equal rewards, or of one, has advantages 0.
    Raises RequestError for a reward that is not finite.
    """
    for i, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise RequestError(f"reward {i} of a group is {reward}; a reward function must return finite numbers")
    count = len(rewards)
    if count < 2 or max(rewards) == min(rewards):
        return [0.0] * count  # exactly, so that their rows can be skipped
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    scale = count / (count - 1) if config.baseline == "leave_one_out" else 1.0
    if config.divide_by_std:
        std = math.sqrt(math.fsum(c * c for c in centred) / (count - 1))
        scale /= std + STD_EPSILON
    return [c * scale for c in centred]


def is_mixed(correct: Sequence[float]) -> bool:
    """Whether a group has something to learn from: its raw correctness (no shaping in it) is not all the same.

    The filter of dynamic sampling (DAPO, arXiv 2503.14476).
    """
    return bool(correct) and max(correct) - min(correct) > SAME


def overlong_penalty(tokens: int, limit: int, share: float) -> float:
    """0 for a response well within its limit, falling linearly to -1 at it over the last `share` of the limit.

    Soft overlong punishment (DAPO, arXiv 2503.14476). tokens: of the response. share: 0 is off.
    """
    buffer = share * limit
    excess = tokens - (limit - buffer)
    return -min(excess / buffer, 1.0) if buffer > 0 and excess > 0 else 0.0


def shaping(lengths: Sequence[tuple[int, int]], config: AlgorithmConfig) -> float:
    """What overlong responses take off a trajectory's reward: a number from -2 to 0.

    lengths: tokens and limit of each turn, the last of which is the answer, the others memories.
    """
    if not lengths:
        return 0.0
    penalties = [overlong_penalty(tokens, limit, config.overlong_memory) for tokens, limit in lengths[:-1]] or [0.0]
    of_memories = min(penalties) if config.overlong_reduction == "max" else math.fsum(penalties) / len(penalties)
    return of_memories + overlong_penalty(*lengths[-1], config.overlong_answer)

"""Advantages, shaping and which groups teach, by hand."""

from __future__ import annotations

import math
import statistics

import pytest
from palimpsest.engine.errors import RequestError
from palimpsest.rl.advantage import advantages, is_mixed, overlong_penalty, shaping
from palimpsest.rl.config import AlgorithmConfig

REWARDS = [1.0, 0.0, 0.0, 0.5, 1.0]


def test_advantages() -> None:
    assert advantages(REWARDS, AlgorithmConfig()) == pytest.approx([0.5, -0.5, -0.5, 0.0, 0.5])
    std = statistics.stdev(REWARDS) + 1e-6
    expected = [value / std for value in (0.5, -0.5, -0.5, 0.0, 0.5)]
    assert advantages(REWARDS, AlgorithmConfig(divide_by_std=True)) == pytest.approx(expected, rel=1e-12)
    others = [reward - (sum(REWARDS) - reward) / 4 for reward in REWARDS]
    assert advantages(REWARDS, AlgorithmConfig(baseline="leave_one_out")) == pytest.approx(others, rel=1e-12)


@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 3, [1.0] * 16])
def test_equal_rewards_teach_exactly_nothing(rewards: list[float]) -> None:
    for config in (AlgorithmConfig(), AlgorithmConfig(divide_by_std=True, baseline="leave_one_out")):
        assert advantages(rewards, config) == [0.0] * len(rewards)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_rewards_must_be_finite(wrong: float) -> None:
    with pytest.raises(RequestError, match=f"reward 1 of a group is {wrong}"):
        advantages([0.0, wrong], AlgorithmConfig())


def test_dynamic_sampling_looks_at_raw_correctness() -> None:
    """Shaped rewards would differ in an all-wrong group; correctness does not."""
    assert is_mixed([0.0, 1.0]) and not is_mixed([0.0, 0.0]) and not is_mixed([1.0, 1.0 - 1e-9]) and not is_mixed([])


def test_overlong_penalty() -> None:
    """DAPO's own numbers: 20480 tokens, the last 4096 of which are punished."""
    share = 4096 / 20480
    expected = {0: 0.0, 16384: 0.0, 18432: -0.5, 20480: -1.0, 30000: -1.0}
    assert {n: overlong_penalty(n, 20480, share) for n in expected} == pytest.approx(expected)
    assert overlong_penalty(100, 100, 0.0) == 0.0


def test_shaping() -> None:
    config = AlgorithmConfig(overlong_memory=0.5, overlong_answer=0.25)
    assert shaping([(50, 100), (75, 100), (100, 100), (10, 10)], config) == pytest.approx(-(0 + 0.5 + 1) / 3 - 1)
    assert shaping([(5, 10)], config) == 0.0 == shaping([], config)
    worst = AlgorithmConfig(overlong_memory=0.5, overlong_reduction="max")
    assert shaping([(50, 100), (75, 100), (60, 100), (10, 10)], worst) == pytest.approx(-0.5)

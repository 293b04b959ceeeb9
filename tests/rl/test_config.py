"""AlgorithmConfig: presets and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from palimpsest.engine.errors import ConfigError
from palimpsest.rl.config import PRESETS, AlgorithmConfig


def test_the_default_is_the_published_run() -> None:
    config = AlgorithmConfig.preset("memagent")
    assert config == AlgorithmConfig() == AlgorithmConfig.from_mapping({})
    assert (config.clip_low, config.clip_high, config.dual_clip, config.kl, config.entropy) == (0.2, 0.2, 3.0, 1e-3, 0)
    assert (config.group_size, config.divide_by_std, config.dynamic_sampling) == (16, False, False)
    assert (config.weighting, config.overlong_memory, config.overlong_answer) == ("token", 0, 0)


def test_a_preset_with_changes() -> None:
    config = AlgorithmConfig.from_mapping({"clip_high": 0.3, "preset": "dapo"})
    assert (config.clip_low, config.clip_high, config.divide_by_std, config.dynamic_sampling) == (0.2, 0.3, True, True)
    assert len({AlgorithmConfig.preset(name) for name in PRESETS}) == len(PRESETS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_hi": 0.3}, "no key 'clip_hi'; did you mean 'clip_high'"),
        ({"preset": "ppo"}, "preset must be one of memagent, dapo, grpo, dr_grpo, gspo, cispo, got 'ppo'"),
        ({"weighting": "sample"}, "weighting must be one of token, trajectory, turn, constant"),
        ({"clip_low": 1.5}, r"clip_low must be a number in \[0.0, 1.0\], got 1.5"),
        ({"kl": float("nan")}, "kl must be a number"),
        ({"kl": "0.1"}, "kl must be a number"),
        ({"group_size": 1}, "group_size must be a whole number of at least 2"),
        ({"divide_by_std": 1}, "divide_by_std must be True or False"),
        ({"dual_clip": 1.0}, "dual_clip must be a number in"),
        ({"surrogate": "cispo"}, r"dual_clip \(3.0\) bounds the surrogate 'clip'; with 'cispo' set it to None"),
        ({"correction_low": 0.5}, "correction_low .* with 'none' leave it 0"),
        ({"correction": "truncate", "correction_low": 0.5}, "correction_low .* with 'truncate' leave it 0"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig.from_mapping(values)

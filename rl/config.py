"""AlgorithmConfig: what is optimised. Frozen, validated where it is made, unknown keys refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.config import (
    _require,
    _require_bool,
    _require_choice,
    _require_int,
    _require_number,
    from_mapping,
)

__all__ = ["PRESETS", "AlgorithmConfig"]

BASELINES = ("mean", "leave_one_out")
SURROGATES = ("clip", "cispo")
RATIOS = ("token", "turn")
WEIGHTINGS = ("token", "trajectory", "turn", "constant")
CORRECTIONS = ("none", "truncate", "mask")
LEVELS = ("token", "turn")
REDUCTIONS = ("mean", "max")

# The published MemAgent run (arXiv 2507.02259 and its code) is the default of every field. Named deviation: its token
# mean is taken over the whole mini-batch; the published code takes one per rank.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "memagent": {},
    # DAPO (arXiv 2503.14476). Its overlong punishment, of all responses, becomes one of memories and answers.
    "dapo": {
        "divide_by_std": True,
        "clip_high": 0.28,
        "dual_clip": None,
        "kl": 0.0,
        "dynamic_sampling": True,
        "overlong_memory": 0.2,
        "overlong_answer": 0.2,
    },
    # GRPO (arXiv 2402.03300).
    "grpo": {"divide_by_std": True, "dual_clip": None, "kl": 0.04, "weighting": "trajectory"},
    # Dr. GRPO (arXiv 2503.20783).
    "dr_grpo": {"dual_clip": None, "kl": 0.0, "weighting": "constant"},
    # GSPO (arXiv 2507.18071). A sequence is a turn: turns are independent contexts.
    "gspo": {
        "divide_by_std": True,
        "ratio": "turn",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "kl": 0.0,
        "weighting": "turn",
    },
    # CISPO (arXiv 2506.13585): no lower bound; ratios above 5 are cut (arXiv 2510.13786).
    "cispo": {
        "divide_by_std": True,
        "surrogate": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "dual_clip": None,
        "kl": 0.0,
    },
}


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective of training. Defaults: the published MemAgent run (arXiv 2507.02259).

    group_size: trajectories sampled for each problem.
    baseline: what is taken off a reward: "mean" of its group, or of the others in it ("leave_one_out").
    divide_by_std: advantages are divided by the group's standard deviation (of a sample, N - 1).
    surrogate: "clip" is PPO's clipped objective (arXiv 1707.06347, eq. 7), "cispo" the REINFORCE objective weighted by
    the clipped ratio, which has no gradient (arXiv 2506.13585).
    ratio: of new to old probability, of each "token", or of a "turn", the geometric mean of its tokens' (GSPO).
    clip_low, clip_high: a ratio counts within [1 - clip_low, 1 + clip_high].
    dual_clip: with a negative advantage the loss is at most this many times |advantage| (arXiv 1912.09729); None
    is off.
    kl: coefficient of the KL divergence from the reference policy, in the loss; 0 needs no reference.
    entropy: coefficient of the entropy, a bonus.
    weighting: what counts 1 in the mean: each "token" of the mini-batch, each "trajectory" (the mean over its tokens),
    or each "turn" (the mean over its tokens); "constant": the sum over a trajectory's tokens / length_constant.
    length_constant: see weighting; tokens.
    correction: of rollouts whose probabilities are not the old policy's: each token's loss is multiplied by the ratio
    of the two, "truncate"d at correction_high, or set to 0 ("mask") outside of [correction_low, correction_high].
    correction_level: that ratio, of each "token" or of the whole "turn" (the product over its tokens).
    dynamic_sampling: groups whose answers are all right or all wrong are replaced by new ones.
    max_refills: most rounds of new groups for one step.
    overlong_memory, overlong_answer: in the last part of its limit, this share of it, a response of growing length is
    punished up to -1 (DAPO, arXiv 2503.14476); 0 is off.
    overlong_reduction: the "mean" over a trajectory's memories, or the worst ("max").
    mask_truncated: turns that reached their limit are not trained on.
    """

    group_size: int = 16
    baseline: str = "mean"
    divide_by_std: bool = False
    surrogate: str = "clip"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    kl: float = 0.001
    entropy: float = 0.0
    weighting: str = "token"
    length_constant: int = 1024
    correction: str = "none"
    correction_level: str = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0
    dynamic_sampling: bool = False
    max_refills: int = 10
    overlong_memory: float = 0.0
    overlong_answer: float = 0.0
    overlong_reduction: str = "mean"
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        owner = "AlgorithmConfig"
        choices = {
            "baseline": BASELINES,
            "surrogate": SURROGATES,
            "ratio": RATIOS,
            "weighting": WEIGHTINGS,
            "correction": CORRECTIONS,
            "correction_level": LEVELS,
            "overlong_reduction": REDUCTIONS,
        }
        for name, allowed in choices.items():
            _require_choice(owner, name, getattr(self, name), allowed)
        _require_int(owner, "group_size", self.group_size, 2)
        _require_int(owner, "length_constant", self.length_constant, 1)
        _require_int(owner, "max_refills", self.max_refills, 0)
        for name in ("divide_by_std", "dynamic_sampling", "mask_truncated"):
            _require_bool(owner, name, getattr(self, name))
        for name, high in (("clip_low", 1.0), ("clip_high", 100.0), ("kl", 100.0), ("entropy", 100.0)):
            _require_number(owner, name, getattr(self, name), 0.0, high)
        for name in ("overlong_memory", "overlong_answer"):
            _require_number(owner, name, getattr(self, name), 0.0, 1.0)
        if self.dual_clip is not None:
            _require_number(owner, "dual_clip", self.dual_clip, 1.0, 1000.0, open_low=True)
            _require(
                self.surrogate == "clip",
                f"{owner}.dual_clip ({self.dual_clip}) bounds the surrogate 'clip'; with 'cispo' set it to None",
            )
        _require_number(owner, "correction_high", self.correction_high, 1.0, 1e6)
        _require_number(owner, "correction_low", self.correction_low, 0.0, 1.0)
        _require(
            self.correction == "mask" or self.correction_low == 0,
            f"{owner}.correction_low ({self.correction_low}) is a bound of correction='mask' alone; with "
            f"{self.correction!r} leave it 0",
        )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> AlgorithmConfig:
        """A preset of PRESETS with some fields changed. Raises ConfigError for unknown names and values."""
        return cls.from_mapping({"preset": name, **overrides})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> AlgorithmConfig:
        """From parsed JSON or YAML: fields, and under "preset" what the others default to ("memagent").

        Raises ConfigError for unknown keys, presets and values.
        """
        fields = dict(values)
        name = fields.pop("preset", "memagent")
        _require_choice(cls.__name__, "preset", name, tuple(PRESETS))
        return from_mapping(cls, {**PRESETS[name], **fields})

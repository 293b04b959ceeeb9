"""TrainerConfig: how a trainer works through what the rollout gives. Frozen and validated where it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.config import _require, _require_bool, _require_choice, _require_int
from ..engine.lora import LoraConfig
from .config import AlgorithmConfig
from .optimizer import OptimizerConfig

__all__ = ["TrainerConfig"]

REFERENCES = ("auto", "none", "copy", "lora_off")


@dataclass(frozen=True)
class TrainerConfig:
    """algorithm, optimizer: what is optimised, and how.

    mini_batch: groups per update; None makes one update of all groups of a step.
    train_tokens: most rows of one training forward pass, at least a longest turn.
    recompute: keep only the inputs of the layers for the backward pass and run each layer again there.
    share_prefixes: compute what turns of a group have in common once, forward and backward.
    lora: put these adapters onto the model and train them alone; None trains all parameters, or the adapters alone if
    the model has some.
    reference: the policy of the KL divergence: a frozen "copy" of the weights, the model with "lora_off", or "none".
    "auto" is "none" without a KL coefficient, else "lora_off" with adapters and "copy" without.
    """

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mini_batch: int | None = None
    train_tokens: int = 16384
    recompute: bool = True
    share_prefixes: bool = True
    lora: LoraConfig | None = None
    reference: str = "auto"

    def __post_init__(self) -> None:
        owner = "TrainerConfig"
        for name, kind in (("algorithm", AlgorithmConfig), ("optimizer", OptimizerConfig)):
            value = getattr(self, name)
            _require(isinstance(value, kind), f"{owner}.{name} must be {kind.__name__}, got {value!r}")
        ok = self.lora is None or isinstance(self.lora, LoraConfig)
        _require(ok, f"{owner}.lora must be LoraConfig or None, got {self.lora!r}")
        if self.mini_batch is not None:
            _require_int(owner, "mini_batch", self.mini_batch, 1)
        _require_int(owner, "train_tokens", self.train_tokens, 1)
        for name in ("recompute", "share_prefixes"):
            _require_bool(owner, name, getattr(self, name))
        _require_choice(owner, "reference", self.reference, REFERENCES)
        _require(
            self.reference != "none" or not self.algorithm.kl,
            f"{owner}.reference is 'none', but AlgorithmConfig.kl is {self.algorithm.kl}; set kl=0 or name one",
        )

    def reference_kind(self, adapters: bool) -> str:
        """What "auto" means for a model with or without adapters."""
        if self.reference != "auto":
            return self.reference
        if not self.algorithm.kl:
            return "none"
        return "lora_off" if adapters else "copy"

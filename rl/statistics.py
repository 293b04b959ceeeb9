"""LossStatistics: what a loss saw, as sums that add up over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LossStatistics"]


@dataclass(frozen=True)
class LossStatistics:
    """On the CPU. sums: float64 [len(NAMES)], each over the trained tokens. largest: float64 [], of the differences.

    tokens: how many. ratio: of new to old probability. clipped_low, clipped_high, dual_clipped: tokens whose loss a
    bound changed. corrected: tokens whose importance weight was cut or set to 0. entropy: nats; 0 when not given.
    reference_kl: k3 against the reference policy; 0 without one. difference: |new - rollout's log-probability|.
    mismatch_kl: k3 of these two. The last two are exactly 0 in the first update of a batch.
    """

    sums: Tensor
    largest: Tensor

    NAMES = (
        "tokens",
        "ratio",
        "clipped_low",
        "clipped_high",
        "dual_clipped",
        "corrected",
        "entropy",
        "reference_kl",
        "difference",
        "mismatch_kl",
    )

    @classmethod
    def of(cls, difference: Tensor, **values: Tensor) -> LossStatistics:
        """From the tokens' own values, each [T]; `difference` with its sign. Names left out count 0."""
        values["tokens"] = torch.ones_like(difference)
        values["difference"] = difference.abs()
        values["mismatch_kl"] = difference.exp() - difference - 1
        zero = difference.new_zeros(1)
        sums = torch.stack([values.get(name, zero).sum(dtype=torch.float64) for name in cls.NAMES])
        largest = values["difference"].max() if len(difference) else zero[0]
        return cls(sums.cpu(), largest.double().cpu())

    @classmethod
    def nothing(cls) -> LossStatistics:
        """Those of no tokens."""
        return cls(torch.zeros(len(cls.NAMES), dtype=torch.float64), torch.zeros((), dtype=torch.float64))

    def __add__(self, other: LossStatistics) -> LossStatistics:
        return LossStatistics(self.sums + other.sums, torch.maximum(self.largest, other.largest))

    def means(self) -> dict[str, float]:
        """By name, for logs: "tokens" counts, "largest_difference" is the largest, the others are means over tokens."""
        values = dict(zip(self.NAMES, self.sums.tolist(), strict=True))
        tokens = values.pop("tokens")
        means = {name: value / tokens if tokens else 0.0 for name, value in values.items()}
        return {"tokens": tokens, "largest_difference": float(self.largest), **means}

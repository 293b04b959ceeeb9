"""The objective, in plain torch and any float type: from log-probabilities of tokens to one number to minimise.

Everything is a sum over tokens divided by a denominator that is given, so the parts of a mini-batch (micro-batches,
groups, ranks) add up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .config import AlgorithmConfig
from .statistics import LossStatistics

__all__ = ["TokenRows", "needs_whole_turns", "policy_loss", "token_weights"]

LARGEST_LOG_RATIO = 20.0  # exponentials beyond it would overflow, or decide everything alone (verl's bound)
LARGEST_TURN_LOG_RATIO = 10.0  # the same for the ratio of a turn (verl's bound)
LARGEST_KL = 10.0  # of a token, in the loss (the published code's bound)


@dataclass(frozen=True)
class TokenRows:
    """What is known of T response tokens of whole turns before the forward pass. Tensors [T], floats but for `turns`.

    advantages: of each token's trajectory. weights: see token_weights; 0 leaves a token out, and none of its other
    values counts. turns: int64, which turn a token belongs to; a turn's tokens lie together.
    old_logprobs: of the policy that the ratio is taken against, as a rule the rollout's own; None is the policy itself
    as it is now (its ratio is 1 and has a gradient).
    rollout_logprobs: of the policy that drew the tokens, where that is not the old one; a correction needs them.
    reference_logprobs: of the reference policy; a KL coefficient needs them.
    """

    advantages: Tensor
    weights: Tensor
    turns: Tensor
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    def __getitem__(self, which: slice | Tensor) -> TokenRows:
        """Some of the rows: a slice, or a mask."""
        values = (getattr(self, field.name) for field in fields(self))
        return TokenRows(*(None if value is None else value[which] for value in values))  # type: ignore[arg-type]


def token_weights(
    tokens: Sequence[int], trajectories: Sequence[int], config: AlgorithmConfig
) -> tuple[list[float], float]:
    """The weight of each turn's tokens in the loss, and the denominator that makes a mean of the weighted sum.

    tokens: trained tokens of each turn, 0 for one that is empty or masked; such turns count nowhere.
    trajectories: which one each turn belongs to. All turns of a trajectory must be there; denominators of disjoint sets
    of trajectories add up.
    """
    totals: dict[int, int] = {}
    for count, trajectory in zip(tokens, trajectories, strict=True):
        totals[trajectory] = totals.get(trajectory, 0) + count
    trained = sum(total > 0 for total in totals.values())
    if config.weighting == "token":
        return [1.0] * len(tokens), float(sum(tokens))
    if config.weighting == "constant":
        return [1.0 / config.length_constant] * len(tokens), float(len(totals))
    if config.weighting == "turn":
        return [1.0 / max(count, 1) for count in tokens], float(sum(count > 0 for count in tokens))
    return [1.0 / max(totals[trajectory], 1) for trajectory in trajectories], float(trained)


def needs_whole_turns(config: AlgorithmConfig) -> bool:
    """Whether a token's loss depends on the log-probabilities of the other tokens of its turn."""
    return config.ratio == "turn" or (config.correction != "none" and config.correction_level == "turn")


def policy_loss(
    logprobs: Tensor,
    rows: TokenRows,
    config: AlgorithmConfig,
    *,
    entropies: Tensor | None = None,
    denominator: float = 1.0,
) -> tuple[Tensor, LossStatistics]:
    """Sum over tokens of weight * (surrogate + kl * k3 - entropy * H), over `denominator`; -> [], to be minimised.

    logprobs: [T], of the policy as it is now, with gradient. entropies: [T], needed for an entropy coefficient.
    k3 = e^d - d - 1 with d = reference - now (Schulman, Approximating KL Divergence, 2020), at most 10 a token.
    Raises ValueError when the rows lack what the configuration needs.
    """
    kept = rows.weights != 0
    if not bool(kept.all()):
        rows, logprobs = rows[kept], logprobs[kept]
        entropies = None if entropies is None else entropies[kept]
    now = logprobs.detach()
    old = now if rows.old_logprobs is None else rows.old_logprobs
    ratio = _ratio(logprobs, old, rows.turns, config)
    losses, seen = _surrogate(logprobs, ratio, rows.advantages, config)
    if config.correction != "none":
        weights, seen["corrected"] = _correction(old, rows, config)
        losses = losses * weights
    if rows.reference_logprobs is not None:
        divergence = _k3(rows.reference_logprobs - logprobs)
        losses = losses + config.kl * divergence
        seen["reference_kl"] = divergence.detach()
    elif config.kl:
        raise ValueError("a KL coefficient needs reference_logprobs")
    if entropies is not None:
        losses = losses - config.entropy * entropies if config.entropy else losses
        seen["entropy"] = entropies.detach()
    elif config.entropy:
        raise ValueError("an entropy coefficient needs entropies")
    drawn_by = old if rows.rollout_logprobs is None else rows.rollout_logprobs
    statistics = LossStatistics.of(now - drawn_by, ratio=ratio.detach(), **seen)
    return (rows.weights * losses).sum() / denominator, statistics


def _ratio(logprobs: Tensor, old: Tensor, turns: Tensor, config: AlgorithmConfig) -> Tensor:
    """Of new to old probability, [T].

    Of a turn: s = the geometric mean of its tokens' ratios (GSPO, arXiv 2507.18071, eq. 7); each
    token carries its own part of the gradient, s * d logprob.
    """
    log_ratio = logprobs - old
    if config.ratio == "token":
        return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    mean = _by_turn(log_ratio.detach(), turns, mean=True)
    return (mean + (logprobs - logprobs.detach())).clamp(max=LARGEST_TURN_LOG_RATIO).exp()


def _surrogate(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's part of the loss, [T], and which tokens' loss a bound changed."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    if config.surrogate == "cispo":
        seen = {"clipped_low": ratio.detach() < low, "clipped_high": ratio.detach() > high}
        return -ratio.detach().clamp(low, high) * advantages * logprobs, seen
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    seen = {"clipped_low": (ratio < low) & (advantages < 0), "clipped_high": (ratio > high) & (advantages > 0)}
    if config.dual_clip is not None:
        most = -config.dual_clip * advantages
        seen["dual_clipped"] = (advantages < 0) & (losses.detach() > most)
        losses = torch.where(advantages < 0, torch.minimum(losses, most), losses)
    return losses, seen


def _correction(old: Tensor, rows: TokenRows, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Importance weights of rollouts that another policy drew, [T], and which of them were cut or set to 0.

    "truncate" is known as TIS, "mask" as MIS or IcePop.
    """
    if rows.rollout_logprobs is None:
        raise ValueError("an importance correction needs rollout_logprobs")
    log_weights = old - rows.rollout_logprobs
    if config.correction_level == "turn":
        log_weights = _by_turn(log_weights, rows.turns, mean=False)
    weights = log_weights.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    outside = (weights > config.correction_high) | (weights < config.correction_low)
    if config.correction == "mask":
        return torch.where(outside, torch.zeros_like(weights), weights), outside
    return weights.clamp(max=config.correction_high), outside


def _k3(difference: Tensor) -> Tensor:
    bounded = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (bounded.exp() - bounded - 1).clamp(max=LARGEST_KL)


def _by_turn(values: Tensor, turns: Tensor, *, mean: bool) -> Tensor:
    """[T] -> [T]: for each token the sum or mean over its turn."""
    _, turn, counts = torch.unique_consecutive(turns, return_inverse=True, return_counts=True)
    totals = values.new_zeros(len(counts)).index_add_(0, turn, values)
    return (totals / counts if mean else totals)[turn]

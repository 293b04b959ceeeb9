"""The policy loss and its gradient once more, token by token in plain Python: what rl/loss.py is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence

from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.loss import TokenRows


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def policy_loss_by_hand(
    now: Sequence[float], entropies: Sequence[float], rows: TokenRows, config: AlgorithmConfig, denominator: float
) -> tuple[float, list[float], list[float]]:
    """-> the loss, and its derivatives by log-probability and by entropy."""
    weights, advantages, turns = rows.weights.tolist(), rows.advantages.tolist(), rows.turns.tolist()
    old = list(now) if rows.old_logprobs is None else rows.old_logprobs.tolist()
    tokens = [t for t in range(len(now)) if weights[t] != 0]
    loss, by_logprob, by_entropy = 0.0, [0.0] * len(now), [0.0] * len(now)
    for t in tokens:
        turn = [s for s in tokens if turns[s] == turns[t]]
        a = advantages[t]
        if config.ratio == "token":
            log_ratio, bounded = now[t] - old[t], abs(now[t] - old[t]) > 20
        else:
            log_ratio, bounded = sum(now[s] - old[s] for s in turn) / len(turn), False
            log_ratio, bounded = min(log_ratio, 10.0), log_ratio > 10
        ratio = math.exp(clamp(log_ratio, -20, 20))
        low, high = 1 - config.clip_low, 1 + config.clip_high
        if config.surrogate == "cispo":
            value, slope = -clamp(ratio, low, high) * a * now[t], -clamp(ratio, low, high) * a
        else:
            value, slope = -a * ratio, 0.0 if bounded else -a * ratio
            if (a > 0 and ratio > high) or (a < 0 and ratio < low):
                value, slope = -a * clamp(ratio, low, high), 0.0
            if a < 0 and config.dual_clip is not None and ratio > config.dual_clip:
                value, slope = -a * config.dual_clip, 0.0
        if config.correction != "none":
            assert rows.rollout_logprobs is not None
            drawn = rows.rollout_logprobs.tolist()
            which = [t] if config.correction_level == "token" else turn
            weight = math.exp(clamp(sum(old[s] - drawn[s] for s in which), -20, 20))
            if config.correction == "truncate":
                weight = min(weight, config.correction_high)
            elif not config.correction_low <= weight <= config.correction_high:
                weight = 0.0
            value, slope = value * weight, slope * weight
        if config.kl:
            assert rows.reference_logprobs is not None
            difference = rows.reference_logprobs.tolist()[t] - now[t]
            k3 = math.exp(clamp(difference, -20, 20)) - clamp(difference, -20, 20) - 1
            value += config.kl * min(k3, 10.0)
            slope += config.kl * (1 - math.exp(difference)) if k3 < 10 else 0.0
        value -= config.entropy * entropies[t]
        loss += weights[t] * value / denominator
        by_logprob[t] = weights[t] * slope / denominator
        by_entropy[t] = -weights[t] * config.entropy / denominator
    return loss, by_logprob, by_entropy

"""The policy loss: against a hand-written one, against published formulas, and its sums over parts."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from palimpsest.rl.config import PRESETS, AlgorithmConfig
from palimpsest.rl.loss import TokenRows, needs_whole_turns, policy_loss, token_weights
from palimpsest.rl.statistics import LossStatistics
from palimpsest.tests.rl.by_hand import policy_loss_by_hand
from torch import Tensor

TURNS = (5, 1, 9, 2, 14, 1, 8)  # tokens of each
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no dual clip": {"dual_clip": None},
    "reference and entropy": {"kl": 0.3, "entropy": 0.05},
    "truncated tokens": {"correction": "truncate", "correction_high": 1.5},
    "masked tokens": {"correction": "mask", "correction_low": 0.5, "correction_high": 1.5},
    "truncated turns": {"correction": "truncate", "correction_level": "turn", "correction_high": 3.0},
    "masked turns": {"correction": "mask", "correction_level": "turn", "correction_low": 0.1},
}


def make_rows(spread: float = 0.4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, TokenRows]:
    """Log-probabilities as they are now, entropies, and rows some of which lie beyond every bound."""
    torch.manual_seed(3)
    count = sum(TURNS)
    now = -torch.rand(count, dtype=dtype) * 5
    old, drawn, reference = (now + spread * torch.randn(count, dtype=dtype) for _ in range(3))
    old[:3] += torch.tensor([25.0, -25.0, -2.0])  # overflow, and beyond the dual clip
    reference[3:5] += torch.tensor([30.0, -30.0])
    turns = torch.arange(len(TURNS)).repeat_interleave(torch.tensor(TURNS))
    advantages = torch.tensor([-1.5, 0.7, 0.0, 1.2, -0.4, 0.9, -0.8], dtype=dtype)[turns]
    weights = torch.rand(count, dtype=dtype) + 0.1
    weights[[6, 7, 16, 40 - 1]] = 0.0
    return now, torch.rand(count, dtype=dtype) * 3, TokenRows(advantages, weights, turns, old, drawn, reference)


def gradients(
    now: Tensor, entropies: Tensor, rows: TokenRows, config: AlgorithmConfig, denominator: float = 17.0
) -> tuple[Tensor, Tensor, Tensor]:
    leaves = now.clone().requires_grad_(), entropies.clone().requires_grad_()
    loss, _ = policy_loss(leaves[0], rows, config, entropies=leaves[1], denominator=denominator)
    return loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_against_the_loss_by_hand(preset: str, option: str) -> None:
    config = AlgorithmConfig.preset(preset, **OPTIONS[option])
    for spread in (0.0003, 0.4):  # about the bounds of GSPO, and of the others
        now, entropies, rows = make_rows(spread)
        for given in (rows, replace(rows, old_logprobs=None)):
            expected = policy_loss_by_hand(now.tolist(), entropies.tolist(), given, config, 17.0)
            for ours, exact in zip(gradients(now, entropies, given, config), expected, strict=True):
                torch.testing.assert_close(ours, torch.tensor(exact, dtype=torch.float64), rtol=1e-10, atol=1e-12)


# Two samples of one turn each, 3 and 2 tokens; what is expected was computed from the published formulas.
NOW, OLD = [-1.0, -0.5, -2.0, -0.7, -1.1], [-1.2, -0.6, -1.5, -0.7, -1.6]
REFERENCE, ADVANTAGES = [-1.1, -0.5, -1.9, -0.4, -1.3], [1.0, 1.0, 1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        # verl: token-mean, dual clip 3, 0.001 * low_var_kl; and its DAPO recipe's loss
        ("memagent", {}, -0.0525803418383),
        ("dapo", {}, -0.0568766130497),
        # TRL: loss types grpo, dr_grpo, the sequence ratio of GSPO, and cispo (its bound is 1 + clip_high)
        ("grpo", {}, 0.1776493392243),
        ("dr_grpo", {"length_constant": 4}, -0.0328725383860),
        ("gspo", {"clip_low": 0.03, "clip_high": 0.04}, 0.1742592158281),
        ("cispo", {"clip_high": 0.5}, 0.1274099073247),
    ],
)
def test_published_formulas(preset: str, overrides: dict[str, Any], expected: float) -> None:
    config = AlgorithmConfig.preset(preset, **overrides)
    weights, denominator = token_weights([3, 2], [0, 1], config)
    now, old, reference, advantages = (torch.tensor(x, dtype=torch.float64) for x in (NOW, OLD, REFERENCE, ADVANTAGES))
    rows = TokenRows(
        advantages=advantages,
        weights=torch.tensor([weights[0]] * 3 + [weights[1]] * 2, dtype=torch.float64),
        turns=torch.tensor([0, 0, 0, 1, 1]),
        old_logprobs=old,
        reference_logprobs=reference,
    )
    loss, _ = policy_loss(now, rows, config, denominator=denominator)
    assert float(loss) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_masked_changes_nothing(preset: str) -> None:
    config = AlgorithmConfig.preset(preset, kl=0.1, entropy=0.1, correction="truncate")
    now, entropies, rows = make_rows(dtype=torch.float32)
    masked = rows.weights == 0
    spoilt = [x.masked_fill(masked, math.nan) for x in (now, entropies)]
    values = {field.name: getattr(rows, field.name) for field in fields(rows)}
    for name in values.keys() - {"weights", "turns"}:
        values[name] = values[name].masked_fill(masked, math.nan)
    results = gradients(now, entropies, rows, config), gradients(*spoilt, TokenRows(**values), config)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    _, seen = policy_loss(spoilt[0], TokenRows(**values), config, entropies=spoilt[1])
    assert seen.means()["tokens"] == int((~masked).sum()) and all(map(math.isfinite, seen.means().values()))


@pytest.mark.parametrize("preset", PRESETS)
def test_parts_add_up_in_any_order(preset: str) -> None:
    """Turns one by one and backwards, as micro-batches or ranks may have them."""
    config = AlgorithmConfig.preset(preset, kl=0.1, correction="mask", correction_level="turn")
    now, entropies, rows = make_rows()
    whole, seen = policy_loss(now, rows, config, entropies=entropies, denominator=9.0)
    total, added = torch.zeros((), dtype=torch.float64), LossStatistics.nothing()
    for turn in reversed(range(len(TURNS))):
        which = rows.turns == turn
        loss, part = policy_loss(now[which], rows[which], config, entropies=entropies[which], denominator=9.0)
        total, added = total + loss, added + part
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    assert added.means() == pytest.approx(seen.means(), rel=1e-12)
    nothing = rows.turns < 0
    loss, part = policy_loss(now[nothing], rows[nothing], config, entropies=entropies[nothing])
    assert loss == 0 and part.means() == LossStatistics.nothing().means()


def test_on_policy_nothing_differs() -> None:
    now, _, rows = make_rows(dtype=torch.float32)
    for preset in PRESETS:
        config = AlgorithmConfig.preset(preset, kl=0.0)
        _, seen = policy_loss(now, TokenRows(rows.advantages, rows.weights, rows.turns, now), config)
        means = seen.means()
        assert means.pop("tokens") == int((rows.weights != 0).sum())
        assert means.pop("ratio") == 1.0
        assert set(means.values()) == {0.0}


def test_statistics() -> None:
    new, old = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.1]), torch.zeros(5)
    rows = TokenRows(torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0]), torch.ones(5), torch.arange(5), old, old + 0.1, new)
    _, seen = policy_loss(new, rows, AlgorithmConfig(), entropies=torch.full((5,), 2.0))
    ratios = new.exp()
    assert seen.means() == pytest.approx(
        {
            "tokens": 5,
            "ratio": float(ratios.mean()),
            "clipped_low": 0.2,
            "clipped_high": 0.2,
            "dual_clipped": 0.2,
            "corrected": 0.0,
            "entropy": 2.0,
            "reference_kl": 0.0,
            "difference": (0.1 + 0.9 + 1.1 + 1.9 + 0.0) / 5,
            "largest_difference": 1.9,
            "mismatch_kl": float(((new - 0.1).exp() - (new - 0.1) - 1).mean()),
        },
        rel=1e-5,
        abs=1e-6,
    )


def test_token_weights() -> None:
    """Two trajectories; the first has an empty turn, the second ends in a masked one."""
    turns = [3, 0, 5, 2, 0], [7, 7, 4, 4, 4]

    def weights(name: str) -> tuple[list[float], float]:
        return token_weights(*turns, AlgorithmConfig(weighting=name, length_constant=50))

    assert weights("token") == ([1.0] * 5, 10.0)
    assert weights("trajectory") == ([1 / 3, 1 / 3, 1 / 7, 1 / 7, 1 / 7], 2.0)
    assert weights("turn") == ([1 / 3, 1.0, 1 / 5, 1 / 2, 1.0], 3.0)
    assert weights("constant") == ([1 / 50] * 5, 2.0)
    for name in ("trajectory", "turn"):  # what has no token counts nowhere
        assert token_weights([0, 0], [1, 2], AlgorithmConfig(weighting=name))[1] == 0.0


def test_what_the_configuration_needs_must_be_there() -> None:
    now, _, rows = make_rows()
    bare = TokenRows(rows.advantages, rows.weights, rows.turns, rows.old_logprobs)
    for config, missing in (
        (AlgorithmConfig(), "reference_logprobs"),
        (AlgorithmConfig(kl=0.0, entropy=0.1), "entropies"),
        (AlgorithmConfig(kl=0.0, correction="mask"), "rollout_logprobs"),
    ):
        with pytest.raises(ValueError, match=missing):
            policy_loss(now, bare, config)


def test_which_objectives_need_whole_turns() -> None:
    corrected = {"correction": "mask", "correction_level": "turn"}
    assert [name for name in PRESETS if needs_whole_turns(AlgorithmConfig.preset(name))] == ["gspo"]
    assert needs_whole_turns(AlgorithmConfig(**corrected))
    assert not needs_whole_turns(AlgorithmConfig(correction="mask"))

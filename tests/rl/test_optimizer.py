"""Optimizer: schedules by their numbers, division and clipping of sums, masters."""

from __future__ import annotations

import math

import pytest
import torch
from palimpsest.engine.errors import CheckpointError, ConfigError
from palimpsest.rl.optimizer import Optimizer, OptimizerConfig
from torch import nn


def named(parameters: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    return {f"w{place}": parameter for place, parameter in enumerate(parameters)}


def test_schedules() -> None:
    constant = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [constant.rate(step) for step in (0, 1, 3, 4, 999)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2, total_steps=12)
    assert [linear.rate(step) for step in (1, 2, 7, 12, 20)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    cosine = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=0, total_steps=8)
    assert [cosine.rate(step) for step in (0, 2, 4, 8)] == pytest.approx([1, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0])


def test_updates_follow_the_schedule() -> None:
    """With one and the same gradient Adam moves each number by the learning rate."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    config = OptimizerConfig(0.1, warmup_steps=2, schedule="linear", total_steps=4, weight_decay=0.0, clip=None)
    optimizer, moved = Optimizer({"w": parameter}, config), []
    for _ in range(5):
        before = parameter.item()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(1.0)
        moved.append(before - parameter.item())
    assert moved == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.0], rel=1e-6)


def test_sums_are_divided_then_clipped() -> None:
    sums = [torch.tensor([30.0, 0.0]), torch.tensor([40.0])]
    for clip, expected in ((None, 5.0), (1.0, 1.0)):
        parameters = [nn.Parameter(torch.zeros_like(x)) for x in sums]
        optimizer = Optimizer(
            named(parameters), OptimizerConfig(1.0, clip=clip, warmup_steps=0, epsilon=1.0, weight_decay=0)
        )
        for parameter, grad in zip(parameters, sums, strict=True):
            parameter.grad = grad.clone()
        assert optimizer.step(10.0) == (5.0, 1.0)
        for parameter, grad in zip(parameters, sums, strict=True):
            scaled = grad / 50 * expected  # Adam's first step: lr * g / (|g| + epsilon)
            torch.testing.assert_close(parameter.detach(), -scaled / (scaled.abs() + 1.0))
            assert parameter.grad is None


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Optimizer({"w": parameter}, OptimizerConfig(1.0, warmup_steps=0))
    parameter.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(optimizer.step(1.0)[0])
    assert parameter.tolist() == [1.0, 1.0] and parameter.grad is None and optimizer.updates == 0


def test_masters_add_up_what_bfloat16_cannot() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": parameter}, OptimizerConfig(1e-3, warmup_steps=0, weight_decay=0.0))
    for _ in range(10):
        for part in (1.0, 1e-3, 1e-3):  # in bfloat16 the small parts of the sum would be lost
            (parameter * part).sum().backward()  # type: ignore[no-untyped-call]
        assert parameter.grad is not None and parameter.grad.item() == pytest.approx(1.002, abs=1e-5)
        optimizer.step(1.0)
    assert parameter.item() == pytest.approx(0.99, abs=4e-3) and parameter.dtype == torch.bfloat16


def test_its_state_goes_on_in_another_one() -> None:
    """Ten updates are five and five more, in bfloat16 with masters; a parameter without gradients has no moments."""
    config = OptimizerConfig(1e-2, schedule="cosine", warmup_steps=2, total_steps=12)

    def fresh() -> tuple[list[nn.Parameter], Optimizer]:
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(5, 3, generator=generator) for _ in range(3)]
        parameters = [nn.Parameter(drawn[0].bfloat16()), nn.Parameter(drawn[1]), nn.Parameter(drawn[2])]
        return parameters, Optimizer(named(parameters), config)

    def update(parameters: list[nn.Parameter], optimizer: Optimizer, steps: range) -> list[tuple[float, float]]:
        told = []
        for step in steps:
            for parameter in parameters[:2]:
                parameter.grad = torch.full_like(parameter, math.sin(step), dtype=parameter.grad_dtype)
            told.append(optimizer.step(3.0))
        return told

    parameters, optimizer = fresh()
    update(parameters, optimizer, range(5))
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    again, resumed = fresh()
    with torch.no_grad():
        for new, old in zip(again, parameters, strict=True):
            new.copy_(old)
    resumed.load_state_dict(state)
    assert update(again, resumed, range(5, 10)) == update(parameters, optimizer, range(5, 10))
    assert all(torch.equal(new, old) for new, old in zip(again, parameters, strict=True))
    assert not any(name.startswith("2.") for name in state) and not torch.equal(again[0].float(), state["0.master"])
    with pytest.raises(CheckpointError, match="no master of parameter 0"):
        resumed.load_state_dict({name: tensor for name, tensor in state.items() if "master" not in name})
    with pytest.raises(CheckpointError, match=r"exp_avg \(2, 3\) of parameter 1"):
        resumed.load_state_dict(state | {"1.exp_avg": torch.zeros(2, 3)})


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("schedule", {"schedule": "step"}),
        ("total_steps", {"schedule": "cosine"}),
        ("total_steps", {"total_steps": 5}),
        ("betas", {"betas": (0.9,)}),
        ("betas", {"betas": (1, 1)}),
        ("clip", {"clip": 0.0}),
    ],
)
def test_what_makes_no_sense_is_refused(field: str, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=field):
        OptimizerConfig(**wrong)  # type: ignore[arg-type]

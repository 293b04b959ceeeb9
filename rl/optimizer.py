"""Optimizer: AdamW over a model's own parameters, in place, with clipping, a schedule, and float32 masters of bfloat16.

Gradients are sums until `step` divides them, so the parts of a mini-batch may come in any number of backward passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engine.config import _require, _require_bool, _require_choice, _require_int, _require_number, _tuple
from ..engine.errors import CheckpointError
from ..engine.parallel import TensorParallel
from .process_group import ProcessGroup

__all__ = ["Optimizer", "OptimizerConfig"]

SCHEDULES = ("constant", "linear", "cosine")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # torch's names


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101); the defaults are those of MemAgent's published run.

    learning_rate: at the end of the warm-up. betas, epsilon, weight_decay: of AdamW, for all parameters.
    clip: largest norm of the whole gradient; None is off. schedule: "constant", or "linear" or "cosine" down to 0 at
    total_steps. warmup_steps: updates in which the learning rate rises linearly, reaching its value at the last.
    total_steps: updates, warm-up included; only for a schedule that ends.
    master_weights: bfloat16 parameters are rounded copies of float32 ones, whose moments are float32 too. Without, an
    update smaller than a parameter's last bit is lost.
    """

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip: float | None = 1.0
    schedule: str = "constant"
    warmup_steps: int = 20
    total_steps: int | None = None
    master_weights: bool = True

    def __post_init__(self) -> None:
        owner = "OptimizerConfig"
        _require_number(owner, "learning_rate", self.learning_rate, 0.0, 1.0)
        object.__setattr__(self, "betas", _tuple(owner, "betas", self.betas))
        _require(len(self.betas) == 2, f"{owner}.betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            _require_number(owner, "betas", beta, 0.0, 1.0 - 1e-9)
        _require_number(owner, "epsilon", self.epsilon, 0.0, 1.0, open_low=True)
        _require_number(owner, "weight_decay", self.weight_decay, 0.0, 10.0)
        if self.clip is not None:
            _require_number(owner, "clip", self.clip, 0.0, 1e9, open_low=True)
        _require_choice(owner, "schedule", self.schedule, SCHEDULES)
        _require_int(owner, "warmup_steps", self.warmup_steps, 0)
        _require_bool(owner, "master_weights", self.master_weights)
        if self.schedule == "constant":
            _require(
                self.total_steps is None, f"{owner}.total_steps ({self.total_steps}) is only for a schedule that ends"
            )
        else:
            _require_int(owner, "total_steps", self.total_steps, self.warmup_steps + 1)

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.learning_rate
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return self.learning_rate * (
            1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        )


class Optimizer:
    """Holds the moments, and the master weights where there are any; the parameters stay where they are.

    Of several ranks each holds those of some parameters, whole ones (ZeRO stage 1, arXiv 1910.02054): it is given their
    gradients, updates them, and gives them to the others. So the state of a run fits any number of ranks.

    updates: how many were made.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        process_group: ProcessGroup | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        """parameters: those to train, the same on all ranks; they must want gradients. parallel: where they are parts
        of larger ones."""
        self.config = config
        self._named, self._parallel = dict(parameters), parallel
        self.updates = 0
        self._ranks = ProcessGroup() if process_group is None else process_group
        self._parameters = list(parameters.values())
        for parameter in self._parameters:
            if self._has_master(parameter):
                parameter.grad_dtype = torch.float32  # sums over many backward passes would lose their small parts
        self._owners = _owners([parameter.numel() for parameter in self._parameters], self._ranks.size)
        self._masters: dict[int, Tensor] = {  # by the place of the parameter
            place: parameter.detach().float() if self._has_master(parameter) else parameter
            for place, parameter in enumerate(self._parameters)
            if self._owners[place] == self._ranks.rank
        }
        own = [{"params": list(self._masters.values())}]  # a rank may have none
        self._adam = torch.optim.AdamW(
            own, config.learning_rate, config.betas, config.epsilon, config.weight_decay, fused=True
        )

    def _has_master(self, parameter: nn.Parameter) -> bool:
        return self.config.master_weights and parameter.dtype == torch.bfloat16

    @torch.no_grad()
    def step(self, denominator: float) -> tuple[float, float]:
        """Divide the gradients, clip them, update, forget them; -> (norm before clipping, learning rate).

        A norm that is not finite updates nothing.
        """
        if self._parallel is None:
            return self._step(denominator)
        with self._parallel.together("update", repr((denominator, self.updates)).encode()):
            self._parallel.sum_gradients(self._named)
            return self._step(denominator)

    def _step(self, denominator: float) -> tuple[float, float]:
        config, rate = self.config, self.config.rate(self.updates)
        self._sum_gradients()
        norm = math.hypot(*self._ranks.gather(self._norm())) / denominator
        if math.isfinite(norm):
            shrink = 1.0 if config.clip is None else min(config.clip / norm, 1.0) if norm > 0 else 1.0
            for place, master in self._masters.items():
                grad = self._parameters[place].grad
                if grad is not None:
                    grad *= shrink / denominator
                    master.grad = grad.to(master.dtype)
            self._adam.param_groups[0]["lr"] = rate
            self._adam.step()
            for place, master in self._masters.items():
                if master is not self._parameters[place]:
                    self._parameters[place].copy_(master)
            for owner, places in enumerate(self._places()):
                self._ranks.broadcast([self._parameters[place] for place in places], owner)
            self.updates += 1
        self.forget()
        return norm, rate

    def _places(self) -> list[list[int]]:
        """Of each rank's parameters."""
        return [[p for p, owner in enumerate(self._owners) if owner == rank] for rank in range(self._ranks.size)]

    def _sum_gradients(self) -> None:
        """Over all ranks, each parameter's on its owner; a rank that has none adds 0."""
        if self._ranks.size == 1:
            return
        has = self._ranks.gather([parameter.grad is not None for parameter in self._parameters])
        for owner, places in enumerate(self._places()):
            used = [self._parameters[place] for place in places if any(rank[place] for rank in has)]
            grads = [self._zeros(parameter) if parameter.grad is None else parameter.grad for parameter in used]
            self._ranks.reduce(grads, owner)
            for parameter, grad in zip(used, grads, strict=True):
                parameter.grad = grad if owner == self._ranks.rank else None

    def _norm(self) -> float:
        """Of the gradients of this rank's own parameters."""
        grads = [parameter.grad if p in self._masters else None for p, parameter in enumerate(self._parameters)]
        if self._parallel is not None:
            return self._parallel.norm(list(self._named), grads)
        return float(nn.utils.get_total_norm([grad for grad in grads if grad is not None]))

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        return torch.zeros_like(parameter, dtype=torch.float32 if self._has_master(parameter) else None)

    def forget(self) -> None:
        """Drop what gradients there are."""
        for tensor in (*self._parameters, *self._masters.values()):
            tensor.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """What the next updates depend on besides the parameters: their count, and by the place of each parameter its
        moments and its master, of those that this rank holds. The tensors are the optimizer's own."""
        state = {"updates": torch.tensor(self.updates, dtype=torch.float64)}
        for place, master in self._masters.items():
            state |= {f"{place}.{name}": self._adam.state[master][name] for name in MOMENTS if self._adam.state[master]}
            if master is not self._parameters[place]:
                state[f"{place}.master"] = master
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on as the optimizer went on that gave this state, or those that gave it together on several ranks; tensors
        are copied one at a time.

        Raises CheckpointError when it is that of other parameters.
        """
        for place, master in self._masters.items():
            parameter = self._parameters[place]
            moments = {name: state[f"{place}.{name}"].clone() for name in MOMENTS if f"{place}.{name}" in state}
            copied = dict(moments)
            if master is not parameter:
                if f"{place}.master" not in state:
                    raise CheckpointError(
                        f"the optimizer's state has no master of parameter {place}; resume with the same "
                        "OptimizerConfig.master_weights and the same dtype"
                    )
                copied["master"] = state[f"{place}.master"]
            for name, tensor in copied.items():
                if name != "step" and tensor.shape != master.shape:
                    raise CheckpointError(
                        f"the optimizer's state has {name} {tuple(tensor.shape)} of parameter {place}, which is "
                        f"{tuple(master.shape)}; resume with the same model and the same adapters"
                    )
            self._adam.state[master] = moments
            if master is not parameter:
                master.copy_(copied["master"])
        self.updates = int(state["updates"])


def _owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that holds each of the parameters: the largest first, each to the rank that has least."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners

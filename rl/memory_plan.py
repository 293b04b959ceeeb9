"""MemoryPlan: what training takes, part by part, before the KV pool gets the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..engine import kv_rows
from ..engine.config import EngineConfig
from ..engine.errors import ConfigError
from ..engine.memory import available_bytes
from ..engine.model_config import ModelConfig, parameter_shapes
from ..engine.ops import on_gpu
from ..engine.runner import page_bytes
from .fused_loss import ROWS
from .trainer_config import TrainerConfig

__all__ = ["MemoryPlan", "plan_memory"]

SLACK = 0.95  # of the memory is planned; allocators and libraries take the rest


@dataclass(frozen=True)
class MemoryPlan:
    """parts: bytes by name, the KV pool last. available: bytes for all of them. engine_config: with that pool."""

    parts: Mapping[str, int]
    available: int
    engine_config: EngineConfig

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        lines = [f"  {name:<16}{size / 2**20:>12,.0f} MiB" for name, size in self.parts.items()]
        total = f"  {'total':<16}{self.total / 2**20:>12,.0f} of {self.available / 2**20:,.0f} MiB"
        return "\n".join(["memory plan", *lines, total])


def plan_memory(
    model: ModelConfig,
    engine: EngineConfig,
    config: TrainerConfig,
    available: int | None = None,
    adapters: int = 0,
    ranks: int = 1,
    graphs: int = 0,
) -> MemoryPlan:
    """Plan a training run; make the Engine with the plan's engine_config.

    engine: its kv_bytes is the size of the KV pool; None gives the pool what is left, at most max_sequences full
    windows. available: bytes for everything; None is what is free now, before the model is loaded. adapters: numbers
    in adapters that the model has already. ranks: that share the optimizer's state; the plan is that of one. graphs:
    bytes of the engine's CUDA graphs.
    Raises ConfigError with all numbers when it does not fit, or leaves the pool no window.
    """
    if available is None:
        device = torch.device("cuda" if on_gpu(engine.backend) and torch.cuda.is_available() else "cpu")
        available = int(SLACK * available_bytes(device))
    parts = _parts(model, engine, config, adapters, ranks)
    if graphs:
        parts["CUDA graphs"] = graphs
    kv_dtype = kv_rows.element_type(engine.kv_dtype or ("float64" if engine.dtype == "float64" else "float32"))
    page = page_bytes(model, engine.page_size, kv_dtype)
    window = -(-(engine.max_context or model.max_position) // engine.page_size) * page
    left = available - sum(parts.values())
    pool = engine.kv_bytes or min(engine.max_sequences * window, left)
    parts["KV pool"] = max(pool, 0)
    plan = MemoryPlan(parts, available, dataclasses.replace(engine, kv_bytes=max(pool, 1)))
    if plan.total > available or (engine.kv_bytes is None and pool < window):
        raise ConfigError(
            f"{plan}\nis more than there is; a KV pool for one window of the model takes {window / 2**20:,.0f} MiB. "
            "Lower train_tokens, max_context or kv_bytes, train adapters (lora), set kl=0, or use bfloat16"
        )
    return plan


def _parts(
    model: ModelConfig, engine: EngineConfig, config: TrainerConfig, adapters: int, ranks: int
) -> dict[str, int]:
    shapes = parameter_shapes(model)
    item = getattr(torch, engine.dtype).itemsize
    wide = 8 if engine.dtype == "float64" else 4  # bytes of an activation, and of what is summed up
    weights = sum(map(math.prod, shapes.values()))
    adapters += _adapter_elements(shapes, config)
    trained = adapters or weights
    has_masters = engine.dtype == "bfloat16" and not adapters and config.optimizer.master_weights
    summed = wide if adapters or has_masters else item
    copied = config.reference_kind(bool(adapters)) == "copy"
    return {
        "weights": weights * item + adapters * wide,
        "reference": weights * item * copied,
        "gradients": trained * summed + max(map(math.prod, shapes.values())) * wide,  # and one on its way
        "master weights": -(-trained // ranks) * wide * has_masters,
        "moments": 2 * -(-trained // ranks) * summed,
        "activations": config.train_tokens * _row_elements(model, config.recompute) * wide,
        "head tile": 2 * ROWS * model.vocab_size * wide,
    }


def _adapter_elements(shapes: Mapping[str, tuple[int, ...]], config: TrainerConfig) -> int:
    if config.lora is None:
        return 0
    chosen = (shape for name, shape in shapes.items() if name.split(".")[-2] in config.lora.targets and len(shape) == 2)
    return sum(config.lora.rank * sum(shape) for shape in chosen)


def _row_elements(model: ModelConfig, recompute: bool) -> int:
    """Numbers that one row of a training pass keeps: what the layers' backward reads, and as much again in gradients
    for the layer at work; and the rows before the head, with theirs."""
    hidden, query = model.hidden_size, model.num_heads * model.head_dim
    kv = model.num_kv_heads * model.head_dim
    layer = 7 * hidden + 5 * query + 5 * kv + 3 * model.intermediate_size
    kept = model.num_layers * (hidden if recompute else layer)
    return kept + 2 * layer + 4 * hidden

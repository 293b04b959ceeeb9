"""Shards: which part of which parameter each rank of a tensor-parallel model holds. Names and sizes only.

A rank has the rows of the query, key, value, gate and up projections that make its own heads and inner units, and the
columns of the output and down projections that read them (Megatron-LM, arXiv 1909.08053, section 3). Embedding, norms
and LM head are whole on every rank. With fewer key heads than ranks, neighbouring ranks hold the same key head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ConfigError
from .model_config import ModelConfig

__all__ = ["Shards"]

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
KEY_HEADS = ("k_proj", "v_proj")
INSIDE = (".self_attn.", ".mlp.")


@dataclass(frozen=True)
class Shards:
    """The parts of a model over `size` ranks. config: of the whole model."""

    config: ModelConfig
    size: int

    def __post_init__(self) -> None:
        """Raises ConfigError for a model that cannot be split evenly, with the numbers of ranks that can."""
        config, size = self.config, self.size
        if config.output_bias or config.mlp_bias:
            raise ConfigError(
                "this model has biases on its output or MLP projections, which tensor parallelism does not split; "
                "run it on 1 rank"
            )
        if not _splits(config, size):
            fitting = [n for n in range(1, config.num_heads + 1) if _splits(config, n)]
            raise ConfigError(
                f"{config.num_heads} query heads, {config.num_kv_heads} key heads and {config.intermediate_size} inner "
                f"units cannot be split evenly over {size} ranks; use {' or '.join(map(str, fitting))}"
            )

    @property
    def local(self) -> ModelConfig:
        """The shape of what one rank holds."""
        config = self.config
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(config.num_kv_heads // self.size, 1),
            intermediate_size=config.intermediate_size // self.size,
        )

    def copies(self, name: str) -> int:
        """How many ranks, one after the other, hold the same part of a parameter or adapter: all of one not split."""
        if _axis(name) is None:
            return self.size
        return max(self.size // self.config.num_kv_heads, 1) if name.split(".")[-2] in KEY_HEADS else 1

    def has_partial_gradient(self, name: str) -> bool:
        """Whether the gradient of what several ranks hold is the sum of theirs, as each uses it for its own heads or
        inner units alone."""
        return self.copies(name) > 1 and any(part in name for part in INSIDE)

    def cut(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """The part of a parameter that a rank holds, in memory of its own unless it is all of it."""
        axis, copies = _axis(name), self.copies(name)
        if axis is None:
            return whole
        parts = self.size // copies
        return whole.chunk(parts, dim=axis)[rank // copies].clone(memory_format=torch.contiguous_format)

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """A whole parameter of the parts of all ranks, in their order."""
        axis, copies = _axis(name), self.copies(name)
        return parts[0] if axis is None else torch.cat(list(parts[::copies]), dim=axis)


def _splits(config: ModelConfig, size: int) -> bool:
    keys_fit = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    return config.num_heads % size == 0 and keys_fit and config.intermediate_size % size == 0


def _axis(name: str) -> int | None:
    """Along which axis a parameter is split; None is not."""
    layer, kind = name.split(".")[-2:]
    if layer in BY_ROWS:
        return None if kind == "lora_A" else 0
    if layer in BY_COLUMNS:
        return None if kind in ("lora_B", "bias") else 1
    return None

"""Shards: parameters are cut and joined, and what cannot be split is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from palimpsest.engine.config import EngineConfig
from palimpsest.engine.errors import ConfigError
from palimpsest.engine.loaded_model import LoadedModel
from palimpsest.engine.model_config import ModelConfig, parameter_shapes
from palimpsest.engine.shards import Shards

CONFIG = ModelConfig(
    "qwen2", 32, 24, 48, 2, 12, 2, 4, 1e-6, 1e4, None, 64, False, True, False, False, qk_norm=False
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4, 6, 12])
def test_parts_have_the_shapes_of_a_narrower_model_and_join_again(size: int) -> None:
    shards = Shards(CONFIG, size)
    narrow, generator = parameter_shapes(shards.local), torch.Generator().manual_seed(0)
    for name, shape in parameter_shapes(CONFIG).items():
        whole = torch.empty(shape).normal_(generator=generator)
        parts = [shards.cut(name, whole, rank) for rank in range(size)]
        assert all(tuple(part.shape) == narrow[name] and part.is_contiguous() for part in parts), name
        assert torch.equal(shards.join(name, parts), whole), name
        copies = shards.copies(name)
        assert all(torch.equal(part, parts[i // copies * copies]) for i, part in enumerate(parts)), name
        assert sum(part.numel() for part in parts[::copies]) == whole.numel(), name


def test_query_heads_stay_with_their_key_head() -> None:
    """Head h reads key head h // 6: of four ranks the first two have the first one."""
    shards = Shards(CONFIG, 4)
    key = torch.arange(2).repeat_interleave(4)[:, None].expand(8, 24).float()
    query = torch.arange(12).repeat_interleave(4)[:, None].expand(48, 24).float()
    for rank in range(4):
        heads = shards.cut("model.layers.0.self_attn.q_proj.weight", query, rank)[::4, 0]
        [head] = shards.cut("model.layers.0.self_attn.k_proj.weight", key, rank)[::4, 0]
        assert (heads // 6 == head).all()


def test_rounded_weights_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    for weights in ("int8", "int4", "fp8"):
        config = EngineConfig(backend="reference", weights=weights)
        with pytest.raises(
            ConfigError, match=f"weights='{weights}' cannot be split over 2 ranks; use weights='native'"
        ):
            LoadedModel.load("no file is opened", config, object())  # type: ignore[arg-type]


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"12 query heads, 2 key .* 48 inner .* 3 ranks; use 1 or 2 or 4"):
        Shards(CONFIG, 3)
    with pytest.raises(ConfigError, match="50 inner units"):
        Shards(dataclasses.replace(CONFIG, intermediate_size=50), 4)
    with pytest.raises(ConfigError, match="biases"):
        Shards(dataclasses.replace(CONFIG, output_bias=True), 2)

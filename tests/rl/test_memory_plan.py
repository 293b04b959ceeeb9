"""The memory plan: every part counted, the pool gets the rest, and what does not fit is refused with its numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from palimpsest.engine import checkpoint
from palimpsest.engine.config import EngineConfig
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError
from palimpsest.engine.lora import LoraConfig
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.memory_plan import plan_memory
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.tests.tiny_models import make_model_folder

MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama")


def test_the_parts(folder: Path) -> None:
    loaded = checkpoint.load(folder, torch.float32)
    numbers = sum(p.numel() for p in loaded.parameters.values())
    engine, config = EngineConfig(max_context=1024, max_sequences=2), TrainerConfig(train_tokens=512)
    plan = plan_memory(loaded.config, engine, config, 64 * MIB)
    assert plan.parts["weights"] == plan.parts["reference"] == 4 * numbers == plan.parts["moments"] // 2
    assert list(plan.parts)[-1] == "KV pool" and plan.engine_config.kv_bytes == 2 * 1024 * 2 * 2 * 2 * 8 * 4
    assert Engine(folder, plan.engine_config).scheduler.pool.num_pages == 2 * 64
    assert plan_memory(loaded.config, engine, config, 64 * MIB, graphs=MIB).total == plan.total + MIB
    half = dataclasses.replace(engine, dtype="bfloat16")
    no_kl = dataclasses.replace(config, algorithm=AlgorithmConfig(kl=0.0))
    parts = plan_memory(loaded.config, half, no_kl, 64 * MIB).parts
    assert (parts["weights"], parts["reference"], parts["master weights"]) == (2 * numbers, 0, 4 * numbers)
    bare = dataclasses.replace(no_kl, optimizer=OptimizerConfig(master_weights=False))
    parts = plan_memory(loaded.config, half, bare, 64 * MIB).parts
    assert (parts["master weights"], parts["moments"]) == (0, 4 * numbers)
    adapters = dataclasses.replace(config, lora=LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    parts = plan_memory(loaded.config, engine, adapters, 64 * MIB).parts
    each = 2 * ((48 + 48) + (96 + 48))
    assert (parts["moments"], parts["reference"]) == (2 * 4 * 2 * each, 0)
    assert parts["weights"] == 4 * (numbers + 2 * each)
    kept = plan_memory(loaded.config, engine, dataclasses.replace(config, recompute=False), 64 * MIB).parts
    assert kept["activations"] > plan.parts["activations"]


def test_what_does_not_fit_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = checkpoint.load(folder, torch.float32).config
    engine, config = EngineConfig(max_context=1024), TrainerConfig(train_tokens=512)
    with pytest.raises(ConfigError, match=r"(?s)activations.*KV pool.*is more than there is"):
        plan_memory(model, engine, config, 4 * MIB)
    with pytest.raises(ConfigError, match="is more than there is"):
        plan_memory(model, dataclasses.replace(engine, kv_bytes=64 * MIB), config, 64 * MIB)
    small = Engine(folder, dataclasses.replace(engine, kv_bytes=MIB))
    with pytest.raises(ConfigError, match="Lower train_tokens"):
        Trainer(small, TrainerConfig(train_tokens=10**9))
    assert all(not p.requires_grad for p in small.model.parameters())
    Trainer(small, config)
    assert "head tile" in capsys.readouterr().err

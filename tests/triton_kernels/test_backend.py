"""The Triton backend end to end: a tiny model draws the ids that plain torch draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from palimpsest import ConfigError, Engine, EngineConfig, SamplingParams
from palimpsest.tests.tiny_models import make_model_folder


def test_the_ids_are_those_of_plain_torch(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen3")
    prompts = [list(range(3, 40)), [5, 9]]
    params = [SamplingParams(temperature=t, max_tokens=3, ignore_eos=True) for t in (0.0, 1.0)]
    results = []
    for backend in ("triton", "reference"):
        engine = Engine(folder, EngineConfig(backend=backend, kv_bytes=2**20, max_step_tokens=64))
        assert engine.model.ops.backend == backend
        results.append(engine.generate(prompts, params))
    for ours, plain in zip(*results, strict=True):
        assert ours.token_ids == plain.token_ids
        assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen2")
    with pytest.raises(ConfigError, match="weights='int8' yet"):
        Engine(folder, EngineConfig(backend="triton", weights="int8"))
    with pytest.raises(ConfigError, match="float64"):
        Engine(folder, EngineConfig(backend="triton", dtype="float64"))
    engine = Engine(folder, EngineConfig(backend="triton", kv_bytes=2**20))
    engine.model.requires_grad_(True)
    with pytest.raises(Exception, match="can't train yet"), torch.enable_grad():
        engine.model.logits(torch.randn(1, engine.model.config.hidden_size, device=engine.model.ops.device))

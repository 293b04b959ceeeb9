"""The Triton backend end to end: a tiny model draws the ids that plain torch draws."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from palimpsest import AgentConfig, ConfigError, Engine, EngineConfig, MemoryAgent, SamplingParams
from palimpsest.engine import triton_ops
from palimpsest.engine.acceptance import Acceptance
from palimpsest.engine.draft import Drafter
from palimpsest.engine.ops import select
from palimpsest.rl.trajectory import Trajectory
from palimpsest.tests.rl.test_trainer import (
    DOCUMENTS,
    SAMPLED,
    any_gradient,
    assert_close,
    config_of,
    make_engine,
    roll,
)
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
    with pytest.raises(ConfigError, match="attention='cuda' cannot run here"):
        Engine(folder, EngineConfig(backend="triton", attention="cuda"))


@pytest.mark.parametrize(
    ("failure", "capability", "reason"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), (9, 0), "finds none: Torch not compiled with CUDA"),
        (
            RuntimeError("The NVIDIA driver on your system is too old\nmore"),
            (9, 0),
            "driver on your system is too old;",
        ),
        (None, (7, 5), r"compute capability 8.0 \(Ampere\) or later, and Old has 7.5"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None, capability: tuple[int, int], reason: str
) -> None:
    def init() -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr(triton_ops, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old")
    with pytest.raises(ConfigError, match=reason):
        select("triton", torch.float32, torch.float32, 64, 1)


def test_out_of_memory_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has more to say")

    engine = make_engine(make_model_folder(tmp_path, "qwen2"), backend="triton")
    monkeypatch.setattr(engine.runner, "run_layers", full)
    said = (
        r"a step of 3 tokens asked for 20.00 MiB more and does not fit: .* GiB of cpu are free; lower .*max_step_tokens"
    )
    with pytest.raises(ConfigError, match=said):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))


def test_drafts_change_nothing_with_exact_kernels(tmp_path: Path) -> None:
    engine = make_engine(make_model_folder(tmp_path, "qwen2"), backend="triton", exact=True)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9, 10]
    (plain,) = engine.generate([prompt], params)
    guess = plain.token_ids[:2] + array("i", [1, 1])
    engine.add(prompt, params, drafter=Drafter({"memory": guess}, Acceptance(), repeats=True))
    drafted = next(u.completion for _ in range(9) for u in engine.step() if u.completion)
    assert drafted.counters.drafts["memory"].accepted == 2
    assert drafted.token_ids == plain.token_ids
    # The interpreter multiplies by numpy, whose bits depend on the shape of a block; a GPU's do not.
    close = pytest.approx(plain.logprobs, abs=1e-5)
    assert drafted.logprobs == (plain.logprobs if torch.cuda.is_available() else close)


def test_the_gradient_is_that_of_the_cpu(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen2", tie_word_embeddings=True)
    on_cpu = make_engine(folder, backend="cpu")
    agent = AgentConfig(chunk_tokens=60, memory_tokens=3, answer_tokens=2, sampling=SAMPLED)
    (group,) = roll(MemoryAgent(on_cpu, agent), size=2, documents=[DOCUMENTS[1][:100]])
    short = replace(group, trajectories=[_with_short_prompts(trajectory) for trajectory in group.trajectories])
    expected, _ = any_gradient(on_cpu, config_of(), [short])
    ours, _ = any_gradient(make_engine(folder, backend="triton"), config_of(), [short])
    assert_close(ours, expected, 1e-4)


def _with_short_prompts(trajectory: Trajectory) -> Trajectory:
    """The interpreter takes its time."""
    return replace(trajectory, turns=[replace(turn, prompt_ids=turn.prompt_ids[-10:]) for turn in trajectory.turns])

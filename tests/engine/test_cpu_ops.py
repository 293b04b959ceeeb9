"""The promises of exactness on the C++ kernels: log-probabilities of a whole model bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from palimpsest import Completion, Engine, EngineConfig, SamplingParams
from palimpsest.engine import cpu, ops
from palimpsest.tests.tiny_models import make_model_folder

pytest.importorskip("palimpsest._C", reason="the extension is not built")

BASE = torch.randint(0, 500, (300,), generator=torch.Generator().manual_seed(5)).tolist()
# One token to three tiles of attention; some share a start, so that caching has something to do.
PROMPTS = [BASE[:1], BASE[:129], [*BASE[:140], 7, 7], BASE[20:90], BASE]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More inputs than one block of a linear layer's sum, head size and group of no round number."""
    shape = {"hidden_size": 300, "intermediate_size": 530, "head_dim": 20, "num_attention_heads": 6}
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen3", **shape)


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    return [*engine.generate(prompts, GREEDY), *engine.generate(prompts, SCORED)]


def bits(completion: Completion) -> tuple[list[int], list[float], list[float | None] | None]:
    return list(completion.token_ids), completion.logprobs, completion.prompt_logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_schedule_pages_cache_and_threads_leave_no_trace(folder: Path, dtype: str) -> None:
    common = {"dtype": dtype, "backend": "cpu", "kv_dtype": dtype}
    plain = EngineConfig(**common, max_step_tokens=512, max_sequences=1, threads=1, kv_bytes=1 << 24)
    expected = []
    for prompt in PROMPTS:
        expected.append(run(Engine(folder, plain), [prompt]))
    for crowd in (
        EngineConfig(**common, max_step_tokens=2048, max_sequences=8, threads=2, kv_bytes=1 << 24),
        EngineConfig(**common, max_step_tokens=29, max_sequences=3, page_size=5, threads=1, kv_bytes=1 << 24),
        EngineConfig(**common, max_step_tokens=200, max_sequences=4, page_size=64, threads=2, kv_bytes=1 << 24),
    ):
        engine = Engine(folder, crowd)
        for _ in range(2):  # the second time from the cache
            completions = run(engine, PROMPTS)
            for i, (greedy, scored) in enumerate(expected):
                assert bits(completions[i]) == bits(greedy)
                assert bits(completions[len(PROMPTS) + i]) == bits(scored)


def test_preempted_leaves_no_trace(folder: Path) -> None:
    config = EngineConfig(backend="cpu", max_step_tokens=64, max_sequences=1, threads=1, kv_bytes=1 << 24)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = Engine(folder, config).generate(PROMPTS[2:], params)
    page = 2 * 2 * 2 * 20 * 16 * 4  # layers, keys and values, heads, head size, slots, bytes
    tight = EngineConfig(backend="cpu", max_step_tokens=64, max_sequences=8, threads=1, kv_bytes=34 * page)
    completions = Engine(folder, tight).generate(PROMPTS[2:], params)
    assert sum(c.counters.preemptions for c in completions) > 0
    assert [bits(c) for c in completions] == [bits(c) for c in expected]


def test_the_kernels_are_what_runs() -> None:
    chosen = ops.select("cpu", torch.float32, torch.float32, head_dim=64, group=1)
    for name in ops.OP_NAMES:
        assert getattr(chosen, name).__self__.kernels is cpu


def test_huge_pages_leave_what_lies_in_them() -> None:
    held = torch.randn(3, 1 << 20)
    before = held.clone()
    cpu.use_huge_pages([held[0], held[1], torch.empty(0)])
    assert torch.equal(held, before)

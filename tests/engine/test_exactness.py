"""The promises of exactness: whatever is scheduled around it, a request gives the ids it gives alone.

In plain torch in float64, so that no near-tie flips: ids equal, log-probabilities to 1e-9. With the CPU kernels, whose
sums are float32: log-probabilities equal bit for bit.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from palimpsest import Completion, Engine, EngineConfig, SamplingParams
from palimpsest.engine.kv_cache import PagePool
from palimpsest.engine.outbox import Outbox
from palimpsest.engine.runner import Runner
from palimpsest.engine.scheduler import Scheduler
from palimpsest.engine.sequence import Sequence
from palimpsest.tests.tiny_models import make_model_folder

PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=7, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, presence_penalty=0.5, repetition_penalty=1.2, max_tokens=6),
    SamplingParams(temperature=1.0, prompt_logprobs=True, max_tokens=3),
]
GENERATOR = torch.Generator().manual_seed(5)
BASE = torch.randint(0, 500, (70,), generator=GENERATOR).tolist()
# Prompts that share whole pages, parts of pages and nothing.
PROMPTS = [BASE[:1], BASE[:13], BASE[:40], [*BASE[:37], 7, 7, 7], BASE[20:70], BASE]


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "float64"),
        ("qwen3", "float64"),
        ("qwen2", "float32"),
        ("qwen3", "float32"),
        ("llama", "bfloat16"),
        ("qwen3", "float32", "int8"),
    ],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model_type, dtype, *kv_dtype = request.param
    folder = make_model_folder(tmp_path_factory.mktemp("model"), model_type)
    backend = "reference" if dtype == "float64" else "cpu"
    return Engine(folder, EngineConfig(dtype=dtype, kv_dtype=(*kv_dtype, None)[0], kv_bytes=1 << 23, backend=backend))


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[tuple[int, int], Completion]:
    """Each prompt with each params, in an engine that has seen nothing else and computes it in one piece."""
    results = {}
    for which, prompt in enumerate(PROMPTS):
        for how, params in enumerate(PARAMS):
            fresh = reshape(engine, budget=512, num_pages=64, page_size=16, places=1)
            sequence = fresh.add(prompt, params, sample=which, turn=how)
            results[which, how] = drain(fresh, {sequence})[sequence]
    return results


def reshape(engine: Engine, *, budget: int, num_pages: int, page_size: int, places: int) -> Engine:
    """An engine on the same model with another pool, page size and schedule."""
    other = copy.copy(engine)
    eos_ids = engine.tokenizer.eos_ids
    other.runner = Runner(
        engine.model,
        num_pages=num_pages,
        page_size=page_size,
        kv_dtype=engine.runner.pages[0].key.dtype,
        eos_ids=eos_ids,
    )
    # Whatever reads a slot that was never written shows as NaN.
    for layer in other.runner.pages:
        for pages in (layer.key, layer.value):
            pages.view(torch.uint8).fill_(255)  # NaN in floating-point numbers, and as the scale of int8
    other.scheduler = Scheduler(
        PagePool(num_pages, page_size),
        max_step_tokens=budget,
        max_sequences=places,
        window=engine.window,
        eos_ids=eos_ids,
    )
    other._outbox = Outbox(other.scheduler.finish)
    return other


def drain(engine: Engine, wanted: set[Sequence]) -> dict[Sequence, Completion]:
    done: dict[Sequence, Completion] = {}
    for _ in range(3000):
        for update in engine.step():
            if update.completion is not None:
                done[update.sequence] = update.completion
        engine.scheduler.check()
        if wanted <= set(done):
            return done
    raise AssertionError("not finished after 3000 steps")


def same(engine: Engine, given: Completion, expected: Completion) -> None:
    exact = engine.model.activation_dtype == torch.float32
    assert list(given.token_ids) == list(expected.token_ids)
    assert given.text == expected.text
    assert given.finish_reason == expected.finish_reason
    if exact:
        assert given.logprobs == expected.logprobs
        assert given.prompt_logprobs == expected.prompt_logprobs
        return
    assert given.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    if expected.prompt_logprobs is not None:
        assert given.prompt_logprobs is not None
        assert given.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-9)


requests = st.tuples(
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, len(PARAMS) - 1),
    st.integers(0, 4),  # steps run before the next request
    st.sampled_from(["whole", "whole", "open", "abort"]),
    st.integers(0, 40),  # where an open prompt is cut
)


# A failing schedule is short enough to read, and shrinking would run the model for minutes.
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    st.lists(requests, min_size=1, max_size=8),
    st.integers(6, 60),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(1, 6),
    st.integers(0, 30),
)
def test_any_company_any_cut_any_cache_any_preemption(
    engine: Engine,
    alone: dict[tuple[int, int], Completion],
    schedule: list[tuple[int, int, int, str, int]],
    budget: int,
    page_size: int,
    places: int,
    spare: int,
) -> None:
    longest = max(len(prompt) for prompt in PROMPTS) + 9
    num_pages = -(-longest // page_size) + spare
    crowd = reshape(engine, budget=budget, num_pages=num_pages, page_size=page_size, places=places)
    expected: dict[Sequence, Completion] = {}
    done: dict[Sequence, Completion] = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            done.update(
                {update.sequence: update.completion for update in crowd.step() if update.completion is not None}
            )
            crowd.scheduler.check()

    for which, how, steps, manner, cut in schedule:
        prompt, params = PROMPTS[which], PARAMS[how]
        if manner == "open" and not params.prompt_logprobs:
            sequence = crowd.add(prompt[:cut], params, sample=which, turn=how, is_open=True)
            run(1)
            crowd.extend(sequence, prompt[cut:])
            crowd.close(sequence)
        else:
            sequence = crowd.add(prompt, params, sample=which, turn=how)
        if manner != "abort":
            expected[sequence] = alone[which, how]
        run(steps)
        if manner == "abort":
            crowd.abort(sequence)
            crowd.scheduler.check()
    if set(expected) - set(done):
        done |= drain(crowd, set(expected) - set(done))
    for sequence, completion in expected.items():
        same(engine, done[sequence], completion)
    assert crowd.scheduler.pool.available == num_pages


def test_preempted_is_not_different(engine: Engine, alone: dict[tuple[int, int], Completion]) -> None:
    tight = reshape(engine, budget=64, num_pages=22, page_size=4, places=4)
    pairs = [(2, 0), (5, 0), (2, 1), (5, 2)]
    sequences = {tight.add(PROMPTS[w], PARAMS[h], sample=w, turn=h): alone[w, h] for w, h in pairs}
    done = drain(tight, set(sequences))
    assert sum(completion.counters.preemptions for completion in done.values()) > 0
    for sequence, expected in sequences.items():
        same(engine, done[sequence], expected)


def test_cached_is_cold(engine: Engine, alone: dict[tuple[int, int], Completion]) -> None:
    warm = reshape(engine, budget=64, num_pages=64, page_size=16, places=4)
    first = warm.add(PROMPTS[5], PARAMS[0], sample=5, turn=0)
    drain(warm, {first})
    again = warm.add(PROMPTS[3], PARAMS[0], sample=3, turn=0)
    completion = drain(warm, {again})[again]
    assert completion.counters.cached_tokens == 37, "two whole pages and 5 tokens of a third"
    same(engine, completion, alone[3, 0])


def test_after_a_weight_update_no_page_computed_before_is_read(engine: Engine) -> None:
    changed = reshape(engine, budget=64, num_pages=64, page_size=16, places=4)
    prompt, params = PROMPTS[5], replace(PARAMS[0], prompt_logprobs=False)
    before = changed.generate([prompt], params)[0]
    assert changed.generate([prompt], params)[0].counters.cached_tokens > 0
    weight = changed.model.layers[0].mlp.down_proj.weight
    with changed.update():
        weight.mul_(-1.0)
    after = changed.generate([prompt], params)[0]
    with changed.update():
        weight.mul_(-1.0)
    restored = changed.generate([prompt], params)[0]
    assert after.counters.cached_tokens == restored.counters.cached_tokens == 0
    assert after.logprobs != before.logprobs
    assert restored.logprobs == before.logprobs

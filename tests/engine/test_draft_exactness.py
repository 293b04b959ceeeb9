"""Drafted = not drafted: a request's completion is the same in every field but its counters, whatever is drafted.

With the CPU kernels: ids equal, log-probabilities bit for bit.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
import torch
from palimpsest import Completion, Engine, EngineConfig, SamplingParams
from palimpsest.engine.draft import Draft, Drafter
from palimpsest.engine.kv_cache import PagePool
from palimpsest.engine.runner import Runner
from palimpsest.engine.scheduler import Scheduler
from palimpsest.engine.sequence import Sequence
from palimpsest.tests.tiny_models import make_model_folder

CONFIG = EngineConfig(kv_bytes=1 << 22, backend="cpu", drafts=False)
PROMPT = torch.randint(3, 500, (70,), generator=torch.Generator().manual_seed(5)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=30, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, presence_penalty=0.5, repetition_penalty=1.2, max_tokens=25),
    SamplingParams(temperature=0.7, min_p=0.02, frequency_penalty=0.4, max_tokens=100, min_tokens=3, seed=9),
    SamplingParams(temperature=0, logit_bias={7: 2.0, 9: -3.0}, repetition_penalty=1.3, top_logprobs=4, max_tokens=20),
    SamplingParams(temperature=1.2, prompt_logprobs=True, top_logprobs=2, max_tokens=12, ignore_eos=True),
]


class Scripted(Drafter):
    """Foresees a known response, but for every token a mistake with some probability; drafts of random lengths.

    propose stays the same until the response changes, as a drafter has to.
    """

    def __init__(self, response: array[int], wrong: float, longest: int, seed: int) -> None:
        self.response, self.wrong, self.longest, self.seed = response, wrong, longest, seed
        self.recorded: list[tuple[Draft, int]] = []

    def propose(self, response: array[int], limit: int, width: int = 1) -> Draft | None:
        at = len(response)
        assert limit > 0
        assert response == self.response[:at]
        rng = random.Random(self.seed * 1000 + at)
        length = min(rng.randint(0, self.longest), limit)
        right = [*self.response[at : at + length], *(rng.randrange(500) for _ in range(length))]
        ids = array("i", [rng.randrange(500) if rng.random() < self.wrong else token for token in right[:length]])
        return Draft(ids, rng.choice(["memory", "chunk"]))

    def record(self, draft: Draft, accepted: int) -> None:
        assert 0 <= accepted <= len(draft.ids)
        self.recorded.append((draft, accepted))


@pytest.fixture(
    scope="module", params=[("qwen2", "float32"), ("qwen3", "float32"), ("llama", "bfloat16")], ids="-".join
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model_type, dtype = request.param
    folder = make_model_folder(tmp_path_factory.mktemp("model"), model_type)
    return Engine(folder, replace(CONFIG, dtype=dtype, drafts=True))


def reshape(engine: Engine, *, budget: int = 64, num_pages: int = 64, page_size: int = 4, places: int = 8) -> Engine:
    """Another pool, page size and schedule for the same model; slots that were never written hold NaN."""
    eos_ids = engine.tokenizer.eos_ids
    engine.runner = Runner(
        engine.model, num_pages=num_pages, page_size=page_size, kv_dtype=torch.float32, eos_ids=eos_ids
    )
    for layer in engine.runner.pages:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    engine.scheduler = Scheduler(
        PagePool(num_pages, page_size),
        max_step_tokens=budget,
        max_sequences=places,
        window=engine.window,
        eos_ids=eos_ids,
    )
    return engine


def drain(engine: Engine, sequences: list[Sequence]) -> list[Completion]:
    done: dict[Sequence, Completion] = {}
    told: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
    for _ in range(3000):
        for update in engine.step():
            told[update.sequence] += update.token_ids
            if update.completion is not None:
                done[update.sequence] = update.completion
        engine.scheduler.check()
        for sequence in engine.scheduler.running:
            assert len(sequence.pages) <= engine.scheduler.pool.pages_for(len(sequence.tokens))
        if len(done) == len(sequences):
            assert engine.scheduler.pool.available == engine.scheduler.pool.num_pages
            assert [list(done[s].token_ids) for s in sequences] == [told[s] for s in sequences]
            return [done[sequence] for sequence in sequences]
    raise AssertionError("not finished after 3000 steps")


def undrafted(engine: Engine, prompt: list[int], params: SamplingParams, sample: int = 0) -> Completion:
    sequence = engine.add(prompt, params, sample=sample, drafter=Scripted(array("i"), 0, 0, 0))
    sequence.drafter = None
    return drain(engine, [sequence])[0]


def same(given: Completion, expected: Completion) -> None:
    """Every field, but what it cost."""
    cost = {"counters": expected.counters, "seconds": expected.seconds}
    assert replace(given, **cost) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_any_draft_in_any_company_gives_the_undrafted_completions(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    reshape(engine)
    requests = [
        (PROMPT[: rng.randint(1, 70)], rng.choice(PARAMS), i, rng.choice([0.0, 0.05, 0.3, 1.0, None]))
        for i in range(rng.randint(1, 7))
    ]
    expected = [undrafted(engine, prompt, params, i) for prompt, params, i, _ in requests]
    page_size = rng.choice([1, 3, 4, 16])
    pages = -(-190 // page_size) + rng.randint(0, 20)
    places = rng.randint(1, 6)
    reshape(engine, budget=rng.randint(places, 80), num_pages=pages, page_size=page_size, places=places)
    sequences = []
    for (prompt, params, i, wrong), completion in zip(requests, expected, strict=True):
        drafter = Scripted(completion.token_ids, wrong or 0.0, 0 if wrong is None else rng.choice([3, 20, 150]), seed)
        sequences.append(engine.add(prompt, params, sample=i, drafter=drafter))
        for _ in range(rng.randint(0, 2)):
            engine._undelivered = engine.step()
    for given, wanted in zip(drain(engine, sequences), expected, strict=True):
        same(given, wanted)

"""Drafted = not drafted: a request's completion is the same in every field but its cost, whatever is drafted.

With the CPU kernels: ids equal, log-probabilities bit for bit.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from palimpsest import Completion, Engine, EngineConfig, RequestError, SamplingParams, Segment
from palimpsest.engine.draft import Draft, Drafter
from palimpsest.engine.kv_cache import PagePool
from palimpsest.engine.outbox import Outbox
from palimpsest.engine.runner import Runner
from palimpsest.engine.scheduler import Scheduler
from palimpsest.engine.sequence import DraftCounters, Sequence
from palimpsest.tests.tiny_models import make_model_folder

CONFIG = EngineConfig(kv_bytes=1 << 22, backend="cpu", threads=1)
PROMPT = torch.randint(3, 500, (70,), generator=torch.Generator().manual_seed(5)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3, logit_bias={7: 2.0, 9: -3.0}, top_logprobs=4),
    SamplingParams(temperature=1.0, max_tokens=70, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, presence_penalty=0.5, repetition_penalty=1.2, max_tokens=25),
    SamplingParams(temperature=0.7, min_p=0.02, frequency_penalty=0.4, min_tokens=3, seed=9),
    SamplingParams(temperature=1.2, prompt_logprobs=True, top_logprobs=2, max_tokens=12),
]
WINDOW = 150


class Scripted(Drafter):
    """Foresees a known response, but each token wrongly with some probability; drafts of random lengths."""

    def __init__(self, response: array[int], wrong: float = 0.0, longest: int = 1000, seed: int = 0) -> None:
        self.response, self.wrong, self.longest, self.seed = response, wrong, longest, seed
        self.recorded: list[tuple[Draft, int]] = []

    def propose(self, response: array[int], limit: int, width: int = 1) -> Draft | None:
        at = len(response)
        assert limit > 0 and response == self.response[:at]
        rng = random.Random(self.seed * 1000 + at)
        length = min(rng.randint(0, self.longest) if self.seed else self.longest, limit)
        ids = (self.response[at:] + array("i", [rng.randrange(500) for _ in range(length)]))[:length]
        return Draft(array("i", [rng.randrange(500) if rng.random() < self.wrong else id for id in ids]), "memory")

    def record(self, draft: Draft, accepted: int) -> None:
        self.recorded.append((draft, accepted))


@pytest.fixture(
    scope="module", params=[("qwen2", "float32"), ("qwen3", "float32"), ("llama", "bfloat16")], ids="-".join
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model_type, dtype = request.param
    threads = torch.get_num_threads()
    folder = make_model_folder(tmp_path_factory.mktemp("model"), model_type)
    yield Engine(folder, replace(CONFIG, dtype=dtype, kv_dtype=dtype))
    torch.set_num_threads(threads)


def reshape(engine: Engine, *, budget: int = 64, num_pages: int = 64, page_size: int = 4, places: int = 8) -> Engine:
    """Another pool, page size and schedule for the same model; slots that were never written hold NaN."""
    eos_ids = engine.tokenizer.eos_ids
    kv_dtype = engine.model.dtype
    engine.runner = Runner(engine.model, num_pages=num_pages, page_size=page_size, kv_dtype=kv_dtype, eos_ids=eos_ids)
    for layer in engine.runner.pages:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    pool = PagePool(num_pages, page_size)
    engine.scheduler = Scheduler(pool, max_step_tokens=budget, max_sequences=places, window=WINDOW, eos_ids=eos_ids)
    engine._outbox = Outbox(engine.scheduler.finish)
    return engine


def drain(engine: Engine, sequences: list[Sequence], failures: random.Random | None = None) -> list[Completion]:
    """Step to the end, checking pages, updates and what is cached; failures: breaks steps here and there."""
    done: dict[Sequence, Completion] = {}
    told: dict[Sequence, array[int]] = {sequence: array("i") for sequence in sequences}
    text: dict[Sequence, str] = dict.fromkeys(sequences, "")
    for _ in range(3000):
        for update in broken_step(engine, failures) if failures and failures.random() < 0.1 else engine.step():
            told[update.sequence] += update.token_ids
            text[update.sequence] += update.text
            if update.completion is not None:
                done[update.sequence] = update.completion
        engine.scheduler.check()
        for sequence in engine.scheduler.running:
            assert len(sequence.pages) <= engine.scheduler.pool.pages_for(len(sequence.tokens))
        if len(done) == len(sequences):
            break
    assert engine.scheduler.pool.available == engine.scheduler.pool.num_pages
    assert [done[sequence].token_ids for sequence in sequences] == list(told.values())
    assert [done[sequence].text for sequence in sequences] == list(text.values())
    return [done[sequence] for sequence in sequences]


def broken_step(engine: Engine, rng: random.Random) -> list:
    owner, name = rng.choice(
        [
            (engine.scheduler.pool, "allocate"),
            (engine.scheduler, "_publish"),
            (engine.scheduler, "_ending"),
            (engine.scheduler, "finish"),
            (engine.runner, "run_layers"),
            (engine.runner, "_draw"),
            (engine._outbox, "tell"),
            (engine._outbox, "_finish"),
        ]
    )
    original, left = getattr(owner, name), rng.randint(0, 6)

    def fail_at_last(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return original(*arguments)

    setattr(owner, name, fail_at_last)
    try:
        return engine.step()
    except KeyboardInterrupt:
        return []
    finally:
        setattr(owner, name, original)


def undrafted(engine: Engine, prompt: list[int], params: SamplingParams, sample: int = 0) -> Completion:
    sequence = reshape(engine).add(prompt, params, sample=sample)
    sequence.drafter = None
    return drain(engine, [sequence])[0]


def assert_same(given: Completion, expected: Completion) -> None:
    assert replace(given, counters=expected.counters, seconds=expected.seconds) == expected


def with_an_end(engine: Engine, prompt: list[int], params: SamplingParams, sample: int, rng: random.Random):
    """The same params, or such that something in the middle of the response ends it."""
    whole = undrafted(engine, prompt, params, sample)
    at = rng.randrange(len(whole.token_ids))
    end = rng.choice(["", "", "stop", "stop_ids", "eos"])
    if end == "stop" and len(whole.text) > 3:
        start = rng.randrange(len(whole.text) - 2)
        return replace(params, stop=(whole.text[start : start + rng.randint(1, 3)],))
    if end == "stop_ids":
        return replace(params, stop_ids=(whole.token_ids[at],))
    if end == "eos":
        return replace(params, logit_bias={engine.tokenizer.eos_ids[0]: 3.0}, ignore_eos=False)
    return params


@pytest.mark.parametrize("seed", range(8))
def test_any_draft_in_any_company_gives_the_undrafted_completions(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    requests = []
    for i in range(rng.randint(1, 7)):
        prompt, params = PROMPT[: rng.randint(1, 70)], rng.choice(PARAMS)
        requests.append((prompt, with_an_end(engine, prompt, params, i, rng)))
    expected = [undrafted(engine, prompt, params, i) for i, (prompt, params) in enumerate(requests)]
    page_size, places = rng.choice([1, 3, 4, 16]), rng.randint(1, 6)
    pages = -(-WINDOW // page_size) + rng.randint(0, 20)
    reshape(engine, budget=rng.randint(places, 80), num_pages=pages, page_size=page_size, places=places)
    sequences = []
    for i, ((prompt, params), completion) in enumerate(zip(requests, expected, strict=True)):
        wrong, longest = rng.choice([0.0, 0.05, 0.3, 1.0]), rng.choice([0, 3, 20, 150])
        drafter = Scripted(completion.token_ids, wrong, longest, seed + 1)
        is_open = rng.random() < 0.3 and not params.prompt_logprobs
        cut = rng.randint(0, len(prompt)) if is_open else len(prompt)
        sequence = engine.add(prompt[:cut], params, sample=i, is_open=is_open, drafter=drafter)
        sequences.append(sequence)
        for _ in range(rng.randint(0, 2)):
            engine._outbox.updates = engine.step()
        if is_open:
            engine.extend(sequence, prompt[cut:])
            engine.close(sequence)
    failures = rng if rng.random() < 0.5 else None
    for given, wanted in zip(drain(engine, sequences, failures), expected, strict=True):
        assert_same(given, wanted)


def test_an_unchanged_memory_takes_no_decode_step_and_one_pass_with_the_end_of_the_prompt(engine: Engine) -> None:
    params = replace(GREEDY, max_tokens=60)
    expected = undrafted(engine, PROMPT, params)
    for budget in (200, 100, 64):
        reshape(engine, budget=budget)
        sequence = engine.add(PROMPT, params, drafter=Scripted(expected.token_ids[:-1]))
        given = drain(engine, [sequence])[0]
        assert_same(given, expected)
        assert (given.counters.decode_steps, given.counters.prefilled_tokens) == (0, 70), f"budget {budget}"
        assert given.counters.drafts == {"memory": DraftCounters(drafts=1, proposed=59, accepted=59)}
        assert len(sequence.drafter.recorded) == 1


def test_head_rows_go_in_tiles_and_stop_at_the_first_wrong_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(GREEDY, max_tokens=79)
    expected = undrafted(engine, PROMPT, params)
    assert expected.token_ids[0] != 3
    wrong, nothing = Scripted(array("i", [3] * 79)), Scripted(array("i"), longest=0)
    logits, rows = engine.model.logits, []
    monkeypatch.setattr(engine.model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    for drafters, tiles in (([Scripted(expected.token_ids)], [8, 16, 32, 23]), ([wrong, nothing], [4 + 1])):
        reshape(engine, budget=400)
        rows.clear()
        sequences = [
            engine.add(PROMPT[:i], params, drafter=drafter) for i, drafter in zip((70, 3), drafters, strict=False)
        ]
        engine.step()
        assert rows == tiles
        for sequence in sequences:
            engine.abort(sequence)
        engine.step()


def test_a_draft_takes_no_page_that_another_sequence_needs(engine: Engine) -> None:
    expected = [undrafted(engine, PROMPT[i : i + 8], replace(GREEDY, max_tokens=40)) for i in range(3)]
    reshape(engine, budget=200, num_pages=30, page_size=4)
    sequences = [
        engine.add(PROMPT[i : i + 8], replace(GREEDY, max_tokens=40), drafter=Scripted(completion.token_ids))
        for i, completion in enumerate(expected)
    ]
    for given, wanted in zip(drain(engine, sequences), expected, strict=True):
        assert_same(given, wanted)
        assert given.counters.preemptions == 0


def test_drafters_are_refused_where_they_would_change_results(engine: Engine) -> None:
    folder = engine.model_path
    refusals = {"drafts is False": replace(CONFIG, drafts=False), "'reference'": replace(CONFIG, backend="reference")}
    for message, config in refusals.items():
        other = Engine(folder, config)
        assert other.add(PROMPT, GREEDY).drafter is None
        with pytest.raises(RequestError, match=message):
            other.add(PROMPT, GREEDY, drafter=Scripted(array("i")))
        opened = other.add(PROMPT, GREEDY, is_open=True)
        with pytest.raises(RequestError, match=message):
            other.close(opened, drafter=Scripted(array("i")))


def test_by_default_a_prompt_drafts_for_itself_open_or_not(engine: Engine) -> None:
    params = replace(GREEDY, max_tokens=40, logit_bias=dict.fromkeys(range(20, 24), 60.0))
    expected = undrafted(engine, PROMPT, params)
    memory = Segment("memory", expected.token_ids[:30])
    prompts = [PROMPT, [Segment("head", array("i", PROMPT[:5])), memory, Segment("chunk", array("i", PROMPT[5:]))]]
    for prompt in prompts:
        reshape(engine)
        drafted = engine.add(prompt, params)
        opened = engine.add(list(drafted.tokens), params, is_open=True)
        assert drafted.drafter is not None and opened.drafter is None
        engine.close(opened)
        assert opened.drafter is not None
        one, other = drain(engine, [drafted, opened])
        assert_same(one, other)
        assert_same(one, undrafted(engine, list(drafted.tokens[: drafted.prompt_length]), params))


@pytest.mark.parametrize("end", ["length", "stop id"])
def test_a_stop_string_counts_before_another_end_that_the_same_draft_brings(engine: Engine, end: str) -> None:
    whole = undrafted(engine, PROMPT, GREEDY)
    params = replace(GREEDY, stop=(whole.text[4:6],))
    if end == "stop id":
        params = replace(params, stop_ids=(whole.token_ids[-2],))
    expected = undrafted(engine, PROMPT, params)
    assert expected.finish_reason == "stop" and 0 < len(expected.token_ids) < 20
    reshape(engine, budget=200)
    sequence = engine.add(PROMPT, params, drafter=Scripted(whole.token_ids))
    assert_same(drain(engine, [sequence])[0], expected)

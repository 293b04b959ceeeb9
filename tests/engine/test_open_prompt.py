"""Open prompts: the same readings, bit for bit, and less to prefill when a memory is complete.

Two engines: a tiny random model with the CPU kernels, and the real scheduler on pages of token ids with scripted
responses, where a wrong page shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from palimpsest import AgentConfig, Engine, EngineConfig, MemoryAgent, RequestError, SamplingParams
from palimpsest.engine.kv_cache import PagePool
from palimpsest.engine.outbox import Outbox
from palimpsest.engine.reading import Event, Reading, TurnEnded
from palimpsest.engine.scheduler import Scheduler
from palimpsest.engine.sequence import Sequence
from palimpsest.engine.step import Span, SpanResult, Step
from palimpsest.engine.trace import traced
from palimpsest.tests.tiny_models import make_model_folder

QUESTION = "Who kept the lamps?"
CONFIG = AgentConfig(chunk_tokens=60, memory_tokens=40, answer_tokens=8)


def story(first: int, last: int) -> str:
    return "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(first, last))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama")


def what_came(readings: Iterable[Reading]) -> list[list[tuple[array[int], array[int], list[float], str, str]]]:
    return [
        [(turn.prompt_ids, turn.response_ids, turn.logprobs, turn.text, turn.finish_reason) for turn in reading.turns]
        for reading in readings
    ]


def assert_at_rest(engine: Engine) -> None:
    """Nothing is left in an engine whose readings are over."""
    engine.scheduler.check()
    assert not engine.unfinished and not engine.scheduler.kept and not engine._outbox.texts
    assert engine.scheduler.pool.available == engine.scheduler.pool.num_pages


GREEDY = SamplingParams(temperature=0.0)
# Ids 0, 1 and 2 are the special tokens: the bias lets memories end at every length.
SAMPLED = SamplingParams(temperature=1.0, seed=5, top_p=0.95, logit_bias={510: 3.0}, stop=("b", "e "))


@pytest.mark.parametrize("template", ["memory_first", "chunk_first"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, replace(GREEDY, presence_penalty=1.0)])
@pytest.mark.parametrize(
    "limits",
    [{}, {"kv_bytes": 120_000, "page_size": 4}, {"max_step_tokens": 7, "max_sequences": 3, "page_size": 1}],
    ids=["roomy", "preempting", "small steps"],
)
def test_open_is_closed(
    model: Path, template: str, sampling: SamplingParams, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [(story(1800, 1800 + years), QUESTION) for years in (3, 9, 0, 5)]
    came = []
    for is_open, drafts in product((False, True), repeat=2):
        engine = Engine(
            model,
            EngineConfig(
                backend="cpu", threads=1, open_prompt=is_open, drafts=drafts, **({"kv_bytes": 1 << 22} | limits)
            ),
        )
        agent = MemoryAgent(engine, replace(CONFIG, template=template, sampling=sampling))
        preempt = Mock(wraps=engine.scheduler._preempt)
        monkeypatch.setattr(engine.scheduler, "_preempt", preempt)
        readings = agent.read_many(tasks)
        came.append(what_came(readings))
        assert any(reading.counters.prefilled_ahead for reading in readings) == is_open
        assert any(reading.counters.drafts for reading in readings) == drafts
        assert preempt.called or "kv_bytes" not in limits
        assert_at_rest(engine)
    assert all(other == came[0] for other in came[1:])


def test_what_drafts_brought_is_counted_and_traced(model: Path, tmp_path: Path) -> None:
    engine = Engine(model, EngineConfig(backend="cpu", threads=1, kv_bytes=1 << 22))
    agent = MemoryAgent(engine, replace(CONFIG, sampling=GREEDY))
    for _ in traced(agent, story(1800, 1806), QUESTION, tmp_path / "trace"):
        pass
    *_, event = traced(agent, story(1800, 1806), QUESTION, tmp_path / "trace", resume=True)
    reading = event.reading
    assert reading.counters.drafts["memory"].proposed == sum(
        turn.drafts["memory"].proposed for turn in reading.turns if "memory" in turn.drafts
    )
    assert reading.counters.drafts["memory"].drafts > 1
    alone = agent.read(story(1800, 1806), QUESTION)
    assert alone.turns[0].drafts == reading.turns[0].drafts


def test_a_group_is_its_readings_and_shares_what_it_reads(model: Path) -> None:
    document = story(1800, 1809)
    for template, shared in (("memory_first", 1), ("chunk_first", 2)):
        config = replace(CONFIG, chunk_tokens=120, template=template, sampling=replace(SAMPLED, seed=8))
        engine = Engine(model, EngineConfig(backend="cpu", threads=1, kv_bytes=1 << 22, max_step_tokens=64))
        group = MemoryAgent(engine, config).rollout(iter([document]), QUESTION, 4, first_sample=2)
        assert_at_rest(engine)
        plain = Engine(model, EngineConfig(backend="cpu", threads=1, kv_bytes=1 << 22, open_prompt=False))
        alone = MemoryAgent(plain, config).read_many([(document, QUESTION)] * 6)[2:]
        assert what_came(group) == what_came(alone)
        assert len({reading.turns[0].response_ids.tobytes() for reading in group}) > 1
        for index in range(shared):
            turns = [reading.turns[index] for reading in group]
            assert sum(turn.prefilled_tokens >= 120 for turn in turns) == 1, "one computes it, the others take it"


def test_rollouts_come_as_they_finish_and_take_tasks_as_places_become_free(model: Path) -> None:
    engine = Engine(model, EngineConfig(backend="cpu", threads=1, kv_bytes=1 << 22, max_sequences=4))
    agent = MemoryAgent(engine, replace(CONFIG, sampling=SAMPLED))
    lengths = [5, 0, 0, 3, 0]
    taken = []

    def tasks() -> Iterable[tuple[str, str]]:
        for place, length in enumerate(lengths):
            taken.append(place)
            yield story(1800, 1800 + length), QUESTION

    came = {}
    for task, place, reading in agent.rollouts(tasks(), 2):
        if not came:
            assert taken == [0, 1] and task == 1
        came[task, place] = reading
    assert sorted(came) == [(task, place) for task in range(5) for place in range(2)]
    assert list(came)[-1][0] in (0, 3)
    alone = agent.read_many([(story(1800, 1800 + length), QUESTION) for length in lengths for _ in range(2)])
    assert what_came([came[key] for key in sorted(came)]) == what_came(alone)
    unfinished = agent.rollouts(tasks(), 2)
    next(unfinished)
    unfinished.close()
    assert_at_rest(engine)
    for message, tasks, n, first in (
        ("n must be a whole number of at least 1", [], 0, 0),
        ("first_sample must be a whole number of at least 0", [], 2, -1),
        ("first_sample must be a whole number of at least 0", [], 2, True),
        ("tasks are an iterable of pairs", None, 2, 0),
    ):
        with pytest.raises(RequestError, match=message):
            next(agent.rollouts(tasks, n, first_sample=first))


Respond = Callable[[Sequence], array]


class ScriptedRunner:
    """Draws what `respond` says and keeps token ids where keys and values would lie."""

    def __init__(self, num_pages: int, page_size: int, respond: Respond) -> None:
        self.pages = [[-1] * page_size for _ in range(num_pages)]
        self.page_size, self.respond = page_size, respond

    def run(self, step: Step, meanwhile: Callable[[], None]) -> list[SpanResult]:
        meanwhile()
        copied = [(copy.target, list(self.pages[copy.source])) for copy in step.copies]
        for target, slots in copied:
            self.pages[target][:] = slots
        for span in step.spans:
            for i, token in enumerate(span.ids, span.start):
                self.pages[span.pages[i // self.page_size]][i % self.page_size] = token
        return [self._result(span) for span in step.spans]

    def _result(self, span: Span) -> SpanResult:
        end, size = span.start + len(span.ids), self.page_size
        stored = array("i", [self.pages[span.pages[i // size]][i % size] for i in range(end)])
        assert stored == span.sequence.tokens[:end], "the pages hold other tokens than the sequence"
        script = self.respond(span.sequence)
        if not span.samples:
            return SpanResult()
        return SpanResult(array("i", [script[span.sequence.response_length]]), [-1.0])


@pytest.fixture(scope="module")
def base(model: Path) -> Engine:
    return Engine(model, EngineConfig(backend="reference", threads=1, kv_bytes=1 << 20))


def scripted(
    base: Engine, respond: Respond, *, is_open: bool, num_pages: int = 400, budget: int = 512, places: int = 8
) -> Engine:
    """The base engine with its pages and responses replaced, checked after every step."""
    engine, size = object.__new__(Engine), 4
    engine.__dict__.update(base.__dict__)
    engine.config = replace(base.config, open_prompt=is_open, max_sequences=places, max_step_tokens=512)
    engine.runner = ScriptedRunner(num_pages, size, respond)  # type: ignore[assignment]
    engine.scheduler = Scheduler(
        PagePool(num_pages, size),
        max_step_tokens=budget,
        max_sequences=places,
        window=base.window,
        eos_ids=base.tokenizer.eos_ids,
    )
    engine._outbox = Outbox(engine.scheduler.finish)
    engine.longest = min(base.window, num_pages * size)
    return engine


def test_the_next_turn_prefills_what_follows_the_memory(base: Engine) -> None:
    """Separator, chunk and tail; after a cut also the memory's last token, which no step has computed."""
    words = base.tokenizer.encode("the keeper lit lamps and counted ships at night ")[:12]
    end = base.tokenizer.eos_ids[0]
    responses = [
        array("i", [*words, end]),
        array("i", [*words[:5], *words[:5], end]),  # the first five are those of the memory before
        array("i", [words[0]] * 20),
        array("i", [end]),
        array("i", [*words[:3], end]),
        array("i", [*words[:3], end]),
        array("i", [*words, end]),
    ]
    opened = [True, True, True, True, True, False]
    for template in ("memory_first", "chunk_first"):
        engine = scripted(base, lambda sequence: responses[min(sequence.turn, 6)], is_open=True)
        agent = MemoryAgent(engine, replace(CONFIG, template=template, memory_tokens=20))
        document = base.tokenizer.decode(base.tokenizer.encode(story(1700, 1730))[:420])
        turns = agent.read(document, QUESTION).turns
        prompt = [segment.name for segment in agent.open("x", QUESTION).next().segments]
        fixed = {segment.name: len(segment.ids) for segment in agent.open("x", QUESTION).next().segments}
        fixed["chunk"] = CONFIG.chunk_tokens
        needed = sum(fixed[name] for name in prompt[prompt.index("memory") + 1 :])
        for before, turn, is_open in zip(turns[:6], turns[1:7], opened, strict=True):
            found = turn.prefilled_tokens - turn.prefilled_ahead
            if template == "chunk_first" or is_open:
                assert found == needed + (before.finish_reason == "length"), (template, turn.index)
            else:
                assert found < needed and turn.prefilled_ahead == 0, "the separator is shared, too"
        assert_at_rest(engine)


pieces = st.sampled_from(
    ["the keeper ", "lit ", "lamps", "old", "E", "ND", "</think>", "</", "think", ">", ">\n\n", "!", "é"]
)
responses = st.lists(st.lists(pieces, max_size=6), min_size=1, max_size=4)


# A failing case is short enough to read.
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    st.lists(responses, min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([(), ("END",), ("END", "lit lam", "é!")]),
    st.sampled_from(["memory_first", "chunk_first"]),
    st.sampled_from([150, 400]),
    st.sampled_from([5, 512]),
    st.integers(1, 6),
    st.integers(0, 2**16),
)
def test_any_memories_give_the_closed_readings(
    base: Engine,
    scripts: list[list[list[str]]],
    strip: bool,
    stop: tuple[str, ...],
    template: str,
    num_pages: int,
    budget: int,
    places: int,
    interference: int,
) -> None:
    """Repeated, cut, stopped and re-thought memories; in between somebody aborts the open sequences."""
    encode, ends = base.tokenizer.encode, base.tokenizer.eos_ids

    def respond(sequence: Sequence) -> array[int]:
        script = scripts[sequence.sample]
        return array("i", [*encode("".join(script[sequence.turn % len(script)])), *ends, *[ends[0]] * 40])

    config = replace(
        CONFIG,
        memory_tokens=12,
        template=template,
        strip_thinking=strip,
        sampling=SamplingParams(stop=stop, stop_ids=(encode("!")[0],)),
    )
    tasks = [(story(1800, 1800 + 3 * place), QUESTION) for place in range(len(scripts))]
    came = []
    for is_open in (False, True):
        engine = scripted(
            base, respond, is_open=is_open, num_pages=num_pages, budget=max(budget, places), places=places
        )
        step, steps = engine.step, iter(range(100_000))

        def checked(engine: Engine = engine, step: Callable = step, steps: Iterable[int] = steps) -> list:
            live = engine.scheduler
            for sequence in [*live.running, *live.waiting]:
                if sequence.is_open and interference >> (next(steps) % 16) & 1:
                    engine.abort(sequence)
            updates = step()
            live.check()
            return updates

        engine.step = checked  # type: ignore[method-assign]
        came.append(what_came(MemoryAgent(engine, config).read_many(tasks)))
        assert_at_rest(engine)
    assert came[0] == came[1]


def test_leaving_at_any_moment_leaves_nothing_behind(base: Engine) -> None:
    words = base.tokenizer.encode("the keeper lit lamps ")

    def respond(sequence: Sequence) -> array[int]:
        return array("i", [*words[sequence.turn % 3 :], base.tokenizer.eos_ids[0]])

    def stream(template: str) -> tuple[Engine, Generator[Event, None, None]]:
        engine = scripted(base, respond, is_open=True)
        return engine, MemoryAgent(engine, replace(CONFIG, template=template)).stream(story(1800, 1804), QUESTION)

    for template in ("memory_first", "chunk_first"):
        for leaves_at in range(len(list(stream(template)[1])) - 1):
            for leave in ("close", "abort"):
                engine, events = stream(template)
                next(event for at, event in enumerate(events) if at == leaves_at)
                if leave == "close":
                    events.close()
                else:
                    running = [sequence for sequence in engine._outbox.texts if not sequence.is_open]
                    engine.abort_all()
                    # Between two turns only the opened one is under way, and that is added anew.
                    with pytest.raises(RequestError, match="was aborted") if running else nullcontext():
                        list(events)
                assert_at_rest(engine)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_broken_document_ends_the_turn_that_would_read_it(
    base: Engine, is_open: bool, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encode_pieces, end = base.tokenizer.encode, base.tokenizer.encode_pieces, base.tokenizer.eos_ids[0]
    monkeypatch.setattr(base.tokenizer, "encode_pieces", lambda texts: (i for t in texts for i in encode_pieces([t])))
    whole = [story(1800 + 9 * piece, 1809 + 9 * piece) for piece in range(pieces)]

    def document() -> Iterator[str]:
        yield from whole
        raise OSError("the disk is gone")

    turns = sum(len(encode(text)) for text in whole) // CONFIG.chunk_tokens

    def respond(sequence: Sequence) -> array[int]:  # who looks ahead first is the last to go on
        slow = sequence.sample == 0 and sequence.turn == turns - 1
        return array("i", [*encode("lamps " * 6 if slow else "a"), end])

    agent = MemoryAgent(scripted(base, respond, is_open=is_open), CONFIG)
    ended = []
    with pytest.raises(OSError, match="the disk is gone"):
        for event in agent.stream(document(), QUESTION):
            ended += [event.turn.kind] if isinstance(event, TurnEnded) else []
    with pytest.raises(OSError, match="the disk is gone"):
        for _, place, _ in agent.rollouts([(document(), QUESTION)], 3):
            ended.append(f"answer of {place}")
    assert ended == ["update"] * turns
    assert_at_rest(agent.engine)


def test_only_what_stays_is_fed(base: Engine) -> None:
    """Not the thinking, not what a stop string may still cut off: no open sequence is ever given up."""
    encode, end = base.tokenizer.encode, base.tokenizer.eos_ids[0]
    says = ["<think>a > b, so keep lamps.</think>the lamps EN or ENDmore", "</think>old </EN"]

    def respond(sequence: Sequence) -> array[int]:
        return array("i", [*encode(says[sequence.turn % 2]), end])

    config = replace(CONFIG, strip_thinking=True, sampling=SamplingParams(stop=("END",)), memory_tokens=80)
    for template in ("memory_first", "chunk_first"):
        engine = scripted(base, respond, is_open=True)
        add = Mock(wraps=engine.add)
        engine.add = add  # type: ignore[method-assign]
        reading = MemoryAgent(engine, replace(config, template=template)).read(story(1800, 1810), QUESTION)
        assert [turn.text for turn in reading.turns[:2]] == [says[0].removesuffix("ENDmore"), says[1]]
        assert all(turn.prefilled_ahead for turn in reading.turns[1:])
        assert add.call_count == len(reading.turns)

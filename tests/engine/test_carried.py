"""Carried KV: exact where nothing moved, never shared, refused where it would mislead, and no page lost."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from palimpsest import AgentConfig, ConfigError, Engine, EngineConfig, MemoryAgent, RequestError, SamplingParams
from palimpsest.engine.carried import RECOMPUTED, Carried
from palimpsest.engine.errors import TraceError
from palimpsest.engine.plan import Plan
from palimpsest.engine.reading import TextProgress, TurnEnded, TurnStarted
from palimpsest.engine.reference import rotate
from palimpsest.engine.rotary import rotary_tables, turn_keys
from palimpsest.engine.sequence import Sequence
from palimpsest.engine.stream import Update
from palimpsest.engine.trace import traced
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch
from palimpsest.tests.engine.test_open_prompt import assert_at_rest
from palimpsest.tests.tiny_models import make_model_folder

LENGTH = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
HEAD = array("i", range(100, 150))
CHUNK = array("i", range(200, 275))
CONFIG = AgentConfig(60, LENGTH, 8, sampling=replace(GREEDY, temperature=1.0, seed=3), memory_kv="carried")
QUESTION = "Who kept the lamps?"
STORY = "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(1800, 1809))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama")


def make(model: Path, **config: object) -> Engine:
    return Engine(model, EngineConfig(**({"backend": "cpu", "threads": 1, "kv_bytes": 1 << 22} | config)))


def run(engine: Engine, prompt: array[int], carried: Carried | None = None, *, keep_kv: bool = False) -> Sequence:
    sequence = engine.add(prompt, GREEDY, keep_kv=keep_kv, carried=carried)
    while not sequence.finished:
        engine.step()
        engine.scheduler.check()
    return sequence


def rows(engine: Engine, sequence: Sequence, length: int) -> list[torch.Tensor]:
    """Keys and values of a kept sequence's first tokens, over all layers."""
    at, size = torch.arange(length), engine.config.page_size
    where = torch.tensor(sequence.pages)[at // size], slice(None), at % size
    return [pages[where] for layer in engine.runner.pages for pages in (layer.key, layer.value)]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize("scaling", [None, YARN])
def test_a_turned_key_is_the_key_of_its_position(scaling: dict[str, object] | None) -> None:
    cos, sin = rotary_tables(16, 1e4, scaling, 1024)
    key = torch.randn(60, 2, 16, generator=torch.Generator().manual_seed(0))
    old, new = torch.arange(900, 960), torch.arange(35, 95)
    exact = rotate(key.double(), new, cos, sin)
    turned = turn_keys(rotate(key, old, cos, sin), old, new, cos, sin)
    assert_as_exact_as_torch(turned, rotate(key, new, cos, sin), exact)
    assert torch.equal(turn_keys(key, old, old, cos, sin), key)


def test_what_has_not_moved_is_exact(model: Path) -> None:
    engine = make(model, page_size=4)
    source = run(engine, HEAD, keep_kv=True)
    prompt = source.tokens + CHUNK
    carrier = run(engine, prompt, Carried.of_response(source, 0, len(HEAD), LENGTH), keep_kv=True)
    assert carrier.counters.carried_tokens == LENGTH - 1 - RECOMPUTED, "the last token's KV was never computed"
    assert engine.scheduler.kept == [carrier]
    plain = make(model, page_size=4)
    exact = run(plain, prompt, keep_kv=True)
    assert (carrier.response, carrier.logprobs) == (exact.response, exact.logprobs)
    pairs = zip(rows(engine, carrier, len(prompt)), rows(plain, exact, len(prompt)), strict=True)
    assert all(torch.equal(moved, computed) for moved, computed in pairs)
    engine.abort(carrier)
    assert_at_rest(engine)


def moved(engine: Engine) -> tuple[array[int], Carried]:
    """A prompt with another head, whose memory is what a finished sequence wrote."""
    source = run(engine, HEAD, keep_kv=True)
    return HEAD[7:] + CHUNK + source.response + CHUNK, Carried.of_response(source, 0, 43 + len(CHUNK), LENGTH)


def test_moved_kv_is_not_shared(model: Path) -> None:
    engine = make(model, page_size=4)
    prompt, carried = moved(engine)
    carrier = run(engine, prompt, carried, keep_kv=True)
    assert carrier.counters.carried_tokens == LENGTH - 1 - RECOMPUTED
    match = engine.scheduler.pool.match(prompt, len(prompt))
    assert len(match.pages) == carried.first // 4 and match.partial == 0
    plain = make(model)
    again, exact = run(engine, prompt), run(plain, prompt, keep_kv=True)
    assert again.logprobs == exact.logprobs != carrier.logprobs
    # In the first layer keys and values know nothing of other tokens.
    double = make(model, backend="reference", dtype="float64")
    of_carrier, computed, truth = (
        [part[carried.first : carried.end] for part in rows(where, sequence, len(prompt))[:2]]
        for where, sequence in ((engine, carrier), (plain, exact), (double, run(double, prompt, keep_kv=True)))
    )
    assert_as_exact_as_torch(of_carrier[0], computed[0], truth[0])
    assert torch.equal(of_carrier[1], computed[1])
    engine.abort(carrier)
    assert_at_rest(engine)


def lose_source(engine: Engine, carrier: Sequence, source: Sequence) -> None:
    engine.abort(source)


def preempt(engine: Engine, carrier: Sequence, source: Sequence) -> None:
    while carrier.computed <= len(carrier.tokens) - len(CHUNK):
        engine.step()
    assert carrier.counters.carried_tokens and not carrier.response
    engine.scheduler._preempt(carrier, Plan(0))


def fail(engine: Engine, carrier: Sequence, source: Sequence) -> None:
    engine.runner._move = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        engine.step()


@pytest.mark.parametrize("lose", [lose_source, preempt, fail])
def test_what_is_lost_is_computed_exactly(model: Path, lose: Callable[[Engine, Sequence, Sequence], None]) -> None:
    engine = make(model, page_size=4, max_step_tokens=64)
    prompt, carried = moved(engine)
    carrier = engine.add(prompt, GREEDY, carried=carried)
    lose(engine, carrier, carried.source)
    while not carrier.finished:
        engine.step()
        engine.scheduler.check()
    exact = run(make(model), prompt)
    assert (carrier.response, carrier.logprobs) == (exact.response, exact.logprobs)
    assert_at_rest(engine)


def test_refusals(model: Path, tmp_path: Path) -> None:
    engine = make(model)
    prompt, carried = moved(engine)
    for params, is_open, given, message in (
        (replace(GREEDY, top_logprobs=1), False, carried, "can't be asked for"),
        (replace(GREEDY, prompt_logprobs=True), False, carried, "can't be asked for"),
        (GREEDY, True, carried, "an open sequence"),
        (GREEDY, False, replace(carried, position=carried.position + 1), "are not those of the prompt"),
        (GREEDY, False, replace(carried, source=run(engine, HEAD)), "has no KV to carry"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add(prompt, params, is_open=is_open, carried=given)
    with pytest.raises(RequestError, match="another engine"):
        make(model).add(prompt, GREEDY, carried=carried)
    engine.add(prompt, GREEDY, carried=carried)
    with pytest.raises(RequestError, match="by another prompt already"):
        engine.add(prompt, GREEDY, carried=carried)
    engine.abort_all()
    engine.step()
    assert_at_rest(engine)
    for options in ({"kv_dtype": "int8"}, {"kv_dtype": "fp8", "backend": "reference"}):
        with pytest.raises(ConfigError, match=f"KV in {options['kv_dtype']} can't be carried"):
            MemoryAgent(make(model, **options), CONFIG)
    with pytest.raises(TraceError, match="can't be resumed"):
        traced(MemoryAgent(engine, CONFIG), STORY, QUESTION, tmp_path / "trace", resume=True)


def test_an_update_lets_kept_pages_go(model: Path) -> None:
    engine = make(model)
    run(engine, HEAD, keep_kv=True)
    with engine.update():
        pass
    assert_at_rest(engine)


@pytest.mark.parametrize("template", ["memory_first", "chunk_first"])
@pytest.mark.parametrize(
    "limits", [{}, {"kv_bytes": 180_000, "page_size": 4}, {"max_step_tokens": 7, "max_sequences": 3, "page_size": 1}]
)
def test_readings_carry_their_memories(
    model: Path, template: str, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model, **limits)
    checked(engine, monkeypatch)
    agent = MemoryAgent(engine, replace(CONFIG, template=template))
    readings = agent.read_many([(STORY[:length], QUESTION) for length in (300, 450, 0, 200)])
    assert_at_rest(engine)
    turns = [turn for reading in readings for turn in reading.turns]
    carried = {turn.carried_tokens for turn in turns if turn.index}
    assert carried == {LENGTH - 1 - RECOMPUTED} | ({0} if "kv_bytes" in limits else set())
    assert not any(turn.carried_tokens for turn in turns if not turn.index)
    assert sum(reading.counters.carried_tokens for reading in readings) == sum(turn.carried_tokens for turn in turns)
    assert not any(turn.prefilled_ahead for turn in turns)


@pytest.mark.parametrize("kind", [TextProgress, TurnEnded, TurnStarted])
def test_a_reading_closed_anywhere_leaves_no_page(model: Path, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(model, page_size=4)
    checked(engine, monkeypatch)
    events = MemoryAgent(engine, CONFIG).stream(STORY, QUESTION)
    started = 0
    for event in events:
        started += isinstance(event, TurnStarted)
        if started >= 2 and isinstance(event, kind):
            break
    assert kind is not TurnEnded or engine.scheduler.kept
    events.close()
    assert_at_rest(engine)


def checked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine's pages be counted after every step."""
    step = engine.step

    def stepped() -> list[Update]:
        updates = step()
        engine.scheduler.check()
        return updates

    monkeypatch.setattr(engine, "step", stepped)

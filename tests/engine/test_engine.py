"""The engine's API on a tiny model: what ends a response, what is refused, and that no update is lost."""

from __future__ import annotations

import re
import shutil
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from palimpsest import ConfigError, Engine, EngineConfig, RequestError, SamplingParams, Segment
from palimpsest.engine.runner import page_bytes
from palimpsest.tests.tiny_models import make_model_folder

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONFIG = EngineConfig(kv_bytes=1 << 22, max_step_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, CONFIG)


def test_text_ids_and_segments_are_the_same_prompt(engine: Engine) -> None:
    text = "The harbour has 27 lamps."
    ids = engine.tokenizer.encode_prompt(text)
    segments = [Segment("head", ids[:3]), Segment("tail", ids[3:])]
    by_text, by_ids, by_segments = engine.generate([text, list(ids), segments], GREEDY)
    assert by_text.token_ids == by_ids.token_ids == by_segments.token_ids
    assert by_text.text == engine.tokenizer.decode(by_text.token_ids)
    assert (by_text.finish_reason, len(by_text.token_ids), by_text.text_tokens) == ("length", 12, 12)


@pytest.mark.parametrize("ids", [[5, 6], (5, 6), array("q", [5, 6]), torch.tensor([5, 6])], ids=lambda ids: repr(ids))
def test_segments_are_of_int32_only(ids: object) -> None:
    with pytest.raises(RequestError, match="segment 'memory' must be array"):
        Segment("memory", ids)  # type: ignore[arg-type]


def test_a_request_that_cannot_be_added_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, replace(CONFIG, backend="cpu"))
    for name, broken in (
        ("Drafter", Mock(for_prompt=Mock(side_effect=MemoryError))),
        ("TextStream", Mock(side_effect=MemoryError)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"palimpsest.engine.engine.{name}", broken)
            with pytest.raises(MemoryError):
                engine.add("The lamps", GREEDY)
        assert not engine.unfinished
    assert len(engine.generate(["The lamps"], GREEDY)) == 1


def test_a_stop_string_across_tokens_ends_text_and_response(engine: Engine) -> None:
    whole = engine.generate(["The lamps"], GREEDY)[0]
    texts = [engine.tokenizer.decode(whole.token_ids[:n]) for n in range(13)]
    end_of_third, end_of_fourth = len(texts[3]), len(texts[4])
    stop = whole.text[end_of_third - 1 : end_of_fourth]
    assert whole.text.find(stop) == end_of_third - 1, "the model repeats itself: choose another prompt"
    stopped = engine.generate(["The lamps"], replace(GREEDY, stop=(stop,)))[0]
    assert stopped.text == whole.text[: end_of_third - 1]
    assert list(stopped.token_ids) == list(whole.token_ids[:4])
    assert (stopped.finish_reason, stopped.text_tokens) == ("stop", 2)
    assert len(stopped.logprobs) == 4


def test_stop_ids_end_a_response_and_are_not_text(engine: Engine) -> None:
    whole = engine.generate(["The lamps"], GREEDY)[0]
    last = whole.token_ids[5]
    first = list(whole.token_ids).index(last)
    stopped = engine.generate(["The lamps"], replace(GREEDY, stop_ids=(last,)))[0]
    assert list(stopped.token_ids) == list(whole.token_ids[: first + 1])
    assert (stopped.finish_reason, stopped.text_tokens) == ("stop", first)
    assert stopped.text == engine.tokenizer.decode(whole.token_ids[:first])


def test_every_eos_id_ends_a_response_unless_ignored_or_too_early(engine: Engine) -> None:
    assert len(engine.tokenizer.eos_ids) == 2
    for eos in engine.tokenizer.eos_ids:
        force = replace(GREEDY, logit_bias={eos: 1e4}, ignore_eos=False)
        completion = engine.generate(["The lamps"], force)[0]
        assert (list(completion.token_ids), completion.finish_reason, completion.text) == ([eos], "stop", "")
        assert len(engine.generate(["The lamps"], replace(force, ignore_eos=True))[0].token_ids) == 12
        late = engine.generate(["The lamps"], replace(force, min_tokens=4))[0]
        assert (len(late.token_ids), late.token_ids[-1]) == (5, eos)


def test_logprobs_are_those_of_the_distribution_before_filters(engine: Engine) -> None:
    params = SamplingParams(temperature=0.5, top_k=1, max_tokens=4, top_logprobs=3, ignore_eos=True)
    completion = engine.generate(["The lamps"], params)[0]
    everywhere = replace(GREEDY, max_tokens=4, top_logprobs=engine.model.config.vocab_size)
    plain = engine.generate(["The lamps"], everywhere)[0]
    assert completion.token_ids == plain.token_ids
    assert completion.top_logprobs is not None and plain.top_logprobs is not None
    for i, best in enumerate(completion.top_logprobs):
        everything = torch.tensor([entry.logprob for entry in plain.top_logprobs[i]]) / 0.5
        assert len(best) == 3
        assert completion.logprobs[i] == best[0].logprob == pytest.approx(float(everything.log_softmax(0)[0]), abs=1e-4)


def test_streamed_text_is_the_generated_text(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, seed=11, ignore_eos=True)
    updates = list(engine.stream("The lamps", params))
    completion = updates[-1].completion
    assert completion is not None
    assert (
        "".join(update.text for update in updates) == completion.text == engine.generate(["The lamps"], params)[0].text
    )


def test_samples_of_a_list_draw_different_numbers_and_a_seed_repeats_them(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, seed=4, ignore_eos=True)
    first, second = (engine.generate(["The lamps"] * 3, params) for _ in range(2))
    assert len({completion.token_ids.tobytes() for completion in first}) == 3
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert [c.logprobs for c in first] == [c.logprobs for c in second]
    turn = engine.add("The lamps", params, sample=0, turn=1)
    while not turn.finished:
        engine.step()
    assert turn.response != first[0].token_ids


def test_drivers_of_one_engine_do_not_lose_each_others_updates(engine: Engine) -> None:
    alone = engine.generate(["The harbour"], GREEDY)[0]
    stream = engine.stream("The harbour", GREEDY)
    next(stream)
    queued = engine.add("The harbour", GREEDY)
    engine.generate(["The lamps"], GREEDY)
    assert list(stream)[-1].completion.token_ids == alone.token_ids  # type: ignore[union-attr]
    seen = []
    while engine.unfinished:
        seen += engine.step()
    assert {update.sequence for update in seen} == {queued}
    assert [token for update in seen for token in update.token_ids] == list(alone.token_ids)


def test_abort_is_legal_in_every_state_and_answered_once(engine: Engine) -> None:
    waiting = engine.add("The harbour", GREEDY)
    engine.abort(waiting)
    engine.abort(waiting)
    running = engine.add("The harbour", GREEDY)
    updates = engine.step()
    engine.abort(running)
    opened = engine.add([], GREEDY, is_open=True)
    engine.abort(opened)
    while engine.unfinished:
        updates += engine.step()
    ended = [update.sequence for update in updates if update.completion is not None]
    assert sorted(sequence.id for sequence in ended) == [waiting.id, running.id, opened.id]
    assert all(u.completion.finish_reason == "abort" for u in updates if u.completion is not None)
    finished = engine.generate(["The harbour"], GREEDY)
    assert finished[0].finish_reason == "length"
    engine.scheduler.check()


def test_closing_a_stream_early_frees_its_pages(engine: Engine) -> None:
    stream = engine.stream("The harbour", GREEDY)
    next(stream)
    stream.close()
    assert not engine.unfinished
    assert engine.scheduler.pool.available == engine.scheduler.pool.num_pages


def test_an_open_prompt_is_the_closed_one(engine: Engine) -> None:
    ids = engine.tokenizer.encode_prompt("The harbour town of Ostrel has 4312 people, two mills and a lighthouse.")
    whole = engine.generate([ids], GREEDY)[0]
    sequence = engine.add(ids[:5], GREEDY, is_open=True)
    for start in range(5, len(ids), 7):
        engine.step()
        engine.extend(sequence, ids[start : start + 7])
    engine.close(sequence)
    while not sequence.finished:
        engine.step()
    assert sequence.response == whole.token_ids


def test_two_engines_in_one_process_do_not_touch_each_other(folder: Path, engine: Engine) -> None:
    other = Engine(folder, replace(CONFIG, page_size=4))
    first, second = engine.stream("The lamps", GREEDY), other.stream("The lamps", GREEDY)
    pairs = list(zip(first, second, strict=True))
    assert [list(a.token_ids) for a, _ in pairs] == [list(b.token_ids) for _, b in pairs]


def test_the_window_ends_a_response(folder: Path) -> None:
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, max_context=16))
    completion = engine.generate([list(range(3, 13))], replace(GREEDY, max_tokens=50))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
    with pytest.raises(RequestError, match="16 tokens and the window holds 16"):
        engine.add(list(range(3, 19)), GREEDY)


def test_what_cannot_be_served_is_refused_with_its_value(engine: Engine, folder: Path) -> None:
    with pytest.raises(RequestError, match="empty"):
        engine.add("", GREEDY)
    with pytest.raises(RequestError, match="token id -1 is outside"):
        engine.add([3, -1], GREEDY)
    with pytest.raises(RequestError, match="not 32-bit token ids"):
        engine.add([3, "x"], GREEDY)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="put a single one into a list"):
        engine.generate("The lamps", GREEDY)
    with pytest.raises(RequestError, match="2 prompts but 1 SamplingParams"):
        engine.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="stop_ids"):
        engine.generate(["a"], replace(GREEDY, stop_ids=(10**6,)))
    queued = engine.add("The lamps", GREEDY)
    with pytest.raises(RequestError, match="unfinished"), engine.update():
        pass
    engine.abort(queued)
    engine.step()
    with pytest.raises(ConfigError, match="max_context=99999 exceeds the model's window of 4096"):
        Engine(folder, replace(CONFIG, max_context=99999))
    with pytest.raises(ConfigError, match="kv_bytes=10 holds not even one page"):
        Engine(folder, replace(CONFIG, kv_bytes=10))


def test_a_refused_prompt_in_a_list_leaves_nothing_behind(folder: Path) -> None:
    engine = Engine(folder, CONFIG)
    with pytest.raises(RequestError):
        engine.generate(["The lamps", ""], GREEDY)
    assert not engine.unfinished
    engine.scheduler.check()


def test_bfloat16_parameters_and_pages_run(folder: Path) -> None:
    exact = Engine(folder, CONFIG).generate(["The lamps"], replace(GREEDY, max_tokens=1))[0]
    engine = Engine(folder, replace(CONFIG, dtype="bfloat16", kv_dtype="bfloat16"))
    assert engine.runner.pages[0].key.dtype == engine.model.dtype == torch.bfloat16
    rounded = engine.generate(["The lamps"], replace(GREEDY, max_tokens=1))[0]
    assert rounded.logprobs == pytest.approx(exact.logprobs, abs=0.1)
    assert rounded.logprobs != exact.logprobs


def test_int8_pages_take_what_they_say_and_change_little(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_dtype must be one of float32, bfloat16, float64, int8"):
        replace(CONFIG, kv_dtype="int4")
    params = replace(GREEDY, max_tokens=1)
    exact = Engine(folder, CONFIG).generate(["The lamps"], params)[0]
    completions = []
    for backend in ("cpu", "reference"):
        engine = Engine(folder, replace(CONFIG, kv_dtype="int8", backend=backend))
        pages, model = engine.runner.pages, engine.model.config
        held = sum(layer.key.nbytes + layer.value.nbytes for layer in pages)
        assert held == len(pages[0].key) * page_bytes(model, CONFIG.page_size, torch.int8)
        assert held / len(pages[0].key) == 2 * len(pages) * model.num_kv_heads * CONFIG.page_size * (model.head_dim + 4)
        completions += engine.generate(["The lamps"], params)
        assert engine.describe()["kv_dtype"] == "int8"
    assert completions[0].logprobs == pytest.approx(completions[1].logprobs, abs=1e-4)
    assert completions[0].logprobs == pytest.approx(exact.logprobs, abs=0.1)
    assert completions[0].logprobs != exact.logprobs


def test_a_request_that_cannot_go_on_does_not_disturb_the_others(engine: Engine) -> None:
    hopeless = replace(GREEDY, min_tokens=2, ignore_eos=False, stop_ids=tuple(range(engine.model.config.vocab_size)))
    alone = engine.generate(["The lamps"], GREEDY)[0]
    bad, good = engine.add("The harbour", hopeless), engine.add("The lamps", GREEDY)
    updates = []
    while engine.unfinished:
        updates += engine.step()
        engine.scheduler.check()
    assert good.response == alone.token_ids
    ended = {update.sequence: update.completion for update in updates if update.completion is not None}
    assert ended[bad].finish_reason == "error" and "no token is left" in (ended[bad].error or "")
    with pytest.raises(RequestError, match="prompt 1 failed after 0 tokens: no token is left"):
        engine.generate(["The lamps", "The harbour"], [GREEDY, hopeless])
    with pytest.raises(RequestError, match="no token is left"):
        list(engine.stream("The harbour", hopeless))
    assert not engine.unfinished


def test_logits_that_are_not_finite_end_their_request_alone(folder: Path) -> None:
    engine = Engine(folder, CONFIG)
    poisoned = engine.tokenizer.encode_prompt("x")[0]
    with engine.update():
        engine.model.model.embed_tokens.weight[poisoned].fill_(float("nan"))
    scored = replace(GREEDY, prompt_logprobs=True)
    for params in (GREEDY, scored):
        good, bad = engine.add("The lamps", params), engine.add([poisoned, 5, 6], params)
        while engine.unfinished:
            engine.step()
        assert (good.finish_reason, bad.finish_reason) == ("length", "error")


def test_a_failed_step_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, CONFIG)
    expected = engine.generate(["The lamps", "The harbour"], GREEDY)
    early, late = engine.stream("The lamps", replace(GREEDY, max_tokens=1)), engine.stream("The harbour", GREEDY)
    next(late)
    run = engine.runner.run

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(engine.runner, "run", fail)
    with pytest.raises(MemoryError):
        next(late)
    monkeypatch.setattr(engine.runner, "run", run)
    engine.scheduler.check()
    assert next(early).completion.token_ids == expected[0].token_ids[:1]  # type: ignore[union-attr]
    assert list(late)[-1].completion.token_ids == expected[1].token_ids  # type: ignore[union-attr]


def test_what_needs_no_token_is_done_while_the_device_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(engine: Engine) -> list[tuple[object, ...]]:
        engine.add("The lamps", GREEDY)
        engine.add(list(range(3, 100)), replace(GREEDY, prompt_logprobs=True, max_tokens=2))
        engine.add(list(range(200, 330)), GREEDY)
        told: list[tuple[object, ...]] = []
        while engine.unfinished:
            for update in engine.step():
                completion = update.completion and replace(update.completion, seconds=0.0)
                told.append((update.sequence.id, update.token_ids, update.text, completion))
            log.append("|")
        return told

    def logged(letter: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (log.append(letter), function(*arguments))[1]

    log: list[str] = []
    late, engine = (
        Engine(folder, replace(CONFIG, max_step_tokens=40, max_sequences=8, graphs=False)) for _ in range(2)
    )
    run = late.runner.run
    monkeypatch.setattr(late.runner, "run", lambda step, settle: (run(step, lambda: None), settle())[0])
    expected = tell(late)
    log.clear()
    monkeypatch.setattr(engine.runner, "run_layers", logged("l", engine.runner.run_layers))
    monkeypatch.setattr(engine.scheduler.pool, "publish", logged("p", engine.scheduler.pool.publish))
    for op in ("draw", "log_sum_exp"):  # what waits for the device
        monkeypatch.setattr(engine.model.ops, op, logged("w", getattr(engine.model.ops, op)))
    assert tell(engine) == expected
    steps = "".join(log).split("|")
    # Pages are known before the tokens are: nothing is drafted here.
    assert any(re.fullmatch("lp+w+", step) for step in steps), steps
    assert not any("wp" in step for step in steps), steps


def test_a_stream_that_was_never_read_is_aborted_when_it_is_closed_or_let_go(engine: Engine) -> None:
    engine.stream("The lamps", GREEDY).close()
    engine.stream("The lamps", GREEDY)
    with engine.stream("The lamps", GREEDY) as stream:
        next(stream)
    assert not engine.unfinished


def test_updates_taken_by_somebody_else_are_an_error_not_a_hang(engine: Engine) -> None:
    stream = engine.stream("The lamps", replace(GREEDY, max_tokens=1))
    engine.step()
    with pytest.raises(RequestError, match="handed out by another call"):
        next(stream)


def test_an_empty_open_sequence_disturbs_nobody(engine: Engine) -> None:
    idle = engine.add(list(range(3, 38)), GREEDY, is_open=True)
    for _ in range(3):
        engine.step()
    empty = engine.add([], GREEDY, is_open=True)
    for _ in range(5):
        engine.step()
    assert idle.counters.preemptions == 0
    engine.abort(idle)
    engine.abort(empty)
    engine.step()


def test_an_engine_refuses_another_engines_sequences(engine: Engine, folder: Path) -> None:
    other = Engine(folder, CONFIG)
    foreign = other.add([3, 4], GREEDY, is_open=True)
    for call in (lambda: engine.abort(foreign), lambda: engine.extend(foreign, [5]), lambda: engine.close(foreign)):
        with pytest.raises(RequestError, match="another engine"):
            call()


@pytest.mark.parametrize("prompts", [None, 5, [None], [b"abc"], [[None]], [3.5]])
def test_prompts_of_other_types_are_refused(engine: Engine, prompts: object) -> None:
    with pytest.raises(RequestError):
        engine.generate(prompts, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        engine.add("The lamps", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        engine.add("The lamps", GREEDY, sample="x")  # type: ignore[arg-type]
    assert not engine.unfinished


def test_prompts_may_be_arrays_or_come_from_an_iterator(engine: Engine) -> None:
    ids = [5, 6, 7]
    listed = engine.generate([ids], GREEDY)[0]
    for prompts in (torch.tensor([ids]), np.array([ids]), (part for part in [tuple(ids)])):
        assert engine.generate(prompts, GREEDY)[0].token_ids == listed.token_ids  # type: ignore[arg-type]


def test_the_weights_fingerprint_follows_the_weights_not_the_path(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    here, there = Engine(folder, CONFIG), Engine(moved, CONFIG)
    assert here.describe()["weights"] == there.describe()["weights"]
    with there.update():
        there.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert here.describe()["weights"] != there.describe()["weights"]


def test_pages_in_float64_need_plain_torch(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"KV pages, not torch\.float64"):
        Engine(folder, replace(CONFIG, kv_dtype="float64", backend="cpu"))
    assert Engine(folder, replace(CONFIG, kv_dtype="float64")).describe()["backend"] == "reference"


def test_weights_and_layers_that_are_replaced_in_an_update_are_seen(folder: Path) -> None:
    engine, expected = Engine(folder, CONFIG), Engine(folder, CONFIG)
    with expected.update():
        for parameter in expected.model.parameters():
            parameter.mul_(-0.5)
        torch.nn.init.zeros_(expected.model.layers[0].mlp.down_proj.weight)
    with engine.update():
        for parameter in engine.model.parameters():
            parameter.data = parameter.data * -0.5

        class Silence(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.zeros(len(x), engine.model.config.hidden_size)

        engine.model.layers[0].mlp.down_proj = Silence()  # type: ignore[assignment]
    assert engine.generate(["The lamps"], GREEDY)[0].logprobs == expected.generate(["The lamps"], GREEDY)[0].logprobs


def test_nothing_runs_while_weights_are_updated(folder: Path) -> None:
    engine = Engine(folder, CONFIG)
    with engine.update():
        for call in (lambda: engine.generate(["The lamps"], GREEDY), engine.step, engine.update().__enter__):
            with pytest.raises(RequestError, match="being updated"):
                call()
    assert engine.generate(["The lamps"], GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("place", ["schedule", "run", "commit", "update"])
def test_a_step_that_fails_anywhere_loses_neither_pages_nor_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine = Engine(folder, CONFIG)
    prompts = ["The lamps", "The harbour town of Ostrel has two mills", "The keeper"]
    params = replace(GREEDY, prompt_logprobs=True)
    expected = engine.generate(prompts, params)
    sequences = [engine.add(prompt, params) for prompt in prompts]
    updates = engine.step() + engine.step()
    owner, name = {
        "schedule": (engine.scheduler.pool, "allocate"),
        "run": (engine.runner, "run_layers"),
        "commit": (engine.scheduler, "_publish"),
        "update": (engine._outbox, "tell"),
    }[place]
    original, calls = getattr(owner, name), 0

    def fail_on_the_second(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == (1 if place == "run" else 2):
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(owner, name, fail_on_the_second)
    with pytest.raises(KeyboardInterrupt):
        while engine.unfinished:
            updates += engine.step()
    monkeypatch.undo()
    engine.scheduler.check()
    while engine.unfinished:
        updates += engine.step()
        engine.scheduler.check()
    for sequence, completion in zip(sequences, expected, strict=True):
        mine = [update for update in updates if update.sequence is sequence]
        assert [token for update in mine for token in update.token_ids] == list(completion.token_ids)
        assert "".join(update.text for update in mine) == completion.text
        assert mine[-1].completion is not None and mine[-1].completion.logprobs == completion.logprobs
        assert mine[-1].completion.prompt_logprobs == completion.prompt_logprobs


def test_a_stream_collected_in_the_middle_of_a_step_ends_after_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(["The harbour"], GREEDY)[0]
    forgotten = [engine.stream("The lamps", GREEDY)]
    next(forgotten[0])
    run = engine.runner.run

    def collect_then_run(*step: object) -> object:
        forgotten.clear()
        return run(*step)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "run", collect_then_run)
    assert engine.generate(["The harbour"], GREEDY)[0].token_ids == expected.token_ids
    monkeypatch.undo()
    engine.scheduler.check()
    assert not engine.unfinished


def test_two_idle_open_sequences_do_not_take_each_others_place_for_ever(folder: Path) -> None:
    engine = Engine(folder, replace(CONFIG, max_sequences=1))
    opened = [engine.add(list(range(3, 20 + i)), GREEDY, is_open=True) for i in range(2)]
    for _ in range(20):
        engine.step()
    assert not engine.has_work
    assert sum(sequence.counters.preemptions for sequence in opened) <= 2
    for sequence in opened:
        engine.close(sequence)
    while engine.unfinished:
        engine.step()
    assert [sequence.finish_reason for sequence in opened] == ["length", "length"]


def test_a_pool_that_cannot_be_allocated_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"lower EngineConfig\.kv_bytes"):
        Engine(folder, replace(CONFIG, kv_bytes=1 << 60))

"""The scheduler with a stand-in for the model: token ids lie where keys and values would, so that a wrong page shows.

The stand-in draws a fixed function of all tokens before, read back from the pages. Whatever the schedule, each
response must be the one that a plain loop gives.
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from palimpsest.engine.config import SamplingParams
from palimpsest.engine.draft import Draft, Drafter
from palimpsest.engine.errors import RequestError
from palimpsest.engine.kv_cache import PagePool
from palimpsest.engine.scheduler import Scheduler
from palimpsest.engine.sequence import Sequence, Status
from palimpsest.engine.step import SpanResult, Step

EOS = 0
PAGE = 4


def next_token(tokens: array[int]) -> int:
    return zlib.crc32(tokens.tobytes()) % 11


def plain_loop(prompt: list[int], params: SamplingParams, window: int = 64) -> list[int]:
    tokens = array("i", prompt)
    while True:
        token = next_token(tokens)
        tokens.append(token)
        done = token == EOS and not params.ignore_eos
        if done or len(tokens) - len(prompt) >= params.max_tokens or len(tokens) >= window:
            return list(tokens[len(prompt) :])


class PageReader:
    """Runs steps on pages of token ids."""

    def __init__(self, num_pages: int) -> None:
        self.pages = [[-1] * PAGE for _ in range(num_pages)]

    def run(self, step: Step) -> list[SpanResult]:
        copied = [(copy.target, list(self.pages[copy.source])) for copy in step.copies]
        for target, slots in copied:
            self.pages[target][:] = slots
        for span in step.spans:
            for i, token in enumerate([*span.ids, *span.draft], span.start):
                self.pages[span.pages[i // PAGE]][i % PAGE] = token
        return [self._result(span) for span in step.spans]

    def _result(self, span) -> SpanResult:
        end = span.start + len(span.ids)
        stored = array("i", [self.pages[span.pages[i // PAGE]][i % PAGE] for i in range(end)])
        assert stored == span.sequence.tokens[:end], "the pages hold other tokens than the sequence"
        first = span.start + span.scored_from
        assert span.scored_targets == span.sequence.tokens[first + 1 : first + 1 + len(span.scored_targets)]
        scores = [-float(target) for target in span.scored_targets]
        drawn = array("i")
        while span.samples and drawn == span.draft[: len(drawn)] and len(drawn) <= len(span.draft):
            drawn.append(next_token(stored + drawn))
        return SpanResult(drawn, [-1.0] * len(drawn), prompt_logprobs=scores)


class Guess(Drafter):
    """Foresees some tokens of a response, one in four of them wrongly."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def propose(self, response: array[int], limit: int, width: int = 1) -> Draft | None:
        tokens = self.sequence.tokens[:]
        length = min(limit, len(tokens) % 6)
        for _ in range(length):
            token = next_token(tokens)
            tokens.append(token + (zlib.crc32(tokens.tobytes()) % 4 == 0))
        return Draft(tokens[len(self.sequence.tokens) :], "memory") if length else None

    def record(self, draft: Draft, accepted: int) -> None:
        assert 0 <= accepted <= len(draft.ids)


class Machine:
    """A scheduler, its page reader and a counter of sequences."""

    def __init__(self, num_pages: int = 32, budget: int = 16, places: int = 8, window: int = 64) -> None:
        self.scheduler = Scheduler(
            PagePool(num_pages, PAGE), max_step_tokens=budget, max_sequences=places, window=window, eos_ids=(EOS,)
        )
        self.reader = PageReader(num_pages)
        self.count = 0

    def add(self, prompt: list[int], params: SamplingParams, *, is_open: bool = False) -> Sequence:
        sequence = Sequence(self.count, array("i", prompt), params, is_open=is_open)
        self.count += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        assert sum(span.rows for span in step.spans) <= self.scheduler.max_step_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_sequences
        assert all(len(span.ids) for span in step.spans)
        self.scheduler.settle(step)  # the device may not have begun
        self.scheduler.commit(step, self.reader.run(step))
        self.scheduler.check()
        return step

    def drain(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            # An open sequence that comes back may find all its tokens resident; then there is nothing to compute.
            assert self.step().spans or not self.scheduler.has_work, "work is left but the step is empty"
        raise AssertionError(f"not finished after {most} steps")


PARAMS = SamplingParams(max_tokens=12)


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    machine = Machine(budget=8)
    first = machine.add([1, 2, 3], replace(PARAMS, ignore_eos=True))
    machine.step()
    machine.add(list(range(1, 40)), PARAMS)
    for _ in range(4):
        before = first.response_length
        assert len(machine.step().spans) == 2
        assert first.response_length == before + 1


def test_admission_waits_for_the_whole_prompt() -> None:
    machine = Machine(num_pages=8, budget=64)
    machine.add(list(range(1, 20)), replace(PARAMS, ignore_eos=True))
    machine.step()
    late = machine.add(list(range(20, 36)), PARAMS)
    machine.step()
    assert (late.status, late.pages) == (Status.WAITING, []), "5 of 8 pages are taken, 4 are needed"
    machine.drain()
    assert late.counters.preemptions == 0


def test_the_sequence_admitted_last_is_preempted_and_still_gives_the_same_response() -> None:
    machine = Machine(num_pages=8, budget=64)
    params = replace(PARAMS, ignore_eos=True, max_tokens=16)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
    early, late = (machine.add(prompt, params) for prompt in prompts)
    machine.drain()
    assert early.counters.preemptions == 0
    assert late.counters.preemptions > 0
    assert late.counters.recomputed_tokens > 0
    assert [list(s.response) for s in (early, late)] == [plain_loop(p, params) for p in prompts]
    assert late.counters.prefilled_tokens == 8, "recomputed tokens are counted apart"


def test_a_repeated_prompt_is_taken_from_resident_pages_but_for_its_last_token() -> None:
    machine = Machine()
    prompt = list(range(1, 15))
    first = machine.add(prompt, PARAMS)
    machine.drain()
    again = machine.add(prompt, PARAMS)
    machine.drain()
    assert (first.counters.cached_tokens, again.counters.cached_tokens) == (0, 13)
    assert again.counters.prefilled_tokens == 1
    assert again.response == first.response


def test_prompt_logprobs_are_owed_once_for_every_token_even_through_preemption() -> None:
    machine = Machine(num_pages=8, budget=8)
    other = machine.add([1, 2, 3, 4], replace(PARAMS, ignore_eos=True, max_tokens=28))
    machine.step()
    scored = machine.add(list(range(1, 22)), replace(PARAMS, prompt_logprobs=True, max_tokens=4))
    machine.drain()
    assert scored.prompt_logprobs == [None, *(-float(token) for token in range(2, 22))]
    assert other.finished and scored.counters.cached_tokens == 0


def test_idle_open_sequences_make_way_and_come_back() -> None:
    machine = Machine(num_pages=8, budget=64)
    idle = machine.add(list(range(1, 18)), PARAMS, is_open=True)
    machine.drain()
    urgent = machine.add(list(range(1, 30)), replace(PARAMS, max_tokens=3))
    machine.drain()
    assert urgent.finished and idle.counters.preemptions == 1
    machine.scheduler.extend(idle, [5, 6])
    machine.scheduler.close(idle)
    machine.drain()
    assert list(idle.response) == plain_loop([*range(1, 18), 5, 6], PARAMS)


def test_an_open_prompt_is_computed_whole_and_closed_as_it_is() -> None:
    for length in (7, 8, 9):
        machine = Machine()
        opened = machine.add(list(range(1, length + 1)), PARAMS, is_open=True)
        machine.drain()
        assert (opened.computed, opened.counters.prefilled_ahead) == (length, length)
        machine.scheduler.close(opened)
        machine.drain()
        assert list(opened.response) == plain_loop(list(range(1, length + 1)), PARAMS)
        assert 0 < opened.counters.recomputed_tokens <= PAGE


def test_open_prompts_that_are_resident_never_take_each_others_place_for_ever() -> None:
    machine = Machine(places=1)
    prompt = list(range(1, 15))
    machine.add(prompt, PARAMS)
    machine.drain()
    opened = [machine.add(prompt[:length], PARAMS, is_open=True) for length in (9, 12)]
    machine.drain()
    for sequence in opened:
        machine.scheduler.close(sequence)
        machine.drain()
        assert list(sequence.response) == plain_loop(list(sequence.tokens[: sequence.prompt_length]), PARAMS)
        assert sequence.counters.cached_tokens == sequence.prompt_length
        assert sequence.counters.prefilled_tokens == 0, "its last page was computed again"


def test_open_sequences_yield_places_and_pages_to_closed_ones() -> None:
    for limits in ({"places": 2}, {"num_pages": 8}):
        machine = Machine(budget=64, **limits)
        first = machine.add([1, 2, 3], replace(PARAMS, ignore_eos=True))
        machine.step()
        opened = machine.add(list(range(4, 16)), PARAMS, is_open=True)
        machine.step()
        assert opened.status is Status.RUNNING
        second = machine.add(list(range(16, 32)), replace(PARAMS, ignore_eos=True))
        machine.step()
        assert [s.status for s in (first, second, opened)] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
        machine.scheduler.extend(opened, [1])
        machine.scheduler.close(opened)
        machine.drain()
        assert list(opened.response) == plain_loop([*range(4, 16), 1], PARAMS)


def test_decoding_then_closed_prompts_then_open_ones() -> None:
    machine = Machine(budget=10)
    decoding = machine.add([1, 2, 3], replace(PARAMS, ignore_eos=True))
    machine.step()
    opened = machine.add([4, 5], PARAMS, is_open=True)
    machine.step()
    closed = machine.add(list(range(34, 64)), PARAMS)
    machine.step()
    machine.scheduler.extend(opened, range(6, 26))
    for expected in ([decoding, closed], [decoding, closed], [decoding, closed, opened], [decoding, closed, opened]):
        assert [span.sequence for span in machine.step().spans] == expected


def test_prompts_that_share_pages_are_computed_once() -> None:
    machine = Machine(budget=8)
    prompt = list(range(1, 31))
    group = [machine.add([*prompt, extra], replace(PARAMS, max_tokens=3)) for extra in (40, 41, 42)]
    other = machine.add([50, 51, 52], PARAMS)
    machine.step()
    machine.step()
    assert [s.status for s in group] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    assert other.status is Status.WAITING, "the budget went to the first prompt"
    machine.drain()
    assert [s.counters.cached_tokens for s in group] == [0, 28, 28]
    assert sum(s.counters.prefilled_tokens for s in group) == 31 + 2 * 3


def test_a_held_back_prompt_holds_up_nobody_and_never_waits_for_what_does_not_go_on() -> None:
    machine = Machine(budget=8)
    prompt = list(range(1, 31))
    first = machine.add(prompt[:20], PARAMS, is_open=True)
    machine.step()
    held = machine.add(prompt, PARAMS)
    other = machine.add([50], replace(PARAMS, max_tokens=1))
    machine.step()
    assert held.status is Status.WAITING
    machine.drain()
    assert held.finished and other.finished and held.counters.cached_tokens == 20, "the open one has stalled"
    for ends in ("abort", "preempt"):
        machine = Machine(budget=8)
        first, held = (machine.add(prompt, PARAMS) for _ in range(2))
        machine.step()
        machine.step()
        assert held.status is Status.WAITING
        if ends == "abort":
            machine.scheduler.finish(first, "abort")
        else:
            machine.scheduler.recover([first, held])
        machine.drain()
        assert held.finished and held.counters.cached_tokens == (16 if ends == "abort" else 28)


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    machine = Machine(num_pages=4, window=64)
    for prompt, message in (([], "empty"), ([1] * 64, "64 tokens"), ([1] * 8, "KV pool holds 16")):
        with pytest.raises(RequestError, match=message):
            machine.add(prompt, PARAMS)
    opened = machine.add([], replace(PARAMS, max_tokens=2), is_open=True)
    with pytest.raises(RequestError, match="empty"):
        machine.scheduler.close(opened)
    with pytest.raises(RequestError, match="KV pool"):
        machine.scheduler.extend(opened, [1] * 15)
    machine.scheduler.extend(opened, [1] * 3)
    machine.scheduler.close(opened)
    with pytest.raises(RequestError, match="closed"):
        machine.scheduler.extend(opened, [1])
    machine.drain()
    with pytest.raises(RequestError, match="finished"):
        machine.scheduler.close(opened)
    assert not machine.scheduler.unfinished


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, list[int], int]]:
    action = st.sampled_from(["add", "add", "open", "extend", "close", "abort", "step", "step", "step"])
    return draw(
        st.lists(
            st.tuples(action, st.lists(st.integers(1, 3), min_size=1, max_size=20), st.integers(0, 7)), max_size=40
        )
    )


@settings(max_examples=300, deadline=None)
@given(schedules(), st.integers(12, 30), st.integers(4, 24), st.integers(1, 4), st.booleans(), st.booleans())
def test_any_schedule_gives_the_plain_loops_responses(
    schedule: list[tuple[str, list[int], int]], num_pages: int, budget: int, places: int, scored: bool, drafts: bool
) -> None:
    machine = Machine(num_pages=num_pages, budget=budget, places=places, window=40)
    params = SamplingParams(max_tokens=10, prompt_logprobs=scored)
    prompts: dict[Sequence, list[int]] = {}
    for action, ids, which in schedule:
        chosen = list(prompts)[which % len(prompts)] if prompts else None
        if action in ("add", "open"):
            is_open = action == "open"
            sequence = machine.add(ids, replace(params, prompt_logprobs=scored and not is_open), is_open=is_open)
            sequence.drafter = Guess(sequence) if drafts else None
            prompts[sequence] = list(ids)
        elif action == "step":
            machine.step()
        elif chosen is not None and chosen.is_open and not chosen.finished and action == "extend":
            if len(chosen.tokens) + len(ids) + 1 <= 40:
                machine.scheduler.extend(chosen, ids)
                prompts[chosen] += ids
        elif chosen is not None and chosen.is_open and not chosen.finished and action == "close":
            machine.scheduler.close(chosen)
        elif chosen is not None and action == "abort":
            machine.scheduler.finish(chosen, "abort")
        machine.scheduler.check()
    for sequence in prompts:
        if sequence.is_open and not sequence.finished:
            machine.scheduler.close(sequence)
    machine.drain()
    assert not machine.scheduler.unfinished
    assert machine.scheduler.pool.available == num_pages
    for sequence, prompt in prompts.items():
        if sequence.finish_reason != "abort":
            assert list(sequence.response) == plain_loop(prompt, sequence.params, window=40)
            if sequence.params.prompt_logprobs:
                assert sequence.prompt_logprobs == [None, *(-float(token) for token in prompt[1:])]

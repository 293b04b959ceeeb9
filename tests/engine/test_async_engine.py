"""The asynchronous twin: the same completions, side by side, and nothing left behind when a task is cancelled."""

from __future__ import annotations

import asyncio
import gc
import inspect
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from palimpsest import AsyncEngine, Engine, EngineConfig, RequestError, SamplingParams
from palimpsest.engine.acceptance import Acceptance
from palimpsest.engine.carried import RECOMPUTED, Carried
from palimpsest.engine.draft import Drafter
from palimpsest.engine.sequence import Completion, Sequence
from palimpsest.tests.tiny_models import make_model_folder

PARAMS = SamplingParams(max_tokens=10, seed=2, ignore_eos=True)
LOOKUP = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_model_folder(tmp_path_factory.mktemp("model"), "llama")
    return Engine(folder, EngineConfig(kv_bytes=1 << 23))


def run(engine: Engine, test: Callable[[AsyncEngine], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        wrapper = AsyncEngine(engine)
        try:
            await asyncio.wait_for(test(wrapper), timeout=60)
        finally:
            await wrapper.aclose()
            await wrapper.aclose()

    asyncio.run(body())
    assert not engine.unfinished
    assert engine.scheduler.pool.available == engine.scheduler.pool.num_pages
    engine.scheduler.check()


def test_generate_and_stream_equal_the_synchronous_ones(engine: Engine) -> None:
    prompts = ["The lamps", "The harbour", "The keeper"]
    expected = engine.generate(prompts, PARAMS)

    async def test(wrapper: AsyncEngine) -> None:
        given = await wrapper.generate(prompts, PARAMS)
        assert [c.token_ids for c in given] == [c.token_ids for c in expected]
        updates = [update async for update in wrapper.stream(prompts[1], PARAMS, sample=1)]
        assert "".join(update.text for update in updates) == expected[1].text

    run(engine, test)


def test_twins_take_the_same_arguments() -> None:
    twins = [name for name in vars(AsyncEngine) if not name.startswith("_") and callable(getattr(Engine, name, None))]
    assert {"add", "extend", "close", "abort", "stream", "generate"} <= set(twins)
    for name in twins:
        parameters = [
            list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in (Engine, AsyncEngine)
        ]
        kinds = [[(p.name, p.kind, p.default) for p in of_one] for of_one in parameters]
        assert kinds[0] == kinds[1], name


def test_ordinary_requests_are_drafted_and_drafters_are_passed_on(engine: Engine) -> None:
    prompt = array("i", [*range(100, 130)] * 3)
    plain = engine.generate([prompt], LOOKUP)[0]
    known = Drafter({"memory": plain.token_ids}, Acceptance(engine.step_cost), repeats=True)
    late = Drafter({"memory": plain.token_ids}, Acceptance(engine.step_cost), repeats=True)

    async def test(wrapper: AsyncEngine) -> None:
        ordinary = (await wrapper.generate([prompt], LOOKUP))[0]
        given = await completed(wrapper, await wrapper.add(prompt, LOOKUP, drafter=known))
        opened = await wrapper.add(prompt, LOOKUP, is_open=True)
        await wrapper.close(opened, drafter=late)
        closed = await completed(wrapper, opened)
        assert [c.token_ids for c in (ordinary, given, closed)] == [plain.token_ids] * 3
        assert ordinary.counters.drafts["prompt"].proposed
        assert [c.counters.decode_steps for c in (given, closed)] == [0, 0]

    run(engine, test)


def test_kv_is_carried_on(engine: Engine) -> None:
    prompt = array("i", range(100, 150))

    async def test(wrapper: AsyncEngine) -> None:
        source = await wrapper.add(prompt, LOOKUP, keep_kv=True)
        written = (await completed(wrapper, source)).token_ids
        carried = Carried.of_response(source, 0, len(prompt), len(written))
        carrier = await wrapper.add(prompt + written + prompt, LOOKUP, carried=carried)
        moved = (await completed(wrapper, carrier)).counters.carried_tokens
        assert moved == len(written) - 1 - RECOMPUTED

    run(engine, test)


async def completed(wrapper: AsyncEngine, sequence: Sequence) -> Completion:
    completion = [update async for update in wrapper.updates(sequence)][-1].completion
    assert completion is not None
    return completion


def test_requests_of_different_tasks_share_steps(engine: Engine) -> None:
    async def test(wrapper: AsyncEngine) -> None:
        slow = await wrapper.add("The lamps", LONG)
        quick = await wrapper.generate(["The harbour"], PARAMS)
        assert quick[0].finish_reason == "length"
        assert not slow.finished
        await wrapper.abort(slow)
        last = [update async for update in wrapper.updates(slow)][-1]
        assert last.completion is not None and last.completion.finish_reason == "abort"

    run(engine, test)


@pytest.mark.parametrize("moment", ["adding", "running"])
def test_cancelling_a_task_aborts_its_request(engine: Engine, moment: str) -> None:
    async def test(wrapper: AsyncEngine) -> None:
        async def reader() -> None:
            async for _ in wrapper.stream("The lamps", LONG):
                pass

        task = asyncio.create_task(reader())
        await asyncio.sleep(0 if moment == "adding" else 0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await wrapper.generate(["The harbour"], PARAMS))[0].finish_reason == "length"

    run(engine, test)


def test_a_refused_request_raises_in_its_own_task_only(engine: Engine) -> None:
    async def test(wrapper: AsyncEngine) -> None:
        good = asyncio.create_task(wrapper.generate(["The lamps"], PARAMS))
        with pytest.raises(RequestError, match="empty"):
            await wrapper.generate(["The harbour", ""], PARAMS)
        assert (await good)[0].finish_reason == "length"

    run(engine, test)


def test_a_failing_step_reaches_every_reader(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(wrapper: AsyncEngine) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("no memory")

        monkeypatch.setattr(engine.runner, "run", fail)
        results = await asyncio.gather(
            wrapper.generate(["The lamps"], PARAMS), wrapper.generate(["The harbour"], PARAMS), return_exceptions=True
        )
        assert [str(result) for result in results] == ["no memory", "no memory"]
        monkeypatch.undo()
        assert (await wrapper.generate(["The lamps"], PARAMS))[0].finish_reason == "length"

    run(engine, test)


def test_closing_ends_what_is_under_way_and_slow_readers_still_get_their_last_update(engine: Engine) -> None:
    async def test(wrapper: AsyncEngine) -> None:
        reading = asyncio.Event()

        async def slow_reader() -> str:
            async for update in wrapper.stream("The lamps", LONG):
                reading.set()
                await asyncio.sleep(0.02)
                if update.completion is not None:
                    return update.completion.finish_reason
            return "lost"

        await wrapper.add("The harbour", LONG)
        reader = asyncio.create_task(slow_reader())
        await reading.wait()
        await wrapper.aclose()
        with pytest.raises(RequestError, match="closed"):
            await wrapper.add("The lamps", PARAMS)
        assert await reader == "abort"

    run(engine, test)


def test_open_prompts_grow_while_others_run(engine: Engine) -> None:
    ids = engine.tokenizer.encode_prompt("The harbour has 27 lamps.")
    expected = engine.generate([ids], PARAMS)[0]

    async def test(wrapper: AsyncEngine) -> None:
        opened = await wrapper.add(ids[:4], PARAMS, is_open=True)
        await wrapper.generate(["The lamps"], PARAMS)
        await wrapper.extend(opened, ids[4:])
        await wrapper.close(opened)
        last = [update async for update in wrapper.updates(opened)][-1].completion
        assert last is not None and last.token_ids == expected.token_ids
        with pytest.raises(RequestError, match="not added here"):
            await anext(wrapper.updates(opened))

    run(engine, test)


def test_cancelled_requests_leave_no_queues(engine: Engine) -> None:
    async def test(wrapper: AsyncEngine) -> None:
        for wait in (0, 0.001, 0.01, 0.03) * 3:
            task = asyncio.create_task(wrapper.generate(["The lamps", "The harbour"], LONG))
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        del task
        await wrapper.generate(["The keeper"], PARAMS)
        await asyncio.sleep(0.1)
        gc.collect()
        # A traceback or the last step may hold one a little longer; 24 were cancelled.
        assert len(wrapper._queues) <= 2

    run(engine, test)


def test_an_event_loop_that_ends_early_leaves_the_wrapper_usable(engine: Engine) -> None:
    wrapper = AsyncEngine(engine)

    async def leave() -> None:
        await wrapper.add("The lamps", LONG)
        await asyncio.sleep(0.05)

    async def come_back() -> None:
        completion = (await wrapper.generate(["The harbour"], PARAMS))[0]
        assert completion.finish_reason == "length"
        await wrapper.aclose()

    asyncio.run(leave())
    asyncio.run(asyncio.wait_for(come_back(), timeout=60))
    assert not engine.unfinished


def test_a_request_added_while_closing_is_refused_not_forgotten(engine: Engine) -> None:
    async def test(wrapper: AsyncEngine) -> None:
        await wrapper.add("The lamps", LONG)
        adding = asyncio.create_task(wrapper.generate(["The harbour"], LONG))
        await asyncio.sleep(0)
        closing = asyncio.create_task(wrapper.aclose())
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="closed"):
            await wrapper.add("The keeper", LONG, is_open=True)
        results = await asyncio.gather(adding, closing, return_exceptions=True)
        assert isinstance(results[0], RequestError) or results[0][0].finish_reason == "abort"  # type: ignore[index]

    run(engine, test)

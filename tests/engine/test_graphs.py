"""Graph = eager: the same ids, log-probabilities and pages, bit for bit, whatever a small step consists of.

A tape stands in for the GPU. It keeps the calls of ops with the tensors that they read and wrote, and nothing of the
Python around them; a replay makes these calls again. So what a recorded function reads must lie where it lay then.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest import Completion, ConfigError, Engine, EngineConfig, SamplingParams
from palimpsest.engine import loaded_model, lora, memory
from palimpsest.engine.acceptance import Acceptance
from palimpsest.engine.draft import Drafter
from palimpsest.engine.graphs import GraphPlan, Graphs
from palimpsest.engine.layer_stack import LayerStack
from palimpsest.engine.model import Batch, Decoder
from palimpsest.engine.runner import Runner, page_bytes
from palimpsest.engine.step import Span
from palimpsest.tests.tiny_models import make_model_folder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CONFIG = EngineConfig(kv_bytes=1 << 20, max_step_tokens=40, max_sequences=8, max_context=200, backend="cpu")
SIZES = (1, 2, 4, 8, 16)
PROMPT = torch.randint(3, 500, (70,), generator=torch.Generator().manual_seed(5)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Tape(TorchDispatchMode):
    """One recording: calls in order, of torch's ops and of the backend's."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model, self.calls = model, []  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        with self.watching_ops(), self:
            out = run()

        def replay() -> Tensor:
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                pairs = [(result, again)] if isinstance(result, Tensor) else zip(result, again, strict=True)
                for old, new in pairs:
                    old.copy_(new)
            return out

        return replay

    @contextmanager
    def watching_ops(self) -> Iterator[None]:
        owners = [module for module in self.model.modules() if hasattr(module, "ops")]
        ops = self.model.ops
        try:
            for module in owners:
                module.ops = _Watched(ops, self)  # type: ignore[assignment]
            yield
        finally:
            for module in owners:
                module.ops = ops


class _Watched:
    def __init__(self, ops: Any, tape: Tape) -> None:
        self._ops, self._tape = ops, tape

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)

        def call(*args: Any) -> Any:
            with torch._C._DisableTorchDispatch():
                out = op(*args)
            self._tape.calls.append((op, args, {}, out))
            return out

        return call


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerStack, "fits", lambda *_: False)


def make_engine(folder: Path, *, graphs: bool, **options: Any) -> Engine:
    """An engine whose pages hold NaN where nothing was written."""
    engine = Engine(folder, replace(CONFIG, **options))
    if graphs:
        record(engine, [])
    for layer in engine.runner.pages:
        for pages in (layer.key, layer.value):
            pages.view(torch.uint8).fill_(255)
    return engine


def plan_of(model: Decoder, window: int, tapes: list[Tape]) -> GraphPlan:
    def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        tapes.append(Tape(model))
        return tapes[-1].record(run)

    return GraphPlan(lambda: record, SIZES, CONFIG.max_sequences, window)


def record(engine: Engine, tapes: list[Tape]) -> None:
    engine.runner = Runner(
        engine.model,
        num_pages=engine.scheduler.pool.num_pages,
        page_size=engine.config.page_size,
        kv_dtype=engine.runner.pages[0].key.dtype,
        eos_ids=engine.tokenizer.eos_ids,
        graphs=plan_of(engine.model, engine.window, tapes),
    )


def complete(engine: Engine) -> list[Completion]:
    """Prefill in pieces beside decoding, scores of a prompt, right and wrong drafts, a page that is partly cached."""
    done = engine.generate([PROMPT], GREEDY)

    def step(times: int) -> None:
        for _ in range(times):
            done.extend(update.completion for update in engine.step() if update.completion is not None)

    engine.add([5, 6, 7], replace(GREEDY, temperature=1.0, max_tokens=30))
    step(2)
    right = done[0].token_ids
    for prompt, draft in ((PROMPT, right[:5]), (PROMPT[:50], array("i", [*right[:2], 1, 1, 1])), (PROMPT, right)):
        engine.add(prompt, GREEDY, drafter=Drafter({"memory": draft}, Acceptance(), repeats=True))
        step(2)
    engine.add(PROMPT[::-1], SamplingParams(seed=3, max_tokens=9, prompt_logprobs=True))
    step(40)
    assert len(done) == 6
    return done


@pytest.mark.parametrize(("model_type", "dtype"), [("qwen3", "float32"), ("qwen2", "bfloat16")])
def test_graph_is_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, dtype: str) -> None:
    folder = make_model_folder(tmp_path, model_type)
    eager = make_engine(folder, graphs=False, dtype=dtype)
    expected = complete(eager)
    ways: dict[int, set[tuple[int, ...]]] = {}
    fitting = Graphs.fitting

    def noted(self: Graphs, spans: tuple[Span, ...], tokens: int) -> Any:
        graph = fitting(self, spans, tokens)
        ways.setdefault(0 if graph is None else graph.tokens, set()).add(tuple(span.rows for span in spans))
        return graph

    monkeypatch.setattr(Graphs, "fitting", noted)
    engine = make_engine(folder, graphs=True, dtype=dtype)
    given = complete(engine)
    for ours, theirs in zip(given, expected, strict=True):
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)
        assert ours.prompt_logprobs == theirs.prompt_logprobs
    for ours, theirs in zip(engine.runner.pages, eager.runner.pages, strict=True):
        for mine, plain in ((ours.key, theirs.key), (ours.value, theirs.value)):
            assert torch.equal(mine[:-1].view(torch.uint8), plain.view(torch.uint8))
    assert (1,) in ways[1] and min(map(sum, ways[0])) > SIZES[-1]
    small = {rows for size, rows in ((size, rows) for size in SIZES for rows in ways.get(size, ()))}
    assert any(sum(rows) not in SIZES for rows in small), "no step was padded"
    assert any(len(rows) > 1 and max(rows) > 1 for rows in small), "no draft beside another span"


def test_where_bits_depend_on_company_only_single_rows_are_replayed(tmp_path: Path) -> None:
    engine = make_engine(make_model_folder(tmp_path, "llama"), graphs=True, backend="reference")
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.sizes == SIZES[:-1]  # what 8 sequences can need
    one, two = (span_of(rows) for rows in (1, 2))
    assert graphs.fitting((one, one, one), 3).tokens == 4  # type: ignore[union-attr]
    assert graphs.fitting((one, two), 3) is None
    assert graphs.fitting((one,) * 9, 9) is None


def span_of(rows: int) -> Span:
    ids = array("i", range(rows))
    return Span(None, 0, ids, (0,), True, 0, array("i"))  # type: ignore[arg-type]


def test_weights_changed_in_place_are_seen_and_other_layers_recorded_anew(tmp_path: Path) -> None:
    engine = make_engine(make_model_folder(tmp_path, "llama"), graphs=False)
    tapes: list[Tape] = []
    record(engine, tapes)
    graphs, count = engine.runner.graphs, len(tapes)
    with engine.update():
        engine.model.layers[0].mlp.up_proj.weight.mul_(3.0)
    assert engine.runner.graphs is graphs and count == len(SIZES)
    changed = engine.generate([PROMPT], GREEDY)[0]
    with engine.update():
        weight = engine.model.layers[0].mlp.up_proj.weight
        engine.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    assert len(tapes) == 2 * len(SIZES)
    plain = make_engine(tmp_path, graphs=False)
    with plain.update():
        plain.model.layers[0].mlp.up_proj.weight.mul_(3.0)
    expected = plain.generate([PROMPT], GREEDY)[0]
    for given in (changed, engine.generate([PROMPT], GREEDY)[0]):
        assert (given.token_ids, given.logprobs) == (expected.token_ids, expected.logprobs)
    lora.add(engine, lora.LoraConfig(rank=2))
    assert engine.runner.graphs is None


@pytest.mark.parametrize("taken", [0, 1 << 20, 1 << 30])
def test_the_pool_gets_a_share_of_what_graphs_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(loaded_model, "_graph_plan", lambda _, model, window: plan_of(model, window, []))
    monkeypatch.setattr(loaded_model, "bytes_held", lambda make, _: tried.append(make()) or taken)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 3 << 20)
    folder, config = (
        make_model_folder(tmp_path, "llama"),
        replace(CONFIG, kv_bytes=None, kv_share=0.25, max_context=None),
    )
    if taken > 3 << 20:
        with pytest.raises(ConfigError, match="not even one page"):
            Engine(folder, config)
        return
    engine = Engine(folder, config)
    assert engine.graph_bytes == taken and tried[0].graphs is not None and len(tried[0].pages[0].key) == 2
    pages = engine.scheduler.pool.num_pages
    assert pages == ((3 << 20) - taken) // 4 // page_bytes(engine.model.config, 16, torch.float32)
    assert len(engine.runner.pages[0].key) == pages + 1


def test_what_is_tried_for_its_size_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100, 70]
    monkeypatch.setattr(memory, "available_bytes", lambda _: free.pop(0))
    made = torch.empty(1)
    there = weakref.ref(made)
    made_once = [made]
    del made
    assert memory.bytes_held(made_once.pop, torch.device("cpu")) == 30 and there() is None


def test_steps_and_recordings_run_on_the_gpu_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current one is: in every new thread, as AsyncEngine's, it is the first."""
    engine = make_engine(make_model_folder(tmp_path, "llama"), graphs=False)
    current, seen = [0], []  # type: ignore[var-annotated]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    run = Decoder.forward

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(current[-1])
        return run(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Tensor, "get_device", lambda _: 1)
    monkeypatch.setattr(Decoder, "forward", watched)
    engine.generate([PROMPT], replace(GREEDY, max_tokens=2))
    steps = len(seen)
    record(engine, [])
    assert 0 < steps < len(seen) and set(seen) == {1} and current == [0]


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_recorded_without_exactness_has_a_span_for_each_row(exact: bool) -> None:
    """So that it is by the kernels that take single rows."""
    rows: dict[int, int] = {}

    def run(batch: Batch) -> Tensor:
        rows[len(batch.ids)] = len(batch.spans.kv_length)
        return batch.ids

    plan = GraphPlan(lambda: lambda run: run, SIZES, 5, 200)
    for graph in Graphs(run, plan, 16, 0, torch.device("cpu"), exact=exact)._graphs.values():
        graph._replay()
    assert rows == ({1: 1, 2: 2, 4: 4, 8: 6, 16: 6} if exact else {1: 1, 2: 2, 4: 4, 8: 8})


def test_plans_fit_the_scheduler() -> None:
    assert GraphPlan.within(list, 70, 8, 4096).sizes == (1, 2, 4, 8, 16, 32, 64)  # type: ignore[arg-type]
    assert GraphPlan.within(list, 2048, 8, 100).sizes[-1] == 96  # type: ignore[arg-type]

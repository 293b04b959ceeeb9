"""The layer stack in one C++ call gives the bits of the ops one by one."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest import Engine, EngineConfig, SamplingParams
from palimpsest.engine import kv_rows
from palimpsest.engine.layer_stack import LayerStack
from palimpsest.engine.model import Batch
from palimpsest.engine.runner import Runner
from palimpsest.engine.sequence import Sequence
from palimpsest.engine.step import Span, Step
from palimpsest.engine.step_inputs import StepInputs
from palimpsest.tests.tiny_models import make_model_folder

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_attention_heads": 7, "hidden_size": 56}),
    ("qwen3", {"head_dim": 20, "intermediate_size": 300}),
]


def step_of(engine: Engine, lengths: list[int], cached: int, shared: int = 0) -> Step:
    """Spans of these lengths; each follows `cached` tokens that are taken to lie in pages: first those that all share,
    then some of its own."""
    spans, next_page = [], shared
    for i, length in enumerate(lengths):
        count = engine.scheduler.pool.pages_for(cached + length) - shared
        pages = (*range(shared), *range(next_page + count - 1, next_page - 1, -1))
        next_page += count
        ids = array("i", [(7 * i + 13 * k) % engine.model.config.vocab_size for k in range(length)])
        sequence = Sequence(i, ids, SamplingParams())
        spans.append(Span(sequence, cached, ids, pages, False, 0, array("i")))
    return Step((), tuple(spans))


def batch_of(runner: Runner, spans: tuple[Span, ...]) -> Batch:
    inputs = StepInputs.pack(spans, runner.page_size)
    return inputs.views(inputs.host())[0]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "int8")],
)
@pytest.mark.parametrize(("model_type", "overrides"), MODELS)
def test_one_call_is_op_by_op(
    tmp_path: Path, model_type: str, overrides: dict[str, Any], dtype: str, kv_dtype: str
) -> None:
    folder = make_model_folder(tmp_path, model_type, **overrides)
    engine = Engine(folder, EngineConfig(dtype=dtype, kv_dtype=kv_dtype, kv_bytes=1 << 23, backend="cpu"))
    runner = engine.runner
    assert isinstance(runner.run_layers, LayerStack)
    op_by_op = partial(engine.model, pages=runner.pages)
    shape = (*runner.pages[0].key.shape[:3], engine.model.config.head_dim)
    for lengths, cached, wanted in (
        ([1], 0, None),
        ([1, 1, 1], 37, [1, 0, 1]),
        ([5, 1, 130, 2], 20, None),
        ([5, 1, 130, 2], 20, [3, 1, 40, 0]),
        ([700], 3, [0]),
    ):
        batch = batch_of(runner, step_of(engine, lengths, cached).spans)
        if wanted is not None:
            batch = replace(batch, wanted_start=torch.tensor([0, *accumulate(wanted)], dtype=torch.int32))
        results = []
        for run in (op_by_op, runner.run_layers):
            for layer in runner.pages:
                layer.key[:] = kv_rows.pack(torch.full(shape, 0.25), layer.key.dtype)
                layer.value[:] = kv_rows.pack(torch.full(shape, -0.5), layer.value.dtype)
            with torch.inference_mode():
                hidden = run(batch)
            results.append((hidden, [(layer.key.clone(), layer.value.clone()) for layer in runner.pages]))
        (expected, expected_pages), (given, given_pages) = results
        assert len(expected) == sum(lengths if wanted is None else wanted)
        assert torch.equal(given, expected)
        for (key, value), (expected_key, expected_value) in zip(given_pages, expected_pages, strict=True):
            assert torch.equal(key, expected_key) and torch.equal(value, expected_value)


def test_one_thread_is_two(tmp_path: Path) -> None:
    engine = Engine(make_model_folder(tmp_path, "llama"), EngineConfig(kv_bytes=1 << 23, backend="cpu"))
    batch = batch_of(engine.runner, step_of(engine, [200, 1, 1, 30], 5).spans)
    threads, hidden = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for layer in engine.runner.pages:
                layer.key.fill_(0.25)
                layer.value.fill_(-0.5)
            with torch.inference_mode():
                hidden.append(engine.runner.run_layers(batch))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*hidden)


def test_a_group_is_each_of_its_sequences_alone(tmp_path: Path) -> None:
    engine = Engine(make_model_folder(tmp_path, "llama"), EngineConfig(kv_bytes=1 << 23, backend="cpu"))
    runner, spans = engine.runner, step_of(engine, [1, 3, 1, 1], 300, shared=17).spans
    results = []
    for batches in ([spans], [[span] for span in spans]):
        for layer in runner.pages:
            layer.key.normal_(generator=torch.Generator().manual_seed(1))
            layer.value.normal_(generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            results.append(torch.cat([runner.run_layers(batch_of(runner, tuple(batch))) for batch in batches]))
    assert torch.equal(*results)


def test_a_layer_replaced_from_outside_or_plain_torch_is_run_op_by_op(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama")
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, backend="cpu"))
    engine.model.layers[1].mlp.up_proj = torch.nn.Linear(48, 96, bias=False)
    assert not LayerStack.fits(engine.model, engine.runner.pages)
    plain = Engine(folder, EngineConfig(kv_bytes=1 << 22, backend="reference"))
    assert not LayerStack.fits(plain.model, plain.runner.pages)

"""A step's numbers in one piece of memory: what lies where, and that nothing is read but the device's copy of it."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from palimpsest import Completion, Engine, EngineConfig, SamplingParams
from palimpsest.engine import runner
from palimpsest.engine.acceptance import Acceptance
from palimpsest.engine.draft import Drafter
from palimpsest.engine.sequence import Sequence
from palimpsest.engine.step import Span
from palimpsest.engine.step_inputs import StepInputs
from palimpsest.tests.tiny_models import make_model_folder
from torch import Tensor

CONFIG = EngineConfig(kv_bytes=1 << 22, max_step_tokens=40, max_sequences=8, backend="cpu")
PROMPT = torch.randint(3, 500, (70,), generator=torch.Generator().manual_seed(5)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def span(start: int, ids: list[int], pages: tuple[int, ...], draft: tuple[int, ...] = ()) -> Span:
    sequence = Sequence(0, array("i", ids), SamplingParams())
    return Span(sequence, start, array("i", ids), pages, True, 0, array("i"), array("i", draft))


def test_what_lies_where() -> None:
    spans = (span(3, [11, 12], (5, 2), draft=(13,)), span(0, [21], (7,)))
    inputs = StepInputs.pack(spans, 4, [array("i", [8, 9]), array("i")], places=4)
    memory = inputs.host().clone()
    inputs.memory[:] = bytes(len(inputs.memory))
    batch, (some, none) = inputs.views(memory)
    assert batch.ids.tolist() == [11, 12, 13, 21]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.slots.tolist() == [23, 8, 9, 28]
    assert batch.spans.query_start.tolist() == [0, 3, 4, 4, 4]
    assert batch.spans.kv_length.tolist() == [6, 1, 0, 0]
    assert batch.spans.pages.tolist() == [[5, 2], [7, 0]]
    assert (some.tolist(), none.tolist()) == ([8, 9], [])


def complete(engine: Engine) -> list[Completion]:
    """Prefill in pieces beside decoding, scores of a prompt, right and wrong drafts, a page that is partly cached."""
    first = engine.generate([PROMPT], GREEDY)
    right = engine.add(PROMPT, GREEDY, drafter=Drafter({"memory": first[0].token_ids}, Acceptance(), repeats=True))
    wrong = array("i", [*first[0].token_ids[:4], 1, 1, 1])
    engine.add(PROMPT[:50], GREEDY, drafter=Drafter({"memory": wrong}, Acceptance(), repeats=True))
    scored = SamplingParams(seed=3, max_tokens=9, prompt_logprobs=True)
    engine.add(PROMPT[::-1], scored)
    done = [update.completion for _ in range(60) for update in engine.step() if update.completion is not None]
    assert right.counters.drafts["memory"].accepted == 11 and right.counters.cached_tokens % 16
    return first + done


def test_a_step_is_brought_to_the_device_by_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path, "qwen2")
    expected = complete(Engine(folder, CONFIG))
    copies = steps = 0

    def upload(host: Tensor, device: torch.device) -> Tensor:
        nonlocal copies
        copies += 1
        copy = host.clone()
        host.fill_(255)  # as pinned memory may be, once the copy is done
        return copy

    monkeypatch.setattr(runner, "upload", upload)
    engine = Engine(folder, CONFIG)
    run_layers = engine.runner.run_layers

    def count(batch: object) -> Tensor:
        nonlocal steps
        steps += 1
        return run_layers(batch)  # type: ignore[arg-type]

    engine.runner.run_layers = count
    given = complete(engine)
    assert steps > 20 and copies == steps
    for ours, theirs in zip(given, expected, strict=True):
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)
        assert ours.prompt_logprobs == theirs.prompt_logprobs

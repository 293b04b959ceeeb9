"""The trained weights of examples/slots: drafts and open prompts earn their keep on a model that means what it writes,
and change nothing of what it writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from palimpsest.engine.config import SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.engine.reading import Reading
from palimpsest.rl.config_file import load_config
from palimpsest.rl.tasks.slots import Slots, SlotsConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "slots"
CONFIG = load_config(EXAMPLE / "rl.yaml", [])
PROBLEMS = [Slots(SlotsConfig(seed=2_000_000, tokens=2048)).problem(index) for index in range(6)]
SAMPLED = SamplingParams(temperature=1.0, seed=7)


def read(sampling: SamplingParams, **engine_changes: object) -> list[Reading]:
    engine = Engine(EXAMPLE / "model", dataclasses.replace(CONFIG.model.engine, **engine_changes))  # type: ignore[arg-type]
    config = dataclasses.replace(CONFIG.agent, sampling=sampling, keep_turns=True)
    return MemoryAgent(engine, config).read_many([(problem.document, problem.question) for problem in PROBLEMS])  # type: ignore[arg-type]


def written(readings: list[Reading]) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of every turn."""
    return [(list(turn.response_ids), turn.logprobs) for reading in readings for turn in reading.turns]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SAMPLED], ids=["greedy", "T=1"])
def test_drafts_and_open_prompts_change_nothing(sampling: SamplingParams) -> None:
    plain = read(sampling, drafts=False, open_prompt=False)
    for changes in ({}, {"open_prompt": False}, {"drafts": False}):
        assert written(read(sampling, **changes)) == written(plain)


def test_most_turns_take_no_decode_step() -> None:
    readings = read(SamplingParams(temperature=0.0))
    counters = [reading.counters for reading in readings]
    assert sum(each.undecoded_turns for each in counters) > 0.6 * sum(each.turns for each in counters)
    memory = [each.drafts["memory"] for each in counters]
    assert sum(each.accepted for each in memory) > 0.7 * sum(each.proposed for each in memory)
    right = [reading.answer.strip() == problem.answers[0] for reading, problem in zip(readings, PROBLEMS, strict=True)]
    assert all(right)

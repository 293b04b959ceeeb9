"""Evaluation: the readings are the agent's own, whatever order they end in, and what is counted of them is theirs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import RequestError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.engine.reading import Reading
from palimpsest.rl.evaluation import Evaluation, Outcome, evaluate
from palimpsest.rl.tasks.slots import Slots, SlotsConfig
from palimpsest.rl.tasks.slots_model import FINAL, MEMORY_FIRST, write_model
from palimpsest.rl.trajectory import Problem

GREEDY = SamplingParams(temperature=0.0)


class Uneven:
    """Problems of different lengths, so that they end in another order than they began."""

    def problem(self, index: int) -> Problem:
        return Slots(SlotsConfig(seed=5, tokens=16 * (1 + (7 * index) % 5))).problem(index)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> MemoryAgent:
    folder: Path = tmp_path_factory.mktemp("slots") / "model"
    write_model(folder)
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, threads=1, max_context=256, max_sequences=3))
    config = AgentConfig(chunk_tokens=16, memory_tokens=6, answer_tokens=4, template=MEMORY_FIRST, final_form=FINAL)
    return MemoryAgent(engine, dataclasses.replace(config, sampling=SamplingParams(temperature=1.0)))


def test_outcomes_are_those_of_the_agent(agent: MemoryAgent) -> None:
    told: list[Outcome] = []
    found = evaluate(agent, Uneven(), range(2, 9), lambda answer, _: len(answer), sampling=GREEDY, told=told.append)
    assert [outcome.index for outcome in found.outcomes] == list(range(2, 9))
    assert sorted(told, key=lambda outcome: outcome.index) == list(found.outcomes) != told
    greedy = MemoryAgent(agent.engine, dataclasses.replace(agent.config, sampling=GREEDY))
    for outcome in found.outcomes:
        problem = Uneven().problem(outcome.index)
        reading = greedy.read(problem.document, problem.question)
        assert (outcome.reading.answer, outcome.reward) == (reading.answer, len(reading.answer))
        assert outcome.reading.counters.document_tokens == 16 * (1 + (7 * outcome.index) % 5)
        assert outcome.reading.counters.undecoded_turns <= outcome.reading.counters.turns == len(reading.turns)
    means = found.means()
    assert means["problems"] == 7 and means["reward"] == found.reward
    assert means["tokens_per_second"] > 0 and 0 <= means["undecoded"] <= 1


def test_what_is_drawn_depends_on_the_problem_alone(agent: MemoryAgent) -> None:
    def answers(*indices: int) -> dict[int, str]:
        found = evaluate(agent, Uneven(), indices, "em")
        return {outcome.index: outcome.reading.answer for outcome in found.outcomes}

    whole = answers(*range(12))
    assert len(set(whole.values())) > 4
    assert answers(9, 0, 4, 2, 3, 10) == {index: whole[index] for index in (0, 2, 3, 4, 9, 10)}


def test_mean_and_standard_error() -> None:
    found = Evaluation(tuple(Outcome(i, reward, Reading("", "", [])) for i, reward in enumerate([1, 0, 1, 1])), 1.0)
    assert found.reward == 0.75 and math.isclose(found.standard_error, 0.25)
    assert Evaluation((), 1.0).reward == 0.0 and Evaluation((), 1.0).standard_error == math.inf


def test_a_problem_twice_is_refused(agent: MemoryAgent) -> None:
    with pytest.raises(RequestError, match="different numbers"):
        evaluate(agent, Uneven(), [1, 2, 1], "em")

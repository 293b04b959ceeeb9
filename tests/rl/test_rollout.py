"""Rollout: groups as they end, dynamic sampling that never dies, and training while others still roll out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError, RequestError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Group, Problem
from palimpsest.tests.tiny_models import make_model_folder

ALGORITHM = AlgorithmConfig(group_size=3, kl=0.0)
DYNAMIC = dataclasses.replace(ALGORITHM, dynamic_sampling=True, max_refills=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama")


def make_agent(folder: Path, stop_ids: tuple[int, ...] = ()) -> MemoryAgent:
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, threads=1, max_context=1024))
    sampling = SamplingParams(temperature=1.0, seed=2, stop_ids=stop_ids)
    return MemoryAgent(
        engine,
        AgentConfig(chunk_tokens=60, memory_tokens=6, answer_tokens=4, template="chunk_first", sampling=sampling),
    )


def problems(*lengths: int) -> list[Problem]:
    return [Problem("The keeper counted the lamps. " * n, f"How many, {n}?", (str(n),)) for n in lengths]


def scripted(values: dict[str, list[float]]) -> Callable[[str, Any], float]:
    """Rewards by a problem's answer, one for each reading that ends; then 0."""
    return lambda answer, references: values[references[0]].pop(0) if values.get(references[0]) else 0.0


def ids(group: Group) -> list[Any]:
    return [[list(turn.response_ids) for turn in trajectory.turns] for trajectory in group.trajectories]


def test_a_group_comes_when_it_is_complete(folder: Path) -> None:
    agent = make_agent(folder)
    rollout = Rollout(agent, lambda answer, references: len(answer) % 2, ALGORITHM, deterministic=False)
    groups = rollout.groups(problems(24, 2), 2)
    first = next(groups)
    assert len(first.trajectories) == 3 and len(first.trajectories[0].turns) < 5 and agent.engine.unfinished
    [second] = groups
    assert len(second.trajectories[0].turns) > len(first.trajectories[0].turns) and not agent.engine.unfinished
    assert rollout.samples == 6 and rollout.rolled == 2
    in_order = Rollout(agent, "em", ALGORITHM).groups(problems(24, 2), 2)
    assert [(group.place, ids(group)) for group in in_order] == [(0, ids(second)), (1, ids(first))]
    [again] = rollout.groups(problems(2), 1)
    assert ids(again) != ids(first)  # the same problem draws new numbers
    shaped = dataclasses.replace(ALGORITHM, overlong_memory=0.5, overlong_answer=0.5)
    [group] = Rollout(agent, "em", shaped).groups(problems(2), 1)
    assert all(t.correct == 0 and -2 <= t.reward <= 0 for t in group.trajectories)
    assert any(t.reward < 0 for t in group.trajectories)


def test_dynamic_sampling_refills_and_never_dies(folder: Path) -> None:
    agent = make_agent(folder)
    values = {"1": [1.0, 1.0, 1.0], "2": [1.0, 0.0, 1.0], "4": [0.0, 1.0, 0.0]}
    rollout = Rollout(agent, scripted(values), DYNAMIC)
    kept = list(rollout.groups(problems(1, 2, 3, 4, 5), 2))
    assert [sorted(t.correct for t in group.trajectories) for group in kept] == [[0, 1, 1], [0, 0, 1]]
    assert rollout.rolled == 4  # 1 and 2, then 3, then 4
    assert sorted(rollout.correct) == [0, 1 / 3, 2 / 3, 1]
    dull = Rollout(agent, scripted({}), DYNAMIC)
    with pytest.warns(UserWarning, match="both right and wrong"):
        kept = list(dull.groups(iter(problems(*range(1, 9))), 2))
    assert len(kept) == 2 and dull.rolled == 6
    with pytest.warns(UserWarning, match="both right and wrong"):
        assert len(list(Rollout(agent, scripted({}), DYNAMIC).groups(problems(1), 2))) == 1
    assert list(Rollout(agent, scripted({}), DYNAMIC).groups([], 2)) == []


def test_shaping_does_not_make_a_group_mixed(folder: Path) -> None:
    agent = make_agent(folder, stop_ids=tuple(range(0, 500, 4)))  # responses of many lengths
    shaped = dataclasses.replace(DYNAMIC, overlong_memory=0.9, overlong_answer=0.9, max_refills=0)
    values = {"2": [1.0, 1.0, 1.0], "3": [1.0, 0.0, 0.0]}
    kept = list(Rollout(agent, scripted(values), shaped).groups(problems(1, 2, 3), 3))
    assert [sorted(t.correct for t in group.trajectories) for group in kept] == [[0, 0, 1]]
    with pytest.warns(UserWarning, match="both right and wrong"):
        [dull] = Rollout(agent, scripted({}), shaped).groups(problems(5), 1)
    assert len({t.reward for t in dull.trajectories}) > 1  # though rewards differ
    for t in dull.trajectories:  # limits: 6 and 4 tokens
        *memories, answer = (len(turn.response_ids) for turn in t.turns)
        expected = sum((n - 0.6) / 5.4 for n in memories) / len(memories) + (answer - 0.4) / 3.6
        assert t.reward == pytest.approx(-expected)


def test_streamed_training_is_plain_training(folder: Path) -> None:
    """Backward of a group while the next one decodes: the same bits of every parameter."""
    found = []
    for as_list in (False, True):
        agent = make_agent(folder)
        optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=0)
        trainer = Trainer(agent.engine, TrainerConfig(algorithm=ALGORITHM, optimizer=optimizer, mini_batch=2))
        rollout = Rollout(agent, lambda answer, references: len(answer) % 3, ALGORITHM)
        overlapped = []

        def watched(groups: Iterator[Group], agent: MemoryAgent = agent, seen: list[bool] = overlapped) -> Any:
            for group in groups:
                yield group
                seen.append(agent.engine.unfinished)  # after the group's backward

        groups: Any = watched(rollout.groups(problems(2, 9, 30), 3))
        report = trainer.step(list(groups) if as_list else groups)
        assert report.updates == 2 and report.first["largest_difference"] == 0 and report.groups == 3
        assert overlapped == [True, True, False]
        found.append([p.detach().clone() for p in agent.engine.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_agent_without_turns_is_refused(folder: Path) -> None:
    agent = make_agent(folder)
    agent.config = dataclasses.replace(agent.config, keep_turns=False)
    with pytest.raises(ConfigError, match="keep_turns"):
        Rollout(agent, "em", ALGORITHM)


def test_filters_are_refused_before_anything_rolls_out(folder: Path) -> None:
    agent = make_agent(folder)
    for sampling, name in ((AgentConfig().sampling, "top_p=0.95"), (SamplingParams(temperature=0), "temperature=0")):
        agent.config = dataclasses.replace(agent.config, sampling=sampling)
        with pytest.raises(ConfigError, match=name):
            Rollout(agent, "em", ALGORITHM)


def test_what_is_no_problem_is_refused(folder: Path) -> None:
    for answers in ("the keeper", [3]):  # a str would be its letters, and each of them right
        with pytest.raises(ConfigError, match="answers must"):
            Problem("text", "Who?", answers)  # type: ignore[arg-type]
    assert Problem("text", "Who?", ["the keeper"]).answers == ("the keeper",)  # type: ignore[arg-type]
    rollout = Rollout(make_agent(folder), "em", ALGORITHM)
    with pytest.raises(ConfigError, match=r"wanted must .* at least 1"):
        next(rollout.groups(problems(1), 0))
    with pytest.raises(RequestError, match="problems are"):
        next(rollout.groups([("text", "Who?")], 1))  # type: ignore[list-item]
    assert rollout.samples == 0


def test_carried_kv_is_refused(folder: Path) -> None:
    agent = make_agent(folder)
    groups = list(Rollout(agent, "em", ALGORITHM).groups(problems(30), 1))
    trajectory = groups[0].trajectories[0]
    turns = [dataclasses.replace(turn, carried_tokens=turn.index) for turn in trajectory.turns]
    carried = dataclasses.replace(groups[0], trajectories=[dataclasses.replace(trajectory, turns=turns)])
    with pytest.raises(RequestError, match="memory_kv='carried'"):
        Trainer(agent.engine, TrainerConfig(ALGORITHM)).step([carried])
    agent.config = dataclasses.replace(agent.config, memory_kv="carried")
    with pytest.raises(ConfigError, match="memory_kv is 'carried'"):
        Rollout(agent, "em", ALGORITHM)

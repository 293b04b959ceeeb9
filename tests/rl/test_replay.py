"""Replay: a dump gives back the groups as they were, and training from it is the run that made it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import TraceError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.replay import dumped, has_step, read_step, recorded, replay
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.step_report import StepReport
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Problem
from palimpsest.tests.tiny_models import make_model_folder

ALGORITHM = AlgorithmConfig(group_size=3, kl=0.05)
PROBLEMS = [Problem("The keeper counted the lamps. " * n, f"How many, {n}?", (str(n),)) for n in (2, 9, 5, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen3")


def make_trainer(folder: Path) -> Trainer:
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, threads=1, max_context=1024))
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    return Trainer(engine, TrainerConfig(ALGORITHM, optimizer, mini_batch=1))


def numbers(report: StepReport) -> list[object]:
    return [report.step, report.reward, report.gradient_norms, report.first, report.all, report.updates]


def test_training_from_a_dump_is_the_run_that_made_it(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    sampling = SamplingParams(temperature=0.9, seed=2)
    config = AgentConfig(chunk_tokens=60, memory_tokens=10, answer_tokens=4, sampling=sampling)
    rollout = Rollout(MemoryAgent(trainer.engine, config), lambda answer, references: len(answer) / 3, ALGORITHM)
    source, reports, groups = iter(PROBLEMS), [], []
    for step in range(2):
        for group in dumped(rollout.groups(source, 2), tmp_path, step):
            groups.append(group)
        reports.append(numbers(trainer.step(groups[-2:])))
    asked = [Problem("", problem.question, problem.answers) for problem in PROBLEMS[:2]]
    drawn = [dataclasses.replace(group, problem=problem) for group, problem in zip(groups, asked, strict=False)]
    assert list(read_step(tmp_path / "step-00000000.jsonl")) == drawn  # every float, all ids
    again = make_trainer(folder)
    assert [numbers(report) for report in replay(again, tmp_path)] == reports and again.steps == 2
    pairs = zip(again.engine.model.parameters(), trainer.engine.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    with pytest.raises(TraceError, match=r"no trajectories of step 2 \(step-00000000 to step-00000001 "):
        next(replay(again, tmp_path))

    ranks = tmp_path / "ranks"  # of a run over two ranks
    for number in range(2):
        list(dumped((group for group in groups[number:2:2]), ranks / f"rank{number}", 0))
    assert list(recorded(ranks, 0)) == drawn and not has_step(ranks, 1)

    rolling = dumped(rollout.groups(PROBLEMS, 2), tmp_path, 7)
    next(rolling)
    rolling.close()
    assert not trainer.engine.unfinished and not list(tmp_path.glob("*7*"))  # half a step is none


@pytest.mark.parametrize(
    ("line", "harm"),
    [
        (1, lambda line: line.replace('"format": 1', '"format": 9')),
        (1, lambda line: line.replace("temperature", "heat")),
        (2, lambda line: line[:-20]),
        (3, lambda line: json.dumps({**json.loads(line), "turns": [{"kind": "final"}]})),
        (3, lambda line: "[]"),
    ],
)
def test_a_damaged_dump_is_named(folder: Path, tmp_path: Path, line: int, harm: Callable[[str], str]) -> None:
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, threads=1, max_context=1024))
    config = AgentConfig(chunk_tokens=60, memory_tokens=2, answer_tokens=2, sampling=SamplingParams(temperature=1.0))
    rollout = Rollout(MemoryAgent(engine, config), "em", ALGORITHM)
    assert len(list(dumped(rollout.groups(PROBLEMS[:1], 1), tmp_path, 0))) == 1
    file = tmp_path / "step-00000000.jsonl"
    lines = file.read_text().splitlines()
    lines[line - 1] = harm(lines[line - 1])
    file.write_text("\n".join(lines))
    with pytest.raises(TraceError, match=r"of format 9" if "9" in lines[0] else rf"line {line} of .* is damaged"):
        list(read_step(file))

"""Resuming a run: after a signal, a kill -9 anywhere, at the end of an epoch, its log and weights are those of a run
that nothing interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from palimpsest.cli import main
from palimpsest.engine import checkpoint
from palimpsest.engine.errors import CheckpointError
from palimpsest.rl.config_file import load_config
from palimpsest.rl.log import read_log
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.run import Run
from palimpsest.rl.trajectory import Trajectory
from palimpsest.tests.rl.test_run import same
from palimpsest.tests.tiny_models import make_model_folder


@pytest.fixture(scope="module", autouse=True)
def rewards_of_the_day() -> Iterator[None]:
    """A third of all answers is right; which third, Python's own generator says anew for each step."""
    day, groups, trajectory = [0], Rollout.groups, Rollout._trajectory

    def drawing(self: Rollout, *args: Any) -> Any:
        day[0] = random.randrange(3)
        return groups(self, *args)

    def rewarded(self: Rollout, *args: Any) -> Trajectory:
        plain = trajectory(self, *args)
        right = (sum(token for turn in plain.turns for token in turn.response_ids) + day[0]) % 3 == 0
        return dataclasses.replace(plain, reward=float(right))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollout, "groups", drawing)
        patch.setattr(Rollout, "_trajectory", rewarded)
        yield


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten problems, two in a step: an epoch has five steps. Responses are drafted. Some steps update
    nothing, so that the next one finds KV of the one before, but not when it is the first after a resume."""
    folder = tmp_path_factory.mktemp("run")
    model = make_model_folder(folder / "model", "llama")
    rows = [{"prompt": f"Pier {i}?", "context": "The keeper counted. " * (1 + i % 4), "answer": "4"} for i in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {"path": str(model), "engine": {"kv_bytes": 1 << 22, "max_context": 1024, "threads": 1}},
        "data": {"path": str(folder / "train.jsonl"), "answers": "answer", "shuffle": True},
        "reward": {"name": "f1"},
        "agent": {"chunk_tokens": 12, "memory_tokens": 6, "answer_tokens": 2, "template": "chunk_first"},
        "algorithm": {"group_size": 2, "kl": 0},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 7},
        "rollout": {"steps": 10, "problems": 2, "mini_batch": 1},
        "parallel": {"train_tokens": 2048},
        "checkpoint": {"every": 2},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="module")
def uninterrupted(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(config_file, folder)
    return folder


def set_generators(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def train(config_file: Path, folder: Path, *changes: str, resume: bool = False) -> None:
    set_generators(99 if resume else 3)
    Run(load_config(config_file, [f"log.folder={folder}", *changes]), resume=resume).train()


def in_a_process(work: Callable[[], None]) -> int:
    """-> its id. A fork: it need not import all again."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """Log lines; the files of the last checkpoint; what it says of the run."""
    place = sorted((folder / "checkpoints").iterdir())[-1]
    manifest, state = (json.loads((place / f"{name}.json").read_text()) for name in ("manifest", "state"))
    del manifest["state.json"], state["ranks"][0]["config"]
    return same(read_log(folder / "log.jsonl")), manifest, state


def assert_same(folder: Path, uninterrupted: Path) -> None:
    ours, theirs = outcome(folder), outcome(uninterrupted)
    assert len(theirs[0]) == theirs[2]["step"]
    assert {line["updates"] for line in theirs[0]} == {0, 1, 2}
    assert ours == theirs


def test_ten_steps_are_five_and_five_more(config_file: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Where the first ends is the end of an epoch too."""
    train(config_file, tmp_path, "rollout.steps=5")
    train(config_file, tmp_path, resume=True)
    assert_same(tmp_path, uninterrupted)


def test_a_signal_saves_and_ends(
    config_file: Path,
    uninterrupted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of a rollout: what it began is begun anew."""
    rewarded, plain = [], Rollout._trajectory

    def reward(*args: Any) -> Any:
        rewarded.append(1)
        if len(rewarded) in (5, 6, 11):
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*args)

    monkeypatch.setattr(Rollout, "_trajectory", reward)
    command = ["train", str(config_file), "--set", f"log.folder={tmp_path}", "--resume"]
    set_generators(3)
    for steps in (1, 1, 2):
        assert main(command) == 143
        assert f"SIGTERM received; saved {tmp_path / 'checkpoints'}/step-{steps:08}" in capsys.readouterr().err
        assert [line["step"] for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "step"][-1] == steps
    assert main(command) == 0
    assert_same(tmp_path, uninterrupted)


def test_killed_while_checkpoints_are_written(config_file: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Again and again, each time at another of the calls that write one and remove the one before."""

    def work(last: int) -> None:
        set_generators(3)
        run = Run(load_config(config_file, [f"log.folder={tmp_path}", "checkpoint={keep: 1, every: 1}"]), resume=True)
        calls = 0

        def killing(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **more: Any) -> Any:
                nonlocal calls
                calls += run.checkpoints.steps is not None
                if calls == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **more)

            return called

        for owner, name in ((checkpoint, "flush"), (Path, "rename"), (shutil, "rmtree")):
            setattr(owner, name, killing(getattr(owner, name)))
        run.train()

    for last in (1, 5, 9, 13, 14, 15, 16):
        process = in_a_process(lambda last=last: work(last))  # type: ignore[misc]
        assert os.waitpid(process, 0)[1] == signal.SIGKILL, f"there is no call {last}"
    train(config_file, tmp_path, resume=True)
    assert not [place.name for place in (tmp_path / "checkpoints").iterdir() if place.name.startswith(".")]
    assert_same(tmp_path, uninterrupted)


@pytest.mark.slow
def test_killed_at_a_random_step_of_twenty(config_file: Path, tmp_path: Path) -> None:
    steps, chance = "rollout.steps=20", random.Random(4)
    train(config_file, tmp_path / "whole", steps)
    for number in range(3):
        folder, last = tmp_path / str(number), chance.randrange(1, 19)
        process = in_a_process(lambda folder=folder: train(config_file, folder, steps))  # type: ignore[misc]
        while not (folder / "log.jsonl").exists() or sum(1 for _ in read_log(folder / "log.jsonl")) < 1 + last:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.2)
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        train(config_file, folder, steps, resume=True)
        assert_same(folder, tmp_path / "whole")


def test_what_resuming_says(
    config_file: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted, folder)
    train(config_file, folder, "optimizer.learning_rate=1e-4", "rollout.steps=11", resume=True)
    [event] = [line for line in read_log(folder / "log.jsonl") if line["kind"] == "event"]
    assert event["name"] == "changed configuration"
    assert event["message"] == "optimizer.learning_rate was 0.001 and is 0.0001 from here on"
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    (newest / "state.json").write_text("")
    log = (folder / "log.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"step-00000011 is damaged: state.json .* go on from step-00000010"):
        train(config_file, folder, resume=True)
    assert (folder / "log.jsonl").read_bytes() == log


def test_a_run_is_trained_again_from_its_trajectories(config_file: Path, tmp_path: Path) -> None:
    steps, replay = "rollout.steps=3", str(tmp_path / "a" / "trajectories")
    train(config_file, tmp_path / "a", steps, "log.trajectories=true")
    command = ["train", str(config_file), "--set", steps, "--set", f"log.folder={tmp_path / 'b'}", "--replay", replay]
    assert main(command) == 0
    (ours, weights, _), (theirs, expected, _) = outcome(tmp_path / "b"), outcome(tmp_path / "a")
    assert weights == expected
    for name in ("reward", "gradient_norms", "first", "diagnostics"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]

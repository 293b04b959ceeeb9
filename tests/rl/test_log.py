"""The log: whole lines only, cut where a run goes on; trackers get its numbers."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from palimpsest.engine.errors import TraceError
from palimpsest.rl.curriculum import Curriculum
from palimpsest.rl.log import RunLog, numbers, read_log
from palimpsest.rl.run_config import CurriculumConfig, LogConfig
from palimpsest.rl.trackers import trackers


def test_a_log_goes_on_after_a_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    log = RunLog(path)
    log.add("start", 0, {"config": {}})
    for step in (1, 2, 3):
        log.event("warning", f"in step {step}", step)
        log.add("step", step, {"norm": math.inf if step == 1 else 2.0})
    log.close()
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "st')  # cut while it was written
    assert [line["step"] for line in read_log(path)] == [0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(TraceError, match="there is a run in this folder"):
        RunLog(path)
    log = RunLog(path, keep_steps=2)
    log.add("step", 3, {"norm": 1.0})
    log.close()
    lines = list(read_log(path))
    assert [(line["kind"], line["step"]) for line in lines[-3:]] == [("event", 2), ("step", 2), ("step", 3)]
    assert lines[2]["norm"] == "inf" and lines[-1]["norm"] == 1.0 and log.events == {"warning": 2}
    path.write_text('{"step": 1}\n[1]\n')
    with pytest.raises(TraceError, match="line 2 is no line of a run's log"):
        list(read_log(path))


def test_two_processes_do_not_write_one_log(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.add("step", 1, {})
    log.close()
    hold = "import fcntl, sys; file = open(sys.argv[1], 'wb'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", hold, str(tmp_path / ".log.jsonl.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline()
        with pytest.raises(TraceError, match=r"another process writes to .*wait until it has ended"):
            RunLog(tmp_path / "log.jsonl", keep_steps=0)
        other.kill()
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1]  # nothing was cut
    RunLog(tmp_path / "log.jsonl", keep_steps=1).close()


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        log.add("step", 1, {})
        with pytest.raises(TraceError, match=r"cannot write the log .*make room .*--resume"):
            log.add("step", 2, {"text": "x" * 2000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.close()
    assert [line["step"] for line in read_log(log.path)] == [1]


def test_numbers_have_the_names_on_the_way() -> None:
    values = {"a": {"b": 1, "text": "x"}, "list": [1, 2], "empty": [], "true": True}
    assert dict(numbers(values, "step")) == {"step/a/b": 1.0, "step/list": 1.5, "step/true": 1.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2, 3), (2,)):  # the second run goes on after step 1
        log = RunLog(
            tmp_path / "log.jsonl",
            trackers(LogConfig(str(tmp_path), tensorboard=True), {}),
            keep_steps=None if steps[0] == 1 else 1,
        )
        for step in steps:
            log.add("step", step, {"reward": step / len(steps)})
        log.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("step/reward")] == [(1, pytest.approx(1 / 3)), (2, 2.0)]


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    log = RunLog(
        tmp_path / "log.jsonl", trackers(LogConfig(str(tmp_path), wandb="p", wandb_mode="offline"), {"steps": 3})
    )
    log.add("step", 1, {"reward": 0.5})
    log.close()
    [file] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert file.stat().st_size > 0


def test_a_curriculum_waits_for_steps_in_a_row(tmp_path: Path) -> None:
    config = CurriculumConfig(({"tokens": 32}, {"tokens": 64}), reward=0.9, steps=2)
    curriculum = Curriculum(config)
    assert [curriculum.add(reward) for reward in (1.0, 0.7, 0.9, 0.9)] == [False, False, False, True]
    resumed = Curriculum(config)
    assert not curriculum.add(1.0)
    resumed.load_state_dict(curriculum.state_dict())
    assert resumed.stage == 1 and resumed.add(0.8) and resumed.stage == 2 and not resumed.add(1.0)
    assert not Curriculum(None).add(1.0)

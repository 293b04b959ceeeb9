"""Run: from a YAML file to trained weights and a log, through the command line too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from palimpsest.cli import main
from palimpsest.engine.errors import CheckpointError, RequestError
from palimpsest.rl.config_file import load_config
from palimpsest.rl.log import read_log
from palimpsest.rl.run import Run
from palimpsest.tests.tiny_models import make_model_folder


def write_data(path: Path, documents: int, question: str = "How many lamps at pier {}?") -> None:
    with path.open("w") as file:
        for i in range(documents):
            values: dict[str, Any] = {
                "prompt": [{"role": "user", "content": question.format(i)}],
                "context": "The keeper counted the lamps. " * (2 + 4 * i),
                "reward_model": {"ground_truth": [str(i)]},
                "extra_info": {"index": i},
            }
            file.write(json.dumps(values) + "\n")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    model = make_model_folder(folder / "model", "llama")
    write_data(folder / "train.jsonl", 6)
    values = {
        "model": {"path": str(model), "engine": {"kv_bytes": 1 << 22, "max_context": 1024, "threads": 1}},
        "data": {"path": str(folder / "train.jsonl"), "shuffle": True},
        "reward": {"name": "f1"},
        "agent": {"chunk_tokens": 60, "memory_tokens": 8, "answer_tokens": 6, "template": "chunk_first"}
        | {"sampling": {"stop_ids": list(range(0, 500, 4))}},  # responses of many lengths
        "algorithm": {"group_size": 3, "kl": 0, "overlong_memory": 0.9},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "rollout": {"steps": 4, "problems": 2},
        "parallel": {"train_tokens": 2048},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def same(lines: Any) -> list[dict[str, Any]]:
    """What must be equal when a run is done again."""
    return [
        {key: value for key, value in line.items() if key != "machine"} for line in lines if line["kind"] != "start"
    ]


def test_a_run_through_the_command_line(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "--set", f"log.folder={tmp_path / 'a'}"]) == 0
    start, *steps = read_log(tmp_path / "a" / "log.jsonl")
    assert start["kind"] == "start" and start["config"]["rollout"]["steps"] == 4
    assert [line["step"] for line in steps] == [1, 2, 3, 4] and [line["position"] for line in steps] == [2, 4, 6, 8]
    assert steps[0]["first"]["largest_difference"] == 0 and steps[0]["groups"] == 2
    assert all(line["correct_of_rolled"] == pytest.approx(line["correct"]) for line in steps)
    assert all(line["updates"] == 1 and line["gradient_norms"][0] > 0 for line in steps)
    assert len(steps[0]["diagnostics"]["memory_tokens"]) > 1 and steps[0]["machine"]["seconds"]["step"] > 0
    shown = capsys.readouterr().err
    assert "read whole" in shown and "step 4 of 4" in shown
    assert main(["train", str(config_file), "--set", f"log.folder={tmp_path / 'a'}"]) == 2
    assert "there is a run in this folder" in capsys.readouterr().err
    run = Run(load_config(config_file, [f"log.folder={tmp_path / 'b'}"]))
    run.train()
    assert same(read_log(run.log.path)) == same(steps)


def test_problems_without_room_and_warnings_are_events(config_file: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", 2)
    with (tmp_path / "data.jsonl").open("a") as file:
        write_data(tmp_path / "long.jsonl", 1, "How many lamps? " * 400)
        file.write((tmp_path / "long.jsonl").read_text().replace('"index": 0', '"index": 9'))
    settings = (f"log.folder={tmp_path / 'run'}", f"data.path={tmp_path / 'data.jsonl'}", "data.shuffle=false")
    changes = [*settings, "rollout.steps=2", "agent.chunk_tokens=2000", "algorithm.overlong_memory=0"]
    run = Run(load_config(config_file, changes))
    run.train()
    lines = list(read_log(run.log.path))
    events = [(line["name"], line["step"]) for line in lines if line["kind"] == "event"]
    assert events.count(("no room for a problem", 2)) == 1 and ("warning", 1) in events
    assert "problem 9 is left out" in next(
        line["message"] for line in lines if line.get("name") == "no room for a problem"
    )
    assert lines[-1]["events"]["no room for a problem"] == 1 and lines[-1]["position"] == 5


def test_questions_without_room_leave_the_others(config_file: Path, tmp_path: Path) -> None:
    """More in a row than any small number, and in a set to evaluate on."""
    write_data(tmp_path / "some.jsonl", 2)
    write_data(tmp_path / "long.jsonl", 101, "How many lamps? " * 400)
    rows = [json.loads(line) for name in ("long", "some") for line in (tmp_path / f"{name}.jsonl").open()]
    rows[-1]["extra_info"], rows[-2]["extra_info"] = {"index": 501}, {"index": 500}
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [f"log.folder={tmp_path / 'run'}", f"data.path={tmp_path / 'data.jsonl'}", "data.shuffle=false"]
    changes += ["rollout.steps=1", "eval={sets: {all: {}}, problems: 103}"]
    run = Run(load_config(config_file, changes))
    run.train()
    lines = list(read_log(run.log.path))
    [step] = [line for line in lines if line["kind"] == "step"]
    assert step["position"] == 103 and step["events"]["no room for a problem"] == 101
    assert [line["sets"]["all"]["problems"] for line in lines if line["kind"] == "eval"] == [2, 2]
    for name, change, message in (
        ("data", f"data.path={tmp_path / 'long.jsonl'}", "for any of 101 problems in a row"),
        ("eval", f"eval.sets={{all: {{path: {tmp_path / 'long.jsonl'}}}}}", "for any problem of eval.sets.all"),
    ):
        alone = [*changes, "eval.sets={}", f"log.folder={tmp_path / name}", change]
        with pytest.raises(RequestError, match=message):
            Run(load_config(config_file, alone)).train()


def test_a_folder_with_checkpoints_is_not_begun_anew(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(config_file, [f"log.folder={tmp_path / 'run'}", "rollout.steps=1"])
    run = Run(config)
    run.train()
    run.log.path.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoints exists: there is a run in this folder.*--resume"):
        Run(config)
    Run(config, resume=True).train()
    assert "1 of 1 steps were taken before; nothing is left to do" in capsys.readouterr().err


def test_an_agent_and_a_reward_of_the_users_own(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both by name, from the working directory; one that fails is in the log, and the run goes on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(
        "async def agent(sample, llm):\n"
        "    text = await llm.chat([{'role': 'user', 'content': sample.question}], max_tokens=5)\n"
        "    if sample.extra['index'] % 2:\n"
        "        raise ValueError('odd')\n"
        "    return text + await llm.complete([1, 2, 3], max_tokens=4, turn=2**40)\n"
    )
    (tmp_path / "my_reward.py").write_text("def reward(answer, references, extra):\n    return len(answer) / 10\n")
    values = yaml.safe_load(config_file.read_text())
    values |= {"agent": {"function": "my_agent:agent"}, "reward": {"name": "my_reward:reward"}}
    values["log"] = {"folder": "run"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "own.yaml"]) == 0
    assert "an agent failed (raised): ValueError: odd" in capsys.readouterr().err
    steps = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "step"]
    assert len(steps) == 4 and steps[-1]["failures"] == {"agent.raised": 12}
    assert all(step["first"]["largest_difference"] == 0 for step in steps) and sum(s["reward"] for s in steps) > 0
    assert max(len(step["diagnostics"]["call_tokens"]) for step in steps) == 2


def test_evaluation_and_a_curriculum_that_grows_documents(config_file: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "long.jsonl", 3, "How many lamps at the far pier {}?")
    changes = [
        f"log.folder={tmp_path / 'run'}",
        f"eval={{every: 2, problems: 4, sets: {{short: {{}}, long: {{path: {tmp_path / 'long.jsonl'}}}}}}}",
        f"rollout.curriculum={{reward: -1, steps: 2, stages: [{{path: {tmp_path / 'long.jsonl'}}}]}}",
        "rollout.steps=3",
        "checkpoint.every=1",
    ]
    Run(load_config(config_file, [*changes, "rollout.steps=1"])).train()
    run = Run(load_config(config_file, changes), resume=True)
    run.train()
    lines = same(read_log(run.log.path))
    whole = Run(load_config(config_file, [*changes, f"log.folder={tmp_path / 'whole'}"]))
    whole.train()
    expected = same(read_log(whole.log.path))
    assert [line for line in lines if line["kind"] != "eval" or line["step"] != 1] == expected  # it was the last step
    evals = [line for line in expected if line["kind"] == "eval"]
    assert [line["step"] for line in evals] == [0, 2, 3]
    assert {name: means["problems"] for name, means in evals[0]["sets"].items()} == {"short": 4, "long": 3}
    assert [line["stage"] for line in expected if line["kind"] == "step"] == [0, 0, 1]
    [stage] = [line["step"] for line in expected if line["kind"] == "event" and line["name"] == "stage"]
    assert stage == 2 and run.curriculum.stage == 1


@pytest.mark.slow
def test_memory_is_flat_over_200_steps(config_file: Path, tmp_path: Path) -> None:
    changes = [f"log.folder={tmp_path / 'run'}", "rollout.steps=200", "log.trajectories=true", "log.tensorboard=true"]
    run = Run(load_config(config_file, [*changes, "checkpoint.every=20"]))
    run.train()
    used = [line["machine"]["memory_mib"] for line in read_log(run.log.path) if line["kind"] == "step"]
    assert len(used) == 200 and max(used[150:]) < max(used[50:100]) + 8  # a group of this run is some 0.1 MiB


@pytest.mark.slow
def test_ranks_write_the_log_of_one_process(config_file: Path, tmp_path: Path) -> None:
    changes = ["rollout.problems=3", "rollout.steps=3", "eval={every: 3, problems: 3, sets: {train: {}}}"]
    logs = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        options = [option for change in [*changes, f"log.folder={folder}"] for option in ("--set", change)]
        command = [sys.executable, *launcher, "-m", "palimpsest", "train", str(config_file), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / ".typing")}
        subprocess.run(command, env=environment, check=True, timeout=200)
        logs.append(same(read_log(folder / "log.jsonl")))
    for line, other in zip(*logs, strict=True):
        if line["kind"] == "step":  # the gradient is summed in another order
            assert other.pop("gradient_norms") == pytest.approx(line.pop("gradient_norms"), rel=1e-5)
            for part in ("first", "all"):
                assert other.pop(part) == pytest.approx(line.pop(part), rel=1e-5)
        assert line == other

"""Objective "sft" through the command line, and from its model on to reinforcement learning on the same task."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from palimpsest.cli import main
from palimpsest.engine import reading_file
from palimpsest.engine.engine import Engine
from palimpsest.rl.log import read_log
from palimpsest.rl.tasks.slots_model import write_model
from palimpsest.tests.tiny_models import make_model_folder
from safetensors.torch import load_file

AGENT = {
    "chunk_tokens": 16,
    "memory_tokens": 6,
    "answer_tokens": 4,
    "template": [" question", "{problem}", " memory", "{memory}", " text", "{chunk}", " update"],
    "final_form": [" question", "{problem}", " memory", "{memory}", " answer"],
}


def write_config(folder: Path, **values: Any) -> str:
    given = values.pop("model", {})
    context = 1024 if given else 128
    model = {"path": str(folder / "model"), "engine": {"kv_bytes": 1 << 22, "max_context": context, "threads": 1}}
    model |= given
    file = folder / f"{values['log']['folder']}.yaml"
    values["log"] = {"folder": str(folder / values["log"]["folder"])}
    file.write_text(yaml.safe_dump({"model": model, "agent": AGENT} | values))
    return str(file)


def test_a_warm_up_and_then_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model")
    warm_up = write_config(
        tmp_path,
        objective="sft",
        data={"task": "slots_oracle", "chunk_tokens": [16, 16], "keys": [2, 6], "bias": 0},
        optimizer={"learning_rate": 3e-3, "warmup_steps": 0},
        rollout={"steps": 12, "problems": 8},
        log={"folder": "sft"},
    )
    assert main(["train", warm_up]) == 0
    start, *steps = read_log(tmp_path / "sft" / "log.jsonl")
    assert start["config"]["objective"] == "sft" and [line["step"] for line in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5 and steps[0]["examples"] == 8
    Engine(tmp_path / "sft" / "model")
    rewarded = write_config(
        tmp_path,
        data={"task": "slots", "tokens": 32},
        reward={"name": "em"},
        algorithm={"group_size": 2, "kl": 0},
        rollout={"steps": 1, "problems": 2},
        log={"folder": "rl"},
    )
    assert main(["train", rewarded, "--set", f"model.path={tmp_path / 'sft' / 'model'}"]) == 0
    *_, step = read_log(tmp_path / "rl" / "log.jsonl")
    assert step["turns"] == 2 * 2 * 3 and step["first"]["largest_difference"] == 0
    assert main(["train", warm_up, "--set", f"log.folder={tmp_path}"]) == 2  # where the model is that it begins with
    assert f"{tmp_path / 'model'} exists" in capsys.readouterr().err
    assert main(["train", rewarded, "--set", "objective=sft", "--set", f"log.folder={tmp_path / 'no'}"]) == 2
    assert "does not go with the data" in capsys.readouterr().err


def test_adapters_on_facts_go_on_where_they_were_killed(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model", "qwen2")
    values: dict[str, Any] = {
        "objective": "sft",
        "data": {"task": "facts_oracle", "blocks": [1, 1], "seed": 3},
        "agent": {"chunk_tokens": 200, "memory_tokens": 40, "answer_tokens": 8},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        "rollout": {"steps": 4, "problems": 2},
        "checkpoint": {"every": 2},
    }
    whole = write_config(tmp_path, **values, log={"folder": "whole"}, model={"lora": {"rank": 2}})
    assert main(["train", whole]) == 0
    parts = write_config(tmp_path, **values, log={"folder": "parts"}, model={"lora": {"rank": 2}})
    assert main(["train", parts, "--set", "rollout.steps=3"]) == 0
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000003")  # killed in the third
    assert (tmp_path / "parts" / "adapter").is_dir()  # of three steps
    assert main(["train", parts, "--resume"]) == 0
    assert main(["train", parts, "--resume", "--set", "optimizer.clip=2"]) == 0  # nothing is left to do
    *_, event, _ = read_log(tmp_path / "parts" / "log.jsonl")
    assert event["name"] == "changed configuration" and event["message"].startswith("optimizer.clip was 1.0 and is 2")
    logs = [list(read_log(tmp_path / name / "log.jsonl")) for name in ("whole", "parts")]
    losses = [[(line["step"], line["loss"]) for line in log if line["kind"] == "step"] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 4 and losses[0][3][1] < losses[0][0][1]
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {t.dtype for t in load_file(files[0]).values()} == {torch.bfloat16}
    assert reading_file.read(files[0].parent).memory_tokens == 40
    rewarded = write_config(
        tmp_path,
        data={"task": "facts", "tokens": 64},
        agent=values["agent"],
        algorithm={"group_size": 2, "kl": 0},
        rollout={"steps": 1, "problems": 1},
        log={"folder": "rl"},
        model={"adapter": str(files[0].parent)},
    )
    assert main(["train", rewarded]) == 0
    tensors = load_file(tmp_path / "rl" / "checkpoints" / "step-00000001" / "adapter" / "adapter_model.safetensors")
    assert tensors.keys() == load_file(files[0]).keys()
    assert main(["train", rewarded, "--set", "model.lora={rank: 2}", "--set", f"log.folder={tmp_path / 'no'}"]) == 2

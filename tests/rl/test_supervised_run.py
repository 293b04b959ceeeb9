"""Objective "sft" through the command line, and from its model on to reinforcement learning on the same task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from palimpsest.cli import main
from palimpsest.engine.engine import Engine
from palimpsest.rl.log import read_log
from palimpsest.rl.tasks.slots_model import write_model

AGENT = {
    "chunk_tokens": 16,
    "memory_tokens": 6,
    "answer_tokens": 4,
    "template": [" question", "{problem}", " memory", "{memory}", " text", "{chunk}", " update"],
    "final_form": [" question", "{problem}", " memory", "{memory}", " answer"],
}


def write_config(folder: Path, **values: Any) -> str:
    model = {"path": str(folder / "model"), "engine": {"kv_bytes": 1 << 22, "max_context": 128, "threads": 1}}
    file = folder / f"{values['log']['folder']}.yaml"
    values["log"] = {"folder": str(folder / values["log"]["folder"])}
    file.write_text(yaml.safe_dump({"model": model, "agent": AGENT, "reward": {"name": "em"}, **values}))
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
        algorithm={"group_size": 2, "kl": 0},
        rollout={"steps": 1, "problems": 2},
        log={"folder": "rl"},
    )
    assert main(["train", rewarded, "--set", f"model.path={tmp_path / 'sft' / 'model'}"]) == 0
    *_, step = read_log(tmp_path / "rl" / "log.jsonl")
    assert step["turns"] == 2 * 2 * 3 and step["first"]["largest_difference"] == 0
    assert main(["train", rewarded, "--set", "objective=sft", "--set", f"log.folder={tmp_path / 'no'}"]) == 2
    assert "does not go with the data" in capsys.readouterr().err

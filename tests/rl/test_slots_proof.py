"""The proof's script: what was stopped is done again, small runs leave the figures alone, seeds are pooled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from palimpsest.examples.slots import curves, proof

STEP = {
    "kind": "step",
    "correct_of_rolled": 0.5,
    "correct": 0.5,
    "groups": 2,
    "first": {"largest_difference": 0.0, "entropy": 0.1},
    "truncated": 0.0,
}


@pytest.fixture
def work(tmp_path: Path) -> proof.Work:
    return proof.Work(tmp_path / "works", 0, "plain", False)


def write_log(folder: Path, loss_seconds: list[float]) -> None:
    folder.mkdir(parents=True)
    parts = [{"rollout": 1.0, "loss": loss, "update": 0.5, "step": 2.0 + loss} for loss in loss_seconds]
    machines = [{"seconds": seconds, "draft_acceptance": {}} for seconds in parts]
    lines = [json.dumps({**STEP, "step": i, "machine": machine}) for i, machine in enumerate(machines, 1)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")


def test_a_step_is_timed_again_when_that_was_stopped(work: proof.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def train(config: str, changes: dict[str, Any], *options: str) -> None:
        trained.append(config)
        folder = Path(changes["log.folder"])
        assert changes["model.engine.drafts"] is False and not folder.exists()
        write_log(folder, [50.0, 3.0, 1.0, 2.0])
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)

    monkeypatch.setattr(proof, "train", train)
    write_log(work.folder / "step-no-drafts", [9.0, 9.0])
    for _ in range(2):
        found = proof.step_seconds(work, Path("model"), "no drafts")
        assert found == {"rollout": 1.0, "loss": 2.0, "update": 0.5, "step": 4.0, "rest": 0.5}
    assert trained == ["rl.yaml"]


def run(monkeypatch: pytest.MonkeyPatch, *options: object) -> dict[str, dict[str, int]]:
    """The script without its work; -> documents of each length, by model and sampling."""
    asked: dict[str, dict[str, int]] = {}

    def measure(work: proof.Work, model: Path, name: str, sampling: str, documents: dict[str, int]) -> list[str]:
        asked[f"{name} {sampling}"] = documents
        return [name]

    def warm_up(work: proof.Work) -> Path:
        work.folder.mkdir(parents=True, exist_ok=True)
        return work.folder

    monkeypatch.setattr(proof, "measure", measure)
    monkeypatch.setattr(proof, "warm_up", warm_up)
    monkeypatch.setattr(proof, "reinforce", lambda work, model: model)
    for name in ("seconds", "steps"):
        monkeypatch.setattr(proof, name, lambda folder: [])
    monkeypatch.setattr(proof, "step_seconds", lambda work, model, name: {})
    monkeypatch.setattr(sys, "argv", ["proof.py", *map(str, options)])
    proof.main()
    return asked


def test_a_small_run_leaves_the_figures_of_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "HERE", tmp_path)
    asked = run(monkeypatch, "--folder", tmp_path / "small", "--seed", 1, "--documents", 100, "--longest", "256K")
    assert asked["rl greedy"] == {"1K": 100, "4K": 100, "16K": 100, "64K": 100, "256K": 64}
    assert json.loads((tmp_path / "small" / "results.json").read_text())["seed 1"]["accuracy"] == ["rl", "warmup"]
    assert not (tmp_path / "results.json").exists()
    run(monkeypatch, "--folder", tmp_path / "whole", "--seed", 1)
    asked = run(monkeypatch, "--folder", tmp_path / "whole", "--variant", "two_hop")
    assert asked["rl greedy"] == proof.SHORT
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["seed 1", "seed 0 two_hop"] and not (tmp_path / "whole" / "results.json").exists()


@pytest.mark.parametrize("content", ['{"seed 0": {', "[]"])
def test_results_that_cannot_be_read_are_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(proof, "HERE", tmp_path)
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(SystemExit, match=r"results\.json .* restore it"):
        run(monkeypatch, "--folder", tmp_path / "works")
    assert (tmp_path / "results.json").read_text() == content and not (tmp_path / "works").exists()


@pytest.mark.parametrize("options", [("--documents", 0), ("--seed", proof.HELD_OUT), ("--variant", "other")])
def test_wrong_options_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[object, ...]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *options)
    assert f"{options[0]}" in capsys.readouterr().err


def test_a_table_of_all_seeds_together() -> None:
    def work(reward: float, documents: int, tokens: int = 1024) -> dict[str, Any]:
        row = {"model": "rl", "sampling": "greedy", "tokens": tokens, "reward": reward, "documents": documents}
        return {"accuracy": [row]}

    works = {"seed 0": work(1.0, 10), "seed 1": work(0.5, 30), "seed 0 two_hop": work(1.0, 2, 3_670_016)}
    assert curves.table(works).splitlines() == [
        "| task, model, sampling | 1K | 3.5M |",
        "| --- | --- | --- |",
        "| plain, rl, greedy | 0.625 ± 0.078 (40; 1.000, 0.500) |  |",
        "| two_hop, rl, greedy |  | 1.000 (2) |",
    ]

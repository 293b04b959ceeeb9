"""Data parallel: any number of ranks trains as one does, whatever each of them has to do; and none outlives another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest.engine.errors import ConfigError
from palimpsest.rl.process_group import ProcessGroup
from palimpsest.tests.rl import data_parallel_work
from palimpsest.tests.rl.data_parallel_work import DEALS, train
from palimpsest.tests.tiny_models import make_model_folder
from torch.distributed import TCPStore

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / ".typing")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    make_model_folder(place / "other", "qwen2", seed=2)
    return make_model_folder(place / "model", "qwen2")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return train(folder, ProcessGroup())


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """What each of some ranks found."""
    return launch("train", request.param, folder)


def launch(work: str, size: int, folder: Path) -> list[dict[str, Any]]:
    out = folder.with_name(f"{work}{size}")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [*start, data_parallel_work.__file__, work, str(folder), str(out)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(size)]


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    """By place: each of the tensors, as vectors."""
    assert ours.keys() == theirs.keys()
    for name in theirs:
        difference = (ours[name].double() - theirs[name].double()).norm()
        assert difference <= tolerance * theirs[name].double().norm(), name


def test_the_gradient_is_that_of_one_rank(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """13 turns, of which some ranks have many, others none."""
    assert alone["token"]["spread"]["report"]["turns"] == 13
    for weighting in ("token", "trajectory"):
        for deal, expected in alone[weighting].items():
            dealt = [rank[weighting][deal] for rank in found]
            places = [set(one["gradient"]) for one in dealt]
            assert sum(map(len, places)) == len(set.union(*places)) == len(expected["gradient"])  # each on its owner
            assert_close({k: v for one in dealt for k, v in one["gradient"].items()}, expected["gradient"])
            assert all(one["report"] == expected["report"] for one in dealt)
    assert set(alone["token"]) == set(DEALS)


def test_the_log_is_that_of_one_rank(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    expected = alone["run"]
    assert [report["groups"] for report in expected["reports"]] == [5, 3, 5, 2, 1]
    assert expected["counts"][0][1] > 13 and expected["reports"][0]["updates"] == 3
    for rank, one in enumerate(rank["run"] for rank in found):
        assert one["drawn"] == expected["drawn"] and one["counts"] == expected["counts"]
        assert one["said"] == (expected["said"] if rank == 0 else [])
        for ours, theirs in zip(one["reports"], expected["reports"], strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours.keys() - {"gradient_norms", "first", "all"}:
                assert ours[name] == theirs[name], name
            assert ours["gradient_norms"] == pytest.approx(theirs["gradient_norms"], rel=1e-4)
            assert ours["first"]["tokens"] == theirs["first"]["tokens"] and ours["first"]["largest_difference"] == 0
            assert ours["all"] == pytest.approx(theirs["all"], rel=1e-3, abs=1e-6)
        first, second = one["reports"][0], expected["reports"][0]
        assert first["first"] == second["first"]  # of the same weights: every bit


def test_optimizer_states_are_parts_of_one(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    for work in ("run", "bfloat16"):
        expected, ranks = alone[work]["state"], [rank[work]["state"] for rank in found]
        for one in ranks[1:]:
            assert all(map(torch.equal, one["weights"], ranks[0]["weights"]))
        held = [{name: value for name, value in one["optimizer"].items() if name != "updates"} for one in ranks]
        sizes = [sum(value.numel() for value in one.values()) for one in held]
        assert max(sizes) < 1.5 * sum(sizes) / len(sizes)
        joined = {name: value for one in held for name, value in one.items()}
        assert sum(map(len, held)) == len(joined)
        assert joined.keys() == expected["optimizer"].keys() - {"updates"}
        masters = {name: value for name, value in joined.items() if name.endswith("master")}
        assert bool(masters) == (work == "bfloat16")
        assert_close(masters, {name: expected["optimizer"][name] for name in masters}, 1e-3)
    assert [r["reward"] for r in found[0]["bfloat16"]["reports"]] == [r["reward"] for r in alone["bfloat16"]["reports"]]


@pytest.mark.slow
def test_models_over_ranks_beside_each_other(alone: dict[str, Any], folder: Path) -> None:
    """Two models of two ranks each."""
    expected = alone["run"]
    for one in launch("grid", 4, folder):
        assert one["drawn"] == expected["drawn"] and one["counts"] == expected["counts"]
        for ours, theirs in zip(one["reports"], expected["reports"], strict=True):
            assert [ours[name] for name in ("reward", "tokens", "updates")] == [
                theirs[name] for name in ("reward", "tokens", "updates")
            ]
            assert ours["gradient_norms"] == pytest.approx(theirs["gradient_norms"], rel=1e-3)
            assert ours["first"]["largest_difference"] == 0


def test_what_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProcessGroup.start().size == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 ranks do not divide into models of 3"):
        ProcessGroup.start(tensor=3)
    with pytest.raises(ConfigError, match="RANK"):
        ProcessGroup.start()


FAILURES = {
    "error in rollout": "rank 1 failed: KeyboardInterrupt: the document is gone",
    "killed in rollout": "rank 1 ended without a word",
    "killed in loss": "rank 1 ended without a word",
    "killed in checkpoint": "rank 1 ended without a word",
}


@pytest.mark.slow
@pytest.mark.parametrize("work", FAILURES)
def test_no_rank_outlives_another(work: str, folder: Path, tmp_path: Path) -> None:
    """Without torchrun's help, which would kill them: the message is their own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = []
    for rank in range(3):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        command = [sys.executable, data_parallel_work.__file__, work, str(folder), str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=ENVIRONMENT | shared | own, stderr=subprocess.PIPE, text=True))
    try:
        ranks[1].wait(200)
        ended = time.monotonic()
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert time.monotonic() - ended < 60
    finally:
        for process in ranks:
            process.kill()
    assert all(rank.returncode != 0 for rank in ranks)
    for rank in (0, 2):
        assert FAILURES[work] in said[rank], said[rank][-2000:]

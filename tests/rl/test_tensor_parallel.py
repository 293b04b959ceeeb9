"""Tensor parallel: several ranks compute, sample and train as one does."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from palimpsest.engine import lora
from palimpsest.engine.shards import Shards
from palimpsest.rl.process_group import ProcessGroup
from palimpsest.tests.rl import tensor_parallel_work
from palimpsest.tests.rl.tensor_parallel_work import greedy, make_engine, train, work
from palimpsest.tests.tiny_models import make_model_folder

# With fewer key heads than ranks, some ranks share one.
WIDE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
KINDS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "adapters": ("qwen3", {}),
}
CASES = [(2, name) for name in KINDS]
CASES += [pytest.param((4, name), marks=pytest.mark.slow) for name in ("qwen2", "adapters")]


class Case(NamedTuple):
    """A kind of model over some ranks. ranks: what each of them found. saved: the whole model that they wrote."""

    name: str
    folder: Path
    ranks: list[dict[str, Any]]
    saved: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: make_model_folder(place / name, kind, **(WIDE | more)) for name, (kind, more) in KINDS.items()}


def launch(size: int, folders: dict[str, Path], out: Path) -> list[dict[str, Any]]:
    """Run the work on some ranks; -> what each of them found."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / ".typing")}
    arguments = [tensor_parallel_work.__file__, *(f"{name}={folder}" for name, folder in folders.items()), str(out)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> Callable[[int], list[dict[str, Any]]]:
    """What each of so many ranks found."""

    @functools.cache
    def of(size: int) -> list[dict[str, Any]]:
        chosen = folders if size == 2 else {name: folders[name] for name in ("qwen2", "adapters")}
        return launch(size, chosen, folders["llama"].parent / str(size))

    return of


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[1]}-{case[0]}")
def case(request: pytest.FixtureRequest, folders: dict[str, Path], found: Callable[[int], Any]) -> Case:
    size, name = request.param
    return Case(name, folders[name], [rank[name] for rank in found(size)], folders["llama"].parent / f"{size}.{name}")


@pytest.fixture(scope="module")
def alone(case: Case) -> dict[str, Any]:
    """What one rank finds, with the rollouts of the many."""
    return work(case.folder, None, case.name == "adapters", case.ranks[0]["groups"])


def assert_close(ours: list[float], theirs: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=0)


def drawn(rank: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(t.response_ids, t.logprobs) for group in rank["groups"] for one in group.trajectories for t in one.turns]


def test_what_is_drawn_is_what_one_rank_draws(case: Case, alone: dict[str, Any]) -> None:
    for rank in case.ranks:
        assert rank["greedy"] == case.ranks[0]["greedy"] and drawn(rank) == drawn(case.ranks[0])
        for (ids, logprobs), (expected, those) in zip(rank["greedy"], alone["greedy"], strict=True):
            assert ids == expected
            assert_close(logprobs, those)


def test_rollout_and_trainer_agree_to_the_bit(case: Case, alone: dict[str, Any]) -> None:
    """However many ranks are summed over, as rows are in other batches there; and one rank sees those rollouts so."""
    assert all(rank["first"]["largest_difference"] == 0 for rank in case.ranks)
    assert 0 < alone["first"]["largest_difference"] < 1e-5
    assert case.ranks[0]["supervised"] == pytest.approx(alone["supervised"], rel=1e-5)
    assert case.ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5, abs=1e-5)


def test_gradients_are_slices_and_their_norm_counts_each_once(case: Case, alone: dict[str, Any]) -> None:
    shards = Shards(alone["engine"].model.config, len(case.ranks))
    for number, rank in enumerate(case.ranks):
        assert rank["gradient"].keys() == alone["gradient"].keys()
        for name, gradient in rank["gradient"].items():
            whole = shards.cut(name, alone["gradient"][name], number)
            assert whole.norm() > 0 and (gradient - whole).norm() <= 1e-5 * whole.norm(), name
        assert rank["norm"] == case.ranks[0]["norm"]
    assert case.ranks[0]["norm"] == pytest.approx(alone["norm"], rel=1e-5)


def test_what_several_ranks_hold_stays_the_same_on_them(case: Case, alone: dict[str, Any]) -> None:
    shards = Shards(alone["engine"].model.config, len(case.ranks))
    held = {name: shards.copies(name) for name in case.ranks[0]["model"]}
    assert {1, len(case.ranks)} <= set(held.values())
    for name, copies in held.items():
        for number, rank in enumerate(case.ranks):
            first = case.ranks[number // copies * copies]["model"][name]
            assert torch.equal(rank["model"][name], first), name


def test_what_they_save_one_rank_loads(case: Case) -> None:
    if case.name == "adapters":
        engine = make_engine(case.folder, None)
        lora.load(engine, case.saved)
    else:
        engine = make_engine(case.saved, None)
    shards = Shards(engine.model.config, len(case.ranks))
    for name, parameter in engine.model.named_parameters():
        for number, rank in enumerate(case.ranks):
            assert torch.equal(shards.cut(name, parameter.detach(), number), rank["model"][name]), name
    for (ids, logprobs), (expected, those) in zip(greedy(engine), case.ranks[0]["updated"], strict=True):
        assert ids == expected
        assert_close(logprobs, those)
    assert case.ranks[0]["updated"] != case.ranks[0]["greedy"]


def test_ranks_that_differ_are_refused_on_all_of_them(found: Callable[[int], list[dict[str, Any]]]) -> None:
    for rank in found(2):
        assert [message.split(";")[0] for message in rank["disagreements"]] == [
            "rank 1 was given other requests than rank 0 (2 calls, rank 0 had 3)",
            "the ranks of this tensor-parallel engine do different things, or this one left a step before its end",
            "rank 1 was given other requests than rank 0 (3 calls, rank 0 had 3)",
            "the training pass of rank 1 differs from that of rank 0",
            "rank 1 is at a step, rank 0 at a fingerprint",
        ]


@pytest.mark.slow
def test_models_of_two_ranks_train_together(folders: dict[str, Path], tmp_path: Path) -> None:
    """Three groups on two models of two ranks each: the rewards, the norms and the weights of one rank alone."""
    ranks = launch(4, {"grid": folders["llama"]}, folders["llama"].parent / "grid")
    alone = train(folders["llama"], ProcessGroup(), tmp_path)
    before = make_engine(folders["llama"], None).model.state_dict()
    assert all(rank["rewards"] == alone["rewards"] for rank in ranks) and len(set(alone["rewards"])) == 2
    assert alone["resumed"] and all(rank["resumed"] for rank in ranks)
    for rank in ranks:
        for norms, expected in zip(rank["norms"], alone["norms"], strict=True):
            assert norms == pytest.approx(expected, rel=1e-5)
    for name, weight in alone["weights"].items():
        moved = (weight - before[name]).norm()
        assert moved > 0 and (ranks[0]["weights"][name] - weight).norm() <= 1e-5 * moved + 1e-6, name

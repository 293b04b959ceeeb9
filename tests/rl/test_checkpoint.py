"""Checkpoints: ten steps are five and five more, bit for bit; whole or not there; damage is named."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from palimpsest.engine import lora
from palimpsest.engine.config import EngineConfig
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import CheckpointError
from palimpsest.engine.lora import LoraConfig
from palimpsest.rl.checkpoint import Checkpoints
from palimpsest.rl.random_state import set_random_state
from palimpsest.tests.rl import little_run
from palimpsest.tests.rl.little_run import Little
from palimpsest.tests.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama", tie_word_embeddings=True)


@pytest.mark.parametrize("kind", ["all", "bfloat16", "adapters"])
def test_ten_steps_are_five_and_five_more(folder: Path, tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {"adapters": {"lora": LoraConfig(rank=4)}, "bfloat16": {"dtype": "bfloat16"}}.get(
        kind, {}
    )
    random.seed(5)
    whole = Little(folder, **changes)
    for _ in range(5):
        whole.step()
    saved = Checkpoints(tmp_path).save(whole.trainer, whole.state())
    assert saved.name == "step-00000005"
    expected = [whole.step() for _ in range(5)]
    drawn = numpy.random.random(), torch.rand(1).item()

    resumed = Little(folder, **changes)
    run = Checkpoints(tmp_path).restore(resumed.trainer)
    assert run is not None
    resumed.rollout.load_state_dict(run["rollout"])
    set_random_state(run["random"])
    assert [resumed.step() for _ in range(5)] == expected
    assert resumed.weights().keys() == whole.weights().keys()
    assert all(torch.equal(p, whole.weights()[name]) for name, p in resumed.weights().items())
    assert (numpy.random.random(), torch.rand(1).item()) == drawn


def test_what_is_saved_others_load(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    little = Little(folder)
    little.step()
    place = Checkpoints(tmp_path).save(little.trainer, {})
    engine = Engine(place / "model", EngineConfig(kv_bytes=1 << 20, max_context=256))
    assert all(torch.equal(p, little.weights()[name]) for name, p in engine.model.named_parameters())
    theirs = AutoModelForCausalLM.from_pretrained(place / "model")
    assert all(torch.equal(p, little.weights()[name]) for name, p in theirs.named_parameters())
    little = Little(folder, lora=LoraConfig(rank=4))
    little.step()
    place = Checkpoints(tmp_path / "adapters").save(little.trainer, {})
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 20, max_context=256))
    lora.load(engine, place / "adapter")
    assert all(torch.equal(p, little.weights()[name]) for name, p in engine.model.named_parameters())


def test_the_newest_and_the_best_stay(folder: Path, tmp_path: Path) -> None:
    little, checkpoints = Little(folder), Checkpoints(tmp_path, keep=2)
    for score in (0.1, 0.7, None, 0.7, 0.2, 0.3):
        little.trainer.steps += 1
        checkpoints.save(little.trainer, {}, score)
    assert [place.name for place in checkpoints.all()] == ["step-00000002", "step-00000005", "step-00000006"]
    with pytest.raises(CheckpointError, match=r"step-00000006 exists"):
        checkpoints.save(little.trainer, {})
    assert sorted(place.name for place in tmp_path.iterdir()) == [place.name for place in checkpoints.all()]


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damage_is_named_and_the_one_before_offered(folder: Path, tmp_path: Path) -> None:
    little, checkpoints = Little(folder), Checkpoints(tmp_path)
    assert checkpoints.restore(little.trainer) is None
    places = []
    for number in range(2):
        little.step()
        places.append(checkpoints.save(little.trainer, {"mark": number}))
    first, second = places
    before = little.weights()
    for harm, name in (
        (_cut, "optimizer-00001-of-00001.safetensors"),
        (_flip, "optimizer-00001-of-00001.safetensors"),
        (_flip, "model/model.safetensors"),
        (_flip, "state.json"),
        (_flip, "manifest.json"),
        (Path.unlink, "model/config.json"),
        (Path.unlink, "manifest.json"),
    ):
        kept = tmp_path / "kept"
        shutil.copytree(second, kept)
        harm(second / name)
        with pytest.raises(
            CheckpointError, match=r"step-00000002 is damaged: .*go on from step-00000001.*rm -r"
        ) as told:
            Checkpoints(tmp_path).restore(little.trainer)
        assert name in str(told.value) or name == "manifest.json"
        assert all(torch.equal(p, before[n]) for n, p in little.weights().items())
        shutil.rmtree(second)
        kept.rename(second)
    assert Checkpoints(tmp_path).restore(little.trainer) == {"mark": 1}
    shutil.rmtree(second)
    assert Checkpoints(tmp_path).restore(little.trainer) == {"mark": 0} and little.trainer.steps == 1
    _cut(first / "state.json")
    with pytest.raises(CheckpointError, match=r"step-00000001 is damaged.*no other one is whole"):
        Checkpoints(tmp_path).restore(little.trainer)


def test_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    little = Little(folder, lora=LoraConfig(rank=4))
    Checkpoints(tmp_path / "a").save(little.trainer, {})
    for other, why in (
        (Little(folder), "use the same LoraConfig"),
        (Little(folder, lora=LoraConfig(rank=2)), "rank 4 .* rank 2"),
        (Little(make_model_folder(tmp_path / "m", "llama", seed=1), lora=LoraConfig(rank=4)), "another model below"),
    ):
        with pytest.raises(CheckpointError, match=why):
            Checkpoints(tmp_path / "a").restore(other.trainer)


def launch(*arguments: object) -> int:
    """Two ranks of little_run; -> their exit code."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / ".typing")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", little_run.__file__]
    done = subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=200
    )
    if done.returncode:
        print(done.stderr[-3000:])
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_that_one_was_killed_of_go_on(folder: Path, tmp_path: Path, parts: int) -> None:
    """Rank 1 dies instead of writing its part of the fourth checkpoint: there is none. parts: ranks of one model."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert launch(folder, whole, tmp_path / "a", parts, 0) == 0
    assert launch(folder, killed, tmp_path / "b", parts, 4) != 0
    assert Checkpoints(killed).steps == 3 and not Path(f"{tmp_path / 'b'}.0").exists()
    assert launch(folder, killed, tmp_path / "c", parts, 0) == 0
    for rank in range(2):
        begun, said, weights = torch.load(f"{tmp_path / 'c'}.{rank}", weights_only=False)
        _, expected, theirs = torch.load(f"{tmp_path / 'a'}.{rank}", weights_only=False)
        assert begun == 3 and said == expected[3:]
        assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
    files = sorted(file.name for file in (whole / "step-00000006").glob("optimizer*"))
    for name in files:
        assert (whole / "step-00000006" / name).read_bytes() == (killed / "step-00000006" / name).read_bytes()
    assert len(files) == 2
    alone = Little(folder)
    if parts == 1:  # any number of ranks may go on
        assert Checkpoints(whole).restore(alone.trainer) is not None and alone.trainer.steps == 6
        assert all(torch.equal(p, theirs[name]) for name, p in alone.weights().items())
    else:
        with pytest.raises(CheckpointError, match="other parts of the model"):
            Checkpoints(whole).restore(alone.trainer)

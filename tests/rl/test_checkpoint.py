"""Checkpoints: ten steps are five and five more, bit for bit; whole or not there; damage is named."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from palimpsest.engine import lora
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import CheckpointError
from palimpsest.engine.lora import LoraConfig
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.rl.checkpoint import Checkpoints
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.random_state import random_state, set_random_state
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Problem
from palimpsest.tests.tiny_models import make_model_folder

ALGORITHM = AlgorithmConfig(group_size=3, kl=0.05)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=3, total_steps=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama", tie_word_embeddings=True)


class Little:
    """The least that trains: problems by number, a reward that draws numbers of its own."""

    def __init__(self, folder: Path, dtype: str = "float32", **changes: Any) -> None:
        engine = Engine(folder, EngineConfig(dtype=dtype, kv_bytes=1 << 22, threads=1, max_context=1024))
        sampling = SamplingParams(temperature=1.0, seed=2)
        agent = MemoryAgent(engine, AgentConfig(chunk_tokens=60, memory_tokens=12, answer_tokens=6, sampling=sampling))
        self.rollout = Rollout(agent, lambda answer, references: len(answer) % 3 + random.random(), ALGORITHM)
        self.trainer = Trainer(engine, TrainerConfig(**{"algorithm": ALGORITHM, "optimizer": OPTIMIZER} | changes))

    def step(self) -> list[Any]:
        number = self.trainer.steps
        text = "The keeper counted the lamps, and wrote their number down. " * (2 + number % 3)
        groups = list(self.rollout.groups([Problem(text, f"How many, {number}?", ())], 1))
        turns = [turn for trajectory in groups[0].trajectories for turn in trajectory.turns]
        report = self.trainer.step(groups)
        assert report.updates == 1 and report.first["largest_difference"] == 0
        assert sum(counters.proposed for turn in turns for counters in turn.drafts.values()) > 0
        said = [report.step, report.reward, report.gradient_norms, report.learning_rates, report.all]
        said.append(self.trainer.engine.weights_version)
        return [*said, [(turn.response_ids, turn.logprobs) for turn in turns], self.rollout.samples]

    def state(self) -> dict[str, Any]:
        return {"rollout": self.rollout.state_dict(), "random": random_state()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.trainer.engine.model.named_parameters()}


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

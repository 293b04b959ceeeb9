"""Trainer: one set of weights, the gradient of the published objective whatever the order of the work."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest.engine import lora
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError, RequestError
from palimpsest.engine.lora import LoraConfig
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.rl import trainer as trainer_module
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.process_group import ProcessGroup
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.step_report import StepReport
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Group, Problem, Trajectory
from palimpsest.tests.tiny_models import make_model_folder
from torch import Tensor

SAMPLED = SamplingParams(temperature=0.8, seed=7)
DOCUMENTS = [
    "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(first, first + length))
    for first, length in ((1800, 5), (1700, 3), (1850, 4))
]
QUESTION = "Who kept the lighthouse?"
FAST = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen2", tie_word_embeddings=True)


def make_engine(folder: Path, **changes: Any) -> Engine:
    return Engine(folder, EngineConfig(**{"kv_bytes": 1 << 22, "threads": 1, "max_context": 1024} | changes))


def make_agent(engine: Engine, template: str = "memory_first", sampling: SamplingParams = SAMPLED) -> MemoryAgent:
    config = AgentConfig(chunk_tokens=60, memory_tokens=10, answer_tokens=6, template=template, sampling=sampling)
    return MemoryAgent(engine, config)


def roll(agent: MemoryAgent, size: int = 4, documents: list[str] = DOCUMENTS) -> list[Group]:
    """A group per document, with rewards that have no meaning but differ."""
    readings = agent.read_many([(document, QUESTION) for document in documents for _ in range(size)])
    rewards = [float(sum(reading.turns[-1].response_ids) % 3) for reading in readings]
    trajectories = [Trajectory(reading.turns, r, r) for reading, r in zip(readings, rewards, strict=True)]
    return [
        Group(trajectories[i : i + size], agent.config.sampling, agent.engine.weights_version)
        for i in range(0, len(trajectories), size)
    ]


def config_of(algorithm: AlgorithmConfig | None = None, **changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"algorithm": algorithm or AlgorithmConfig(), "optimizer": FAST} | changes)


def gradient(engine: Engine, config: TrainerConfig, groups: Any) -> dict[str, Tensor]:
    """What the optimizer would be given in a first update, which must be on policy; nothing is updated."""
    found, report = any_gradient(engine, config, groups)
    assert report.first["largest_difference"] == 0 and report.first["ratio"] == 1
    assert report.first["clipped_low"] == report.first["clipped_high"] == 0
    return found


def any_gradient(engine: Engine, config: TrainerConfig, groups: Any) -> tuple[dict[str, Tensor], StepReport]:
    """Divided as the optimizer divides."""
    trainer, found, version = Trainer(engine, config), dict[str, Tensor](), engine.weights_version

    def catch(denominator: float) -> tuple[float, float]:
        for name, parameter in engine.model.named_parameters():
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad / denominator, None
        return 0.0, 0.0

    trainer._optimizer.step = catch  # type: ignore[method-assign]
    report = trainer.step(groups)
    engine.weights_version = version  # as they are
    return found, report


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert ours.keys() == plain.keys()
    for name in plain:
        assert plain[name].norm() > 0 and (ours[name] - plain[name]).norm() <= tolerance * plain[name].norm(), name


def test_the_gradient_is_that_of_transformers(folder: Path) -> None:
    """The published objective by hand at its first update: -sum of advantage * log-probability over all tokens / N."""
    engine = make_engine(folder)
    groups = roll(make_agent(engine))
    assert_gradient_of_transformers(folder, gradient(engine, config_of(), groups), groups)


def test_ends_are_tokens_like_any_other(tmp_path: Path) -> None:
    """Every third id ends a response, that of the padding too: responses of an end alone, and of several ends."""
    ends = list(range(0, 512, 3))
    folder = make_model_folder(tmp_path, "llama", pad_token_id=ends[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    engine = make_engine(folder)
    groups = roll(make_agent(engine), 8)
    responses = [turn.response_ids for g in groups for t in g.trajectories for turn in t.turns]
    assert sum(len(ids) == 1 and ids[0] in ends for ids in responses) > 5
    assert len({ids[-1] for ids in responses if ids[-1] in ends}) > 5
    assert_gradient_of_transformers(folder, gradient(engine, config_of(), groups), groups)


def assert_gradient_of_transformers(folder: Path, ours: dict[str, Tensor], groups: list[Group]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    count = sum(len(turn.response_ids) for g in groups for t in g.trajectories for turn in t.turns)
    for group in groups:
        mean = sum(t.reward for t in group.trajectories) / len(group.trajectories)
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                ids = torch.tensor(turn.prompt_ids + turn.response_ids)
                start = len(turn.prompt_ids)
                logprobs = (model(ids[None]).logits[0, start - 1 : -1] / SAMPLED.temperature).log_softmax(-1)
                chosen = logprobs.gather(1, ids[start:, None]).sum()
                (-(trajectory.reward - mean) * chosen / count).backward()
    exact = {name: p.grad for name, p in model.named_parameters() if name in ours}
    assert_close({name: grad.double() for name, grad in ours.items()}, exact, 2e-5)


def test_the_order_of_the_work_does_not_matter(folder: Path) -> None:
    engine = make_engine(folder)
    groups = roll(make_agent(engine, "chunk_first"))
    algorithm = AlgorithmConfig(kl=0.05, entropy=0.01, weighting="trajectory")
    plain = gradient(engine, config_of(algorithm, share_prefixes=False, recompute=False), groups)
    for changes in (
        {"train_tokens": 360, "share_prefixes": False},  # one turn at a time
        {"train_tokens": 900, "share_prefixes": False},
        {},
    ):
        assert_close(gradient(engine, config_of(algorithm, **changes), groups), plain)
    assert_close(gradient(engine, config_of(algorithm), groups[::-1]), plain)
    shuffled = [_shuffled(group) for group in groups]
    same = gradient(engine, config_of(algorithm, recompute=False), iter(shuffled))
    shared = gradient(engine, config_of(algorithm), groups)
    assert all(torch.equal(same[name], shared[name]) for name in plain)


def _shuffled(group: Group) -> Group:
    rng = random.Random(3)
    trajectories = [dataclasses.replace(t, turns=rng.sample(list(t.turns), len(t.turns))) for t in group.trajectories]
    return dataclasses.replace(group, trajectories=rng.sample(trajectories, len(trajectories)))


def test_an_update_happens_in_place_and_forgets_all_pages(folder: Path) -> None:
    engine = make_engine(folder)
    agent = make_agent(engine)
    trainer = Trainer(engine, config_of())
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in engine.model.named_parameters()}
    groups, prompt = roll(agent), list(range(40))
    params = SamplingParams(max_tokens=3, temperature=0)
    engine.generate([prompt], params)
    assert engine.generate([prompt], params)[0].counters.cached_tokens > 0
    version = engine.weights_version
    report = trainer.step(groups)
    assert report.updates == 1 and engine.weights_version == version + 1 and report.recomputed == 0
    for name, parameter in engine.model.named_parameters():
        address, old = before[name]
        assert parameter.data_ptr() == address and not torch.equal(parameter, old), name
    assert engine.generate([prompt], params)[0].counters.cached_tokens == 0
    with pytest.raises(RequestError, match="weights version 0, the engine is at 1"):
        trainer.step(groups)
    assert report.first["reference_kl"] == 0
    report = trainer.step(roll(agent))
    assert report.first["largest_difference"] == 0 < report.first["reference_kl"]  # the reference stayed behind


def test_learning_rate_0_for_50_steps_stays_on_policy(folder: Path) -> None:
    engine = make_engine(folder)
    agent = make_agent(engine, "chunk_first")
    still = OptimizerConfig(learning_rate=0.0, warmup_steps=0)
    trainer = Trainer(engine, config_of(AlgorithmConfig(kl=0.0), optimizer=still, train_tokens=700))
    before = [p.detach().clone() for p in engine.model.parameters()]
    for _ in range(50):
        report = trainer.step(roll(agent, 2, DOCUMENTS[1:2]))
        assert report.all.get("largest_difference", 0.0) == 0
    assert engine.weights_version > 10
    assert all(torch.equal(p, old) for p, old in zip(engine.model.parameters(), before, strict=True))


def test_later_mini_batches_are_measured_against_the_rollout(folder: Path) -> None:
    engine = make_engine(folder)
    agent = make_agent(engine)
    trainer = Trainer(engine, config_of(AlgorithmConfig(kl=0.0), mini_batch=2))
    report = trainer.step(roll(agent))
    assert report.updates == 2 and report.recomputed == 0
    assert report.first["largest_difference"] == 0 < report.all["largest_difference"]
    corrected = AlgorithmConfig(kl=0.0, correction="truncate")
    trainer = Trainer(engine, config_of(corrected, mini_batch=2))
    groups = roll(agent)
    report = trainer.step(groups)
    assert report.recomputed == sum(len(turn.response_ids) for t in groups[2].trajectories for turn in t.turns)
    assert report.first["ratio"] == 1 != report.all["ratio"]
    stale = trainer.step(groups)
    assert stale.first["largest_difference"] > 0


def test_a_correction_weighs_stale_rollouts(folder: Path) -> None:
    """Far from all bounds, importance weight times ratio 1 is the ratio against the policy that drew."""
    engine = make_engine(folder)
    groups = roll(make_agent(engine))
    Trainer(engine, config_of(AlgorithmConfig(kl=0.0))).step(groups)
    corrected = AlgorithmConfig(kl=0.0, correction="truncate", correction_high=1e6)
    ours, report = any_gradient(engine, config_of(corrected), groups)
    assert report.first["ratio"] == 1 and report.first["largest_difference"] > 0.01 and report.recomputed == 0
    cut, report = any_gradient(engine, config_of(dataclasses.replace(corrected, correction_high=1.0)), groups)
    assert 0 < report.first["corrected"] < 1
    stale = [dataclasses.replace(group, weights_version=engine.weights_version) for group in groups]
    unbounded = AlgorithmConfig(kl=0.0, clip_low=1.0, clip_high=100.0, dual_clip=None)
    plain, _ = any_gradient(engine, config_of(unbounded), stale)
    assert_close(ours, plain, 1e-5)
    assert all((cut[name] - plain[name]).norm() > 1e-3 * plain[name].norm() for name in plain)


def test_adapters_alone_are_trained(folder: Path) -> None:
    engine = make_engine(folder)
    agent = make_agent(engine)
    trainer = Trainer(engine, config_of(AlgorithmConfig(kl=0.1), lora=LoraConfig(rank=4)))
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    for first in (True, False):
        report = trainer.step(roll(agent))
        assert report.first["largest_difference"] == 0
        assert (report.first["reference_kl"] == 0) == first  # the reference is the model without adapters
    moved = {name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(lora.adapters(engine.model)) == 14


@pytest.mark.parametrize("masters", [True, False])
def test_bfloat16_needs_masters_for_small_updates(folder: Path, masters: bool) -> None:
    engine = make_engine(folder, dtype="bfloat16")
    agent = make_agent(engine)
    small = OptimizerConfig(learning_rate=2e-5, warmup_steps=0, weight_decay=0.0, master_weights=masters)
    trainer = Trainer(engine, config_of(optimizer=small))
    before = engine.model.layers[0].input_layernorm.weight.detach().clone()  # near 1: half a last bit is 2e-3
    for _ in range(2):
        assert trainer.step(roll(agent)).first["largest_difference"] == 0
    norm = engine.model.layers[0].input_layernorm.weight
    assert torch.equal(norm, before) and norm.dtype == torch.bfloat16
    names = [name for name, _ in engine.model.named_parameters()]
    master = trainer._optimizer._masters[names.index("model.layers.0.input_layernorm.weight")]
    assert torch.equal(master.float(), before.float()) != masters


def test_masked_and_empty_turns(folder: Path) -> None:
    engine = make_engine(folder)
    groups = roll(make_agent(engine))
    cut = [turn.finish_reason == "length" for g in groups for t in g.trajectories for turn in t.turns]
    assert any(cut)
    masked = gradient(engine, config_of(AlgorithmConfig(mask_truncated=True)), [_but_some_end(g) for g in groups])
    dropped = gradient(engine, config_of(), [_but_some_end(g, drop=True) for g in groups])
    assert_close(masked, dropped)
    nothing = Trainer(engine, config_of()).step([])
    assert nothing.updates == 0 and nothing.groups == 0
    all_cut = [_but_some_end(g, reason="length") for g in groups]
    nothing = Trainer(engine, config_of(AlgorithmConfig(mask_truncated=True))).step(all_cut)
    assert nothing.updates == 0 and nothing.tokens > 0 == nothing.all["tokens"]


def _but_some_end(group: Group, drop: bool = False, reason: str = "stop") -> Group:
    """Every second turn ends by itself; drop: the others are gone, and each trajectory has an empty turn."""
    trajectories = []
    for t in group.trajectories:
        turns = [dataclasses.replace(turn, finish_reason=("length", reason)[i % 2]) for i, turn in enumerate(t.turns)]
        if drop:
            empty = dataclasses.replace(turns[0], response_ids=turns[0].response_ids[:0], logprobs=[])
            turns = [empty, *turns[1::2]]
        trajectories.append(dataclasses.replace(t, turns=turns))
    return dataclasses.replace(group, trajectories=trajectories)


def test_what_is_not_the_policys_own_is_refused(folder: Path) -> None:
    engine = make_engine(folder)
    groups = roll(make_agent(engine))
    others = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1}
    others |= {"frequency_penalty": 0.1, "logit_bias": {3: 1.0}, "min_tokens": 2, "temperature": 0.0}
    same = {"seed": 3, "max_tokens": 9, "stop": ("a",), "stop_ids": (3,), "ignore_eos": True}
    same |= {"top_logprobs": 1, "prompt_logprobs": True}
    assert others.keys() | same.keys() == vars(SAMPLED).keys()  # decide what a new field does to the policy
    for correction in ("none", "truncate"):  # which knows nothing of what filters cut off
        trainer = Trainer(engine, config_of(AlgorithmConfig(kl=0.0, correction=correction)))
        for name, value in others.items():
            drawn = dataclasses.replace(SAMPLED, **{name: value})
            with pytest.raises(ConfigError, match=name):
                trainer.step([dataclasses.replace(groups[0], sampling=drawn)])
    assert all(p.grad is None for p in engine.model.parameters()) and engine.weights_version == 0
    for changes, words in (
        ({"reference": "lora_off"}, "lora_off"),
        ({"reference": "none"}, "kl is 0.001"),
        ({"lora": LoraConfig(), "reference": "copy"}, "use reference='lora_off'"),
    ):
        with pytest.raises(ConfigError, match=words):
            Trainer(make_engine(folder), config_of(**changes))
    for changes in ({"weights": "int8"}, {"kv_dtype": "int8"}):
        with pytest.raises(ConfigError, match="quantised"):
            Trainer(make_engine(folder, **changes), config_of())


def test_a_rollout_that_fails_leaves_nothing_behind(folder: Path) -> None:
    engine = make_engine(folder)
    trainer, groups = Trainer(engine, config_of()), roll(make_agent(engine))

    def failing() -> Any:
        yield groups[0]
        raise OSError("the document is gone")

    with pytest.raises(OSError, match="gone"):
        trainer.step(failing())
    assert all(p.grad is None for p in engine.model.parameters())
    assert trainer.step(groups).updates == 1


def test_a_gpu_is_planned_with_its_own_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder)
    monkeypatch.setattr(engine.model.ops, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 3 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1 << 20)
    assert trainer_module._plan(engine, config_of(), ProcessGroup()).available == (1 << 30) + (1 << 20)


def test_out_of_memory_says_what_helps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more to say")

    engine = make_engine(folder)
    trainer, groups = Trainer(engine, config_of()), roll(make_agent(engine), 2, DOCUMENTS[1:2])
    monkeypatch.setattr(trainer._loss, "backward", full)
    with pytest.raises(ConfigError, match=r"a training step asked for 2.00 GiB more .*; lower .*train_tokens"):
        trainer.step(groups)


def test_what_is_refused_ends_its_rollout(folder: Path) -> None:
    """Though the error still holds the generator, nothing is left that would hinder the next step."""
    engine = make_engine(folder)
    algorithm = AlgorithmConfig(kl=0.0, group_size=2)
    trainer = Trainer(engine, config_of(algorithm, train_tokens=40))
    problems = [Problem(DOCUMENTS[1] * times, QUESTION, ()) for times in (1, 5)]
    rewards = iter((0.0, 1.0, 0.0, 1.0))
    rollout = Rollout(make_agent(engine), lambda answer, references: next(rewards), algorithm)
    with pytest.raises(ConfigError, match="train_tokens=40") as held:
        trainer.step(rollout.groups(problems, 2))
    assert held.tb is not None
    trainer = Trainer(engine, config_of(algorithm))
    assert not engine.unfinished and trainer.step(roll(make_agent(engine))).updates == 1


def test_reward_rises(folder: Path) -> None:
    """Twelve steps towards answers with small ids, on a model that knows nothing."""
    engine = make_engine(folder)
    agent = make_agent(engine)
    trainer = Trainer(engine, config_of(AlgorithmConfig(kl=0.0), optimizer=OptimizerConfig(2e-2, warmup_steps=0)))
    rewards = []
    for step in range(12):
        agent = make_agent(engine, sampling=dataclasses.replace(SAMPLED, seed=step))
        groups = [_rewarded(group, lambda ids: sum(i < 250 for i in ids) / len(ids)) for group in roll(agent, 8)]
        rewards.append(trainer.step(groups).reward)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards


def _rewarded(group: Group, reward: Callable[[Any], float]) -> Group:
    values = [reward(t.turns[-1].response_ids) for t in group.trajectories]
    trajectories = [Trajectory(t.turns, r, r) for t, r in zip(group.trajectories, values, strict=True)]
    return dataclasses.replace(group, trajectories=trajectories)

"""The loss of a group through the model: every preset's gradient off policy, put together by hand over transformers."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.rl.config import PRESETS, AlgorithmConfig
from palimpsest.rl.group_loss import GroupLoss
from palimpsest.rl.loss import TokenRows, policy_loss
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Group, Trajectory
from palimpsest.tests.tiny_models import make_model_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

TEMPERATURE = 0.8
REWARDS = [1.0, 0.0, 0.25, 0.0]
DOCUMENT = "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(1800, 1803))


def roll(engine: Engine) -> Group:
    """Readings of 2 or 3 turns each; where a response ends differs."""
    sampling = SamplingParams(temperature=TEMPERATURE, seed=1, stop_ids=tuple(range(0, 512, 12)))
    agent = MemoryAgent(engine, AgentConfig(60, 12, 9, template="chunk_first", sampling=sampling))
    readings = agent.rollout(DOCUMENT, "Who kept the lighthouse?", len(REWARDS))
    trajectories = [
        Trajectory(reading.turns[: 2 + i % 2], r, r)
        for i, (reading, r) in enumerate(zip(readings, REWARDS, strict=True))
    ]
    return Group(trajectories, sampling, engine.weights_version)


def scores(model: PreTrainedModel, group: Group) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all response tokens, turn after turn."""
    logprobs, entropies = [], []
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            ids, start = torch.tensor(turn.prompt_ids + turn.response_ids), len(turn.prompt_ids)
            every = (model(ids[None]).logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1)
            logprobs.append(every.gather(1, ids[start:, None])[:, 0])
            entropies.append(-(every.exp() * every).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def rows_by_hand(group: Group, preset: str, reference: Tensor) -> TokenRows:
    """Weights already divided: they add up to 1, but for dr_grpo's."""
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS) + 1e-6
    total = sum(len(turn.response_ids) for t in group.trajectories for turn in t.turns)
    turns = sum(len(t.turns) for t in group.trajectories)
    advantages, weights, numbers, old = [], [], [], []
    for trajectory in group.trajectories:
        length = sum(len(turn.response_ids) for turn in trajectory.turns)
        for turn in trajectory.turns:
            count = len(turn.response_ids)
            weight = {
                "grpo": 1 / length / len(REWARDS),
                "dr_grpo": 1 / 1024 / len(REWARDS),
                "gspo": 1 / count / turns,
            }.get(preset, 1 / total)
            plain = preset in ("memagent", "dr_grpo")
            advantages += [(trajectory.reward - mean) / (1.0 if plain else std)] * count
            weights += [weight] * count
            numbers += [len(set(numbers))] * count
            old += turn.logprobs
    values = [torch.tensor(x, dtype=torch.float64) for x in (advantages, weights, old)]
    return TokenRows(values[0], values[1], torch.tensor(numbers), values[2], reference_logprobs=reference)


@pytest.mark.parametrize("budget", [400, 4096])
def test_every_preset_off_policy(tmp_path: Path, budget: int) -> None:
    folder = make_model_folder(tmp_path, "qwen3", tie_word_embeddings=True)
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, threads=1, max_context=1024))
    group = roll(engine)
    configs = {name: AlgorithmConfig.preset(name, kl=0.1, entropy=0.05) for name in PRESETS}
    losses = {name: GroupLoss(engine, TrainerConfig(config, train_tokens=budget)) for name, config in configs.items()}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        reference, _ = scores(theirs, group)
        generator = torch.Generator().manual_seed(0)
        with engine.update():  # an update of any kind
            for p in engine.model.parameters():
                p += 0.02 * torch.randn(p.shape, generator=generator)
        moved = {name: p.double() for name, p in engine.model.named_parameters()}
        assert not theirs.load_state_dict(moved, strict=False).unexpected_keys
    theirs.tie_weights()
    now, entropies = scores(theirs, group)
    named = dict(theirs.named_parameters())
    engine.model.requires_grad_(True)
    for name, config in configs.items():
        loss, seen = policy_loss(now, rows_by_hand(group, name, reference), config, entropies=entropies)
        clipped = seen.means()["clipped_low"] + seen.means()["clipped_high"]
        assert seen.means()["difference"] > 0.05 and (name == "cispo" or 0 < clipped < 1)
        exact = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        denominator, ours = losses[name].backward(group, None)
        assert ours.means() == pytest.approx(seen.means(), rel=1e-3)
        for key, grad in zip(named, exact, strict=True):
            parameter = engine.model.get_parameter(key)
            assert parameter.grad is not None
            difference = (parameter.grad.double() / denominator - grad).norm()
            assert grad.norm() > 0 and difference <= 1e-4 * grad.norm(), (name, key)
            parameter.grad = None

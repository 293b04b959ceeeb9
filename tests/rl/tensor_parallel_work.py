"""What each rank of a tensor-parallel engine and trainer does in the tests; without a process group, what one does.

Started by torchrun as a script: KIND=FOLDER ... OUT. Each rank writes OUT.RANK, the first also saved models.
With the kind "grid" pairs of ranks hold models that train together.
"""

from __future__ import annotations

import dataclasses
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from palimpsest.engine import lora
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import RequestError
from palimpsest.engine.lora import LoraConfig
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.engine.model_config import parameter_shapes
from palimpsest.engine.parallel import whole_parameters
from palimpsest.rl import group_loss
from palimpsest.rl.checkpoint import Checkpoints
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.process_group import ProcessGroup
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.step_report import StepReport
from palimpsest.rl.supervised import Example, SupervisedTrainer
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Group, Problem, Trajectory

PROMPTS = ["The keeper said:", "The harbour town of Ostrel has 4312 people", "We'll see who is right. " * 4]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
AGENT = AgentConfig(
    chunk_tokens=60,
    memory_tokens=10,
    answer_tokens=6,
    template="chunk_first",
    sampling=SamplingParams(temperature=0.8, seed=7),
)
DOCUMENT = "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(1800, 1806))
ADAPTER = LoraConfig(rank=3)


def make_engine(folder: Path, group: dist.ProcessGroup | None) -> Engine:
    config = EngineConfig(kv_bytes=1 << 20, threads=1, max_context=1024, max_step_tokens=64, max_sequences=8)
    return Engine(folder, config, process_group=group)


def work(folder: Path, group: dist.ProcessGroup | None, adapters: bool, groups: list[Group] | None) -> dict[str, Any]:
    """Greedy responses, a group of rollouts (or those given), its gradient, and greedy responses after the update."""
    engine = make_engine(folder, group)
    if adapters:
        lora.add(engine, ADAPTER)
        shake(engine)
    still = TrainerConfig(optimizer=OptimizerConfig(learning_rate=0.0), train_tokens=500)
    supervised = SupervisedTrainer(engine, still).step(examples(engine))
    found = {"supervised": [supervised.loss, supervised.gradient_norm]}
    found |= {"greedy": greedy(engine), "groups": roll(engine) if groups is None else groups}
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    algorithm = AlgorithmConfig(kl=0.05, entropy=0.01)
    trainer = Trainer(engine, TrainerConfig(algorithm, optimizer, train_tokens=500))
    found["gradient"] = watch(trainer)
    with losses() as found["losses"]:
        report = trainer.step(found["groups"])
    found |= {"norm": report.gradient_norms, "first": report.first, "updated": greedy(engine)}
    found["model"] = {name: p.detach() for name, p in engine.model.named_parameters()}
    return found | {"engine": engine}


def examples(engine: Engine) -> list[Example]:
    ids = [array("i", engine.tokenizer.encode(prompt)) for prompt in PROMPTS]
    return [Example(ids[0], ids[1]), Example(ids[1], ids[2])]


def greedy(engine: Engine) -> list[tuple[list[int], list[float]]]:
    return [(list(done.token_ids), done.logprobs) for done in engine.generate(PROMPTS, GREEDY)]


def roll(engine: Engine) -> list[Group]:
    readings = MemoryAgent(engine, AGENT).rollout(DOCUMENT, "Who kept the lighthouse?", 4)
    rewards = [float(sum(reading.turns[-1].response_ids) % 3) for reading in readings]
    trajectories = [Trajectory(reading.turns, r, r) for reading, r in zip(readings, rewards, strict=True)]
    return [Group(trajectories, AGENT.sampling, engine.weights_version)]


def shake(engine: Engine) -> None:
    """Give every adapter an effect, the same for any number of ranks."""
    generator, parallel = torch.Generator().manual_seed(5), engine.parallel
    shapes = parameter_shapes(engine.model.whole_config)
    with engine.update(), torch.no_grad():
        for name, layer in lora.adapters(engine.model).items():
            whole = torch.empty(shapes[f"{name}.weight"][0], ADAPTER.rank).normal_(0.0, 0.1, generator=generator)
            layer.lora_B.copy_(whole if parallel is None else parallel.cut(f"{name}.lora_B", whole))
    engine.weights_version = 0


def watch(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Filled with the gradient that the next update is given."""
    found: dict[str, torch.Tensor] = {}
    plain = trainer._optimizer._step  # after the parts of a gradient were summed

    def step(denominator: float) -> tuple[float, float]:
        named = trainer.engine.model.named_parameters()
        found.update((name, p.grad / denominator) for name, p in named if p.grad is not None)
        return plain(denominator)

    trainer._optimizer._step = step  # type: ignore[method-assign]
    return found


@contextmanager
def losses() -> Iterator[list[float]]:
    """Filled with the losses of the passes in the block."""
    found, plain = [], group_loss.fused_policy_loss

    def loss(*arguments: Any) -> Any:
        result = plain(*arguments)
        found.append(result.loss.item())
        return result

    with patch.object(group_loss, "fused_policy_loss", loss):
        yield found


def disagreements(folder: Path, group: dist.ProcessGroup) -> list[str]:
    """What is said when the last rank is given something else than the others."""
    odd = dist.get_rank(group) == dist.get_world_size(group) - 1
    messages = []

    def expect(function: Any) -> None:
        try:
            function()
        except RequestError as error:
            messages.append(str(error))

    engine = make_engine(folder, group)
    expect(lambda: engine.generate(PROMPTS[:2] if odd else PROMPTS, GREEDY))
    expect(engine.step)
    engine = make_engine(folder, group)
    expect(lambda: engine.generate(PROMPTS, dataclasses.replace(GREEDY, temperature=1.0, seed=int(odd))))
    engine = make_engine(folder, group)
    groups = roll(engine)
    rewarded = [
        dataclasses.replace(trajectory, reward=i * (1.0 + odd)) for i, trajectory in enumerate(groups[0].trajectories)
    ]
    trainer = Trainer(engine, TrainerConfig(AlgorithmConfig(kl=0.0)))
    expect(lambda: trainer.step([dataclasses.replace(groups[0], trajectories=rewarded)]))
    engine = make_engine(folder, group)
    expect(engine.step if odd else engine.describe)
    return messages


def train(folder: Path, process_group: ProcessGroup, checkpoints: Path) -> dict[str, Any]:
    """Two steps of three groups, and the second once more after a resume; -> what was reported, and whole weights."""
    found, again = Training(folder, process_group), Training(folder, process_group)
    reports, saved = [found.step()], Checkpoints(checkpoints, process_group=process_group)
    saved.save(found.trainer, found.rollout.state_dict())
    reports.append(found.step())
    state = saved.restore(again.trainer)
    assert state is not None
    again.rollout.load_state_dict(state)
    resumed = again.step()
    told = {"rewards": [report.reward for report in reports], "norms": [report.gradient_norms for report in reports]}
    told["resumed"] = (resumed.reward, resumed.gradient_norms) == (told["rewards"][1], told["norms"][1])
    pairs = zip(found.engine.model.parameters(), again.engine.model.parameters(), strict=True)
    told["resumed"] = told["resumed"] and all(torch.equal(one, other) for one, other in pairs)
    return told | {"weights": whole_parameters(found.engine.model)}


class Training:
    """Of three groups a step."""

    def __init__(self, folder: Path, process_group: ProcessGroup) -> None:
        algorithm = AlgorithmConfig(group_size=3, kl=0.0)
        # A large epsilon makes the update proportional to the gradient, so that small differences stay small.
        optimizer = OptimizerConfig(learning_rate=0.1, epsilon=1.0, warmup_steps=0)
        self.engine = make_engine(folder, process_group.tensor)
        self.trainer = Trainer(self.engine, TrainerConfig(algorithm, optimizer, train_tokens=500), process_group)
        self.rollout = Rollout(MemoryAgent(self.engine, AGENT), _reward, algorithm, process_group)

    def step(self) -> StepReport:
        problems = [Problem(DOCUMENT[start:], "Who kept the lighthouse?", ()) for start in (0, 100, 200)]
        return self.trainer.step(self.rollout.groups(problems, 3))


def _reward(answer: str, references: Sequence[str]) -> float:
    return len(answer) % 3 / 2


def main(folders: list[str], out: str) -> None:
    torch.set_num_threads(1)
    if folders[0].startswith("grid="):
        with ProcessGroup.start(tensor=2) as process_group:
            found = train(Path(folders[0].removeprefix("grid=")), process_group, Path(f"{out}.checkpoints"))
            torch.save(found, f"{out}.{dist.get_rank()}")
        return
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    found = {}
    assert group is not None
    for name, folder in (folder.split("=") for folder in folders):
        found[name] = one = work(Path(folder), group, "adapters" in name, None)
        engine: Engine = one.pop("engine")
        if "adapters" in name:
            lora.save(engine.model, f"{out}.{name}")
        else:
            engine.save(f"{out}.{name}")
    found["disagreements"] = disagreements(Path(folders[0].split("=")[1]), group)
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])

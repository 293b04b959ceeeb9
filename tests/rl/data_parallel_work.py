"""What each rank of a data-parallel trainer does in the tests; without torchrun, what one process does.

Started as a script: WORK FOLDER OUT. "train" and "grid", where two ranks hold a model together, write OUT.RANK; the
others are ways in which rank 1 fails.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.rl.checkpoint import Checkpoints
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.process_group import ProcessGroup
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.step_report import StepReport
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Group, Problem, Trajectory
from torch import Tensor

AGENT = AgentConfig(
    chunk_tokens=60, memory_tokens=10, answer_tokens=6, sampling=SamplingParams(temperature=0.8, seed=7)
)
PLAIN = AlgorithmConfig(group_size=3, kl=0.0)
DYNAMIC = AlgorithmConfig(group_size=3, kl=0.05, dynamic_sampling=True, max_refills=3)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=0)
# By the kind of group (all updates, all finals, mixed), the rank of each of four: of rank numbers modulo the size.
DEALS = {"spread": (0, 1, 2, 3), "finals alone": (0, 1, 0, 0), "one idle": (0, 2, 0, 2), "one for all": (1, 1, 1, 1)}


def problems() -> Iterator[Problem]:
    for number in itertools.count(1):
        yield Problem(document(number, number % 4), "Who kept the lighthouse?", (str(number),))


def document(number: int, sentences: int) -> str:
    years = range(1700, 1700 + sentences)
    return f"Log {number}. " + "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in years)


def reward(answer: str, references: Sequence[str]) -> float:
    """Of no meaning; a fifth of the problems is all wrong."""
    return 0.0 if int(references[0]) % 5 == 0 else float(len(answer) % 3 == 0)


def make_trainer(folder: Path, ranks: ProcessGroup, config: TrainerConfig, dtype: str = "float32") -> Trainer:
    engine_config = EngineConfig(dtype=dtype, kv_bytes=1 << 22, threads=1, max_context=1024)
    return Trainer(Engine(folder, engine_config, process_group=ranks.tensor), config, ranks)


def thirteen_turns(engine: Engine) -> list[Group]:
    """Four groups: of two and three turns, finals alone, updates alone, and both."""
    agent = MemoryAgent(engine, AGENT)
    readings = [agent.rollout(document(number, 5), "Who?", 2) for number in range(4)]
    cuts = [[slice(0, 1), slice(1, 3)], [slice(-1, None)] * 2, [slice(0, 2), slice(0, 2)], [slice(-2, None)] * 2]
    groups = []
    for pair, parts in zip(readings, cuts, strict=True):
        turns = [reading.turns[part] for reading, part in zip(pair, parts, strict=True)]
        trajectories = [Trajectory(each, float(i), float(i)) for i, each in enumerate(turns)]
        groups.append(Group(trajectories, AGENT.sampling, engine.weights_version, len(groups)))
    return groups


def gradient(folder: Path, ranks: ProcessGroup, weighting: str, deal: Sequence[int]) -> dict[str, Any]:
    """Of the groups, dealt out to the ranks, as their optimizers get it: sums, by the places that this rank owns."""
    config = TrainerConfig(AlgorithmConfig(kl=0.05, entropy=0.01, weighting=weighting), OPTIMIZER)
    trainer = make_trainer(folder, ranks, config)
    optimizer, found = trainer._optimizer, dict[int, Tensor]()

    def catch() -> float:
        grads = {place: optimizer._parameters[place].grad for place in optimizer._masters}
        found.update({place: grad.clone() for place, grad in grads.items() if grad is not None})
        return float("inf")

    optimizer._norm = catch  # type: ignore[method-assign]
    groups = thirteen_turns(trainer.engine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the norm is inf
        report = trainer.step(
            [group for group, rank in zip(groups, deal, strict=True) if rank % ranks.size == ranks.rank]
        )
    return {"gradient": found, "report": numbers(report)}


def numbers(report: StepReport) -> dict[str, Any]:
    return {name: value for name, value in vars(report).items() if name != "seconds"}


def run(folder: Path, ranks: ProcessGroup) -> dict[str, Any]:
    """Three steps with dynamic sampling and mini-batches, one without any signal, one of a single group."""
    trainer = make_trainer(folder, ranks, TrainerConfig(DYNAMIC, OPTIMIZER, mini_batch=2))
    agent = MemoryAgent(trainer.engine, AGENT)
    rollout, source = Rollout(agent, reward, DYNAMIC, ranks), problems()
    reports, drawn = [], []
    for wanted in (5, 3, 5):
        groups = list(rollout.groups(source, wanted))
        drawn += sorted(_drawn(group) for each in ranks.gather(groups) for group in each)
        reports.append(numbers(trainer.step(groups)))
    dull = Rollout(agent, lambda answer, references: 0.0, DYNAMIC, ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports.append(numbers(trainer.step(dull.groups(source, 2))))
    single = Rollout(agent, reward, PLAIN, ranks, deterministic=False)
    reports.append(numbers(trainer.step(single.groups(source, 1))))
    counts = [(one.samples, one.rolled) for one in (rollout, dull, single)]
    said = [str(one.message) for one in caught if "no reward teaches" in str(one.message)]
    return {"reports": reports, "drawn": drawn, "counts": counts, "said": said, "state": _state(trainer)}


def bfloat16(folder: Path, ranks: ProcessGroup) -> dict[str, Any]:
    """Two updates of a bfloat16 model, whose weights are not those of rank 0 on the others at first."""
    if ranks.rank:
        folder = folder.with_name("other")
    trainer = make_trainer(folder, ranks, TrainerConfig(PLAIN, OPTIMIZER), "bfloat16")
    rollout, source = Rollout(MemoryAgent(trainer.engine, AGENT), reward, PLAIN, ranks), problems()
    reports = [numbers(trainer.step(rollout.groups(source, 4))) for _ in range(2)]
    return {"reports": reports, "state": _state(trainer)}


def _drawn(group: Group) -> tuple[int | None, list[list[int]]]:
    return group.place, [list(turn.response_ids) for one in group.trajectories for turn in one.turns]


def _state(trainer: Trainer) -> dict[str, Any]:
    weights = [parameter.detach().clone() for parameter in trainer.engine.model.parameters()]
    return {"weights": weights, "optimizer": trainer._optimizer.state_dict()}


def train(folder: Path, ranks: ProcessGroup) -> dict[str, Any]:
    return {
        "token": {name: gradient(folder, ranks, "token", deal) for name, deal in DEALS.items()},
        "trajectory": {name: gradient(folder, ranks, "trajectory", deal) for name, deal in list(DEALS.items())[:2]},
        "run": run(folder, ranks),
        "bfloat16": bfloat16(folder, ranks),
    }


def fail(work: str, folder: Path, ranks: ProcessGroup, out: Path) -> None:
    """Train until rank 1 ends: by an error in a rollout, or killed in one, in the loss, or when it writes."""
    trainer = make_trainer(folder, ranks, TrainerConfig(PLAIN, OPTIMIZER))
    mine = ranks.rank == 1

    def rewarded(answer: str, references: Sequence[str]) -> float:
        if mine and work == "error in rollout":
            raise KeyboardInterrupt("the document is gone")  # no reward function's own mistake: those are counted
        if mine and work == "killed in rollout":
            die()
        while ranks.rank == 2 and work.endswith("in rollout"):
            time.sleep(0.1)  # far from any exchange with other ranks
        return reward(answer, references)

    if mine and work == "killed in loss":
        trainer._loss.backward = die  # type: ignore[method-assign, assignment]
    if mine and work == "killed in checkpoint":
        trainer._optimizer.state_dict = die  # type: ignore[method-assign, assignment]
    rollout, source = Rollout(MemoryAgent(trainer.engine, AGENT), rewarded, PLAIN, ranks), problems()
    for _ in range(2):
        trainer.step(rollout.groups(source, 4))
        Checkpoints(out, process_group=ranks).save(trainer, {})


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    work, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    with ProcessGroup.start(tensor=2 if work == "grid" else 1) as process_group:
        if work == "train":
            torch.save(train(folder, process_group), f"{out}.{process_group.rank}")
        elif work == "grid":
            torch.save(run(folder, process_group), f"{out}.{os.environ['RANK']}")
        else:
            fail(work, folder, process_group, out)

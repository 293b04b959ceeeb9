"""The least that trains on any number of ranks; as a script, ten steps of it that may be interrupted.

Started by torchrun: MODEL_FOLDER CHECKPOINTS OUT PARTS [KILL]. PARTS: ranks that hold one model. KILL: rank 1 dies when
it writes this checkpoint. Writes OUT.RANK.
"""

from __future__ import annotations

import os
import random
import signal
import sys
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
from palimpsest.rl.random_state import random_state, set_random_state
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Problem

ALGORITHM = AlgorithmConfig(group_size=3, kl=0.05)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=3, total_steps=12)


class Little:
    """Problems by number, a reward that draws numbers of its own."""

    def __init__(self, folder: Path, dtype: str = "float32", ranks: ProcessGroup | None = None, **changes: Any) -> None:
        self.ranks = ProcessGroup() if ranks is None else ranks
        config = EngineConfig(dtype=dtype, kv_bytes=1 << 22, threads=1, max_context=1024)
        engine = Engine(folder, config, process_group=self.ranks.tensor)
        sampling = SamplingParams(temperature=1.0, seed=2)
        agent = MemoryAgent(engine, AgentConfig(chunk_tokens=60, memory_tokens=12, answer_tokens=6, sampling=sampling))
        reward = lambda answer, references: len(answer) % 3 + random.random()  # noqa: E731
        self.rollout = Rollout(agent, reward, ALGORITHM, self.ranks)
        config = TrainerConfig(**{"algorithm": ALGORITHM, "optimizer": OPTIMIZER} | changes)
        self.trainer = Trainer(engine, config, self.ranks)

    def step(self) -> list[Any]:
        number = self.trainer.steps
        text = "The keeper counted the lamps, and wrote their number down. " * (2 + number % 3)
        problems = [Problem(text, f"How many, {number}, {of}?", ()) for of in range(self.ranks.size)]
        [group] = self.rollout.groups(problems, len(problems))
        turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
        report = self.trainer.step([group])
        assert report.updates == 1 and report.first["largest_difference"] == 0
        assert sum(counters.proposed for turn in turns for counters in turn.drafts.values()) > 0
        said = [report.step, report.reward, report.gradient_norms, report.learning_rates, report.all]
        said.append(self.trainer.engine.weights_version)
        return [*said, [(turn.response_ids, turn.logprobs) for turn in turns], self.rollout.samples]

    def state(self) -> dict[str, Any]:
        return {"rollout": self.rollout.state_dict(), "random": random_state()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.trainer.engine.model.named_parameters()}


def main(folder: Path, checkpoints: Path, out: str, parts: int, kill: int) -> None:
    with ProcessGroup.start(tensor=parts) as ranks:
        number = int(os.environ["RANK"])
        random.seed(number // parts)
        little, kept = Little(folder, ranks=ranks), Checkpoints(checkpoints, process_group=ranks)
        state = kept.restore(little.trainer)
        if state is not None:
            little.rollout.load_state_dict(state["rollout"])
            set_random_state(state["random"])
        begun, said = little.trainer.steps, []
        while little.trainer.steps < 6:
            said.append(little.step())
            state = little.state()
            if number == 1 and little.trainer.steps == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            kept.save(little.trainer, state)
        torch.save((begun, said, little.weights()), f"{out}.{number}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))

"""The proof in small: from the warm-up weights, a few steps of reinforcement learning make the reward rise."""

from __future__ import annotations

import math
from pathlib import Path

from palimpsest.engine.config import SamplingParams
from palimpsest.rl.config_file import load_config
from palimpsest.rl.evaluation import evaluate
from palimpsest.rl.log import read_log
from palimpsest.rl.run import Run
from palimpsest.rl.tasks.slots import Slots, SlotsConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "slots"
HELD_OUT = Slots(SlotsConfig(seed=2_000_000, tokens=1024))
STEPS = 5


def test_the_reward_rises(tmp_path: Path) -> None:
    changes = [
        f"model.path={EXAMPLE / 'warmup'}",
        f"log.folder={tmp_path}",
        f"rollout={{steps: {STEPS}, problems: 8}}",
        "optimizer={learning_rate: 4e-4, betas: [0.9, 0.95], weight_decay: 0.0, warmup_steps: 0}",
    ]
    run = Run(load_config(EXAMPLE / "rl.yaml", changes))
    sampling = SamplingParams(temperature=1.0)
    before = evaluate(run.agent, HELD_OUT, range(96), "em", sampling=sampling)  # type: ignore[arg-type]
    run.train()
    after = evaluate(run.agent, HELD_OUT, range(96), "em", sampling=sampling)  # type: ignore[arg-type]
    assert after.reward - before.reward > 2 * math.hypot(before.standard_error, after.standard_error)
    steps = [line for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "step"]
    assert len(steps) == STEPS
    assert all(line["first"]["largest_difference"] == 0 and line["recomputed"] == 0 for line in steps)


def test_the_trained_weights_read_what_they_were_never_trained_on(tmp_path: Path) -> None:
    run = Run(load_config(EXAMPLE / "rl.yaml", [f"model.path={EXAMPLE / 'model'}", f"log.folder={tmp_path}"]))
    greedy = SamplingParams(temperature=0.0)
    long = Slots(SlotsConfig(seed=2_000_000, tokens=4096))
    found = evaluate(run.agent, long, range(64), "em", sampling=greedy)  # type: ignore[arg-type]
    assert found.reward > 0.95 and found.means()["undecoded"] > 0.5

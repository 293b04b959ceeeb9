"""The whole proof for one seed: warm-up, reinforcement learning, accuracy by length; `python examples/slots/proof.py`.

What is done already is not done again: a run that was stopped goes on. Figures are in results.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from palimpsest.rl.log import read_log
from palimpsest.rl.tasks.slots_model import write_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# What of warmup.yaml changes in each stage. The look-up forms with many keys in a short chunk; then chunks grow, with
# lengths mixed, as a model that has seen one length alone goes by positions; at last comes the bias.
CONSTANT = {"optimizer.learning_rate": 1e-3, "optimizer.schedule": "constant", "optimizer.total_steps": None}


def stage(steps: int, chunks: list[int], **changes: Any) -> dict[str, Any]:
    return {"rollout.steps": steps, "data.chunk_tokens": chunks, "data.bias": 0.0, **CONSTANT, **changes}


def falling(rate: float, steps: int) -> dict[str, Any]:
    return {"optimizer.learning_rate": rate, "optimizer.schedule": "linear", "optimizer.total_steps": steps + 1}


STAGES = {
    "look-up": stage(500, [16, 16], **{"data.keys": [6, 6], "optimizer.warmup_steps": 40}),
    "two-keys": stage(350, [16, 16]),
    "chunks-32": stage(120, [16, 32]),
    "chunks-64": stage(150, [16, 64]),
    "chunks-128": stage(250, [32, 128]),
    "sure": stage(350, [32, 128], **falling(1e-3, 350)),
    "bias-0.8": stage(120, [128, 128], **falling(5e-4, 120), **{"data.bias": 0.8}),
    "bias-0.9": stage(300, [128, 128], **falling(8e-4, 300), **{"data.bias": 0.9}),
}
LENGTHS = {"1K": 256, "4K": 256, "16K": 256, "64K": 256, "256K": 64, "1M": 32, "3.5M": 32}  # documents of each
SHORT = ("1K", "4K", "16K", "64K")  # for what is not greedy, and for the warm-up model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "run" / "slots")
    parser.add_argument("--documents", type=int, help="at most so many of each length")
    parser.add_argument("--longest", choices=tuple(LENGTHS), default="3.5M", help="leave longer documents out")
    args = parser.parse_args()
    folder = args.folder / f"seed-{args.seed}"
    warm = warm_up(folder, args.seed)
    trained = reinforce(folder, warm, args.seed)
    names = list(LENGTHS)[: list(LENGTHS).index(args.longest) + 1]
    most = {name: min(LENGTHS[name], args.documents or LENGTHS[name]) for name in names}
    rows = measure(folder, trained, "rl", "greedy", most)
    short = {name: most[name] for name in names if name in SHORT}
    rows += measure(folder, trained, "rl", "top_p", short) + measure(folder, trained, "rl", "sampled", short)
    rows += measure(folder, warm, "warmup", "greedy", short) + measure(folder, warm, "warmup", "sampled", short)
    enter(args.seed, {"accuracy": rows, "steps": list(steps(folder / "rl"))})


def palimpsest(*words: object) -> str:
    """Run a command of the package; -> what it printed."""
    command = [sys.executable, "-m", "palimpsest", *map(str, words)]
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def train(config: str, changes: dict[str, Any], *options: str) -> None:
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    palimpsest("train", HERE / config, *settings, *options)


def warm_up(folder: Path, seed: int) -> Path:
    """-> the folder of the model after the last stage."""
    model = folder / "model"
    if not model.exists():
        write_model(model, seed)
    for name, changes in STAGES.items():
        place = folder / f"warmup-{name}"
        if not (place / "model").exists():
            (place / "log.jsonl").unlink(missing_ok=True)
            train("warmup.yaml", {**changes, "model.path": str(model), "data.seed": seed, "log.folder": str(place)})
        model = place / "model"
    return model


def reinforce(folder: Path, model: Path, seed: int) -> Path:
    """-> the folder of the model after the last step."""
    changes = {"model.path": str(model), "data.seed": seed, "agent.sampling.seed": seed, "log.folder": f"{folder}/rl"}
    train("rl.yaml", changes, "--resume")
    return max((folder / "rl" / "checkpoints").glob("step-*")) / "model"


def measure(folder: Path, model: Path, name: str, sampling: str, documents: dict[str, int]) -> list[dict[str, Any]]:
    """A row of results for each length."""
    rows = []
    for length, count in documents.items():
        output = folder / f"accuracy-{name}.jsonl"
        words = ["bench", "reading_accuracy", HERE / "rl.yaml", "--model", model, "--output", output]
        words += ["--lengths", length, "--documents", count, "--sampling", sampling]
        [row] = json.loads(palimpsest(*words).splitlines()[-1])["rows"]
        rows.append({"model": name, **row})
    return rows


def steps(folder: Path) -> list[dict[str, Any]]:
    """What the log of the reinforcement learning says of each step."""
    found = []
    for line in read_log(folder / "log.jsonl"):
        if line["kind"] == "step":
            machine = line["machine"]
            found.append(
                {
                    "run": "rl",
                    "step": line["step"],
                    "reward": line["correct_of_rolled"],
                    "kept": line["correct"],  # of the groups that dynamic sampling keeps
                    "groups": line["groups"],
                    "mismatch": line["first"]["largest_difference"],
                    "entropy": line["first"]["entropy"],
                    "truncated": line["truncated"],
                    "draft_acceptance": machine["draft_acceptance"]["all"],
                    "seconds": machine["seconds"],
                }
            )
    return found


def enter(seed: int, figures: dict[str, Any]) -> None:
    """Put the figures of a seed into results.json."""
    file = HERE / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results[f"seed {seed}"] = figures
    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The whole proof for one seed: warm-up, reinforcement learning, accuracy by length; `python examples/slots/proof.py`.

Seed 0 also has the readings that are not greedy, those of the warm-up model, and the time of a step.

What is done already is not done again: a run that was stopped goes on. Figures are in results.json beside this file;
those of fewer or shorter documents than the proof needs, in the folder of the works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.bench.command import palimpsest
from palimpsest.bench.reading_accuracy import HELD_OUT
from palimpsest.engine.errors import PalimpsestError
from palimpsest.rl.log import read_log
from palimpsest.rl.tasks.slots import MOST_KEYS, VARIANTS
from palimpsest.rl.tasks.slots_model import write_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# What of warmup.yaml changes in each stage. The look-up forms with many keys in short chunks; then chunks grow, with
# lengths mixed, as a model that has seen one length alone goes by positions; the bias comes last.
CONSTANT = {"optimizer.learning_rate": 1e-3, "optimizer.schedule": "constant", "optimizer.total_steps": None}


def stage(steps: int, chunks: list[int], **changes: Any) -> dict[str, Any]:
    return {"rollout.steps": steps, "data.chunk_tokens": chunks, "data.bias": 0.0, **CONSTANT, **changes}


def falling(rate: float, steps: int) -> dict[str, Any]:
    return {"optimizer.learning_rate": rate, "optimizer.schedule": "linear", "optimizer.total_steps": steps + 1}


STAGES = {
    "look-up": stage(300, [16, 32], **{"data.keys": [6, 6], "data.shuffled": 1.0, "optimizer.warmup_steps": 40}),
    "chunks": stage(200, [16, 128], **{"data.keys": [2, 6], "data.shuffled": 0.5}),
    "sure": stage(300, [64, 128], **falling(1e-3, 300)),
    "bias": stage(500, [128, 128], **falling(1e-3, 500), **{"data.bias": 0.9}),
}
WITHOUT: dict[str, dict[str, Any]] = {  # what a step of reinforcement learning costs with something switched off
    "all on": {},
    "no drafts": {"model.engine.drafts": False},
    "no open prompts": {"model.engine.open_prompt": False},
    "no shared prefixes": {"parallel.share_prefixes": False},
    "all off": {"model.engine.drafts": False, "model.engine.open_prompt": False, "parallel.share_prefixes": False},
}
LENGTHS = {"1K": 256, "4K": 256, "16K": 256, "64K": 256, "256K": 64, "1M": 32, "3.5M": 32}  # documents of each
LONG, AT_ONCE = ("1M", "3.5M"), 8  # so many documents of these are read side by side
TIMED = 4  # steps; the first is left out
SHORT = {"1K": 256, "4K": 256, "16K": 128, "64K": 64}  # for all but the greedy readings of the trained plain models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=tuple(VARIANTS), default="plain", help="of the task")
    parser.add_argument("--chunk-first", action="store_true", help="the chunk stands before the memory in the prompt")
    parser.add_argument("--folder", type=Path, default=ROOT / "run" / "slots")
    parser.add_argument("--documents", type=int, help="at most so many of each length")
    parser.add_argument("--longest", choices=tuple(LENGTHS), default="3.5M", help="leave longer documents out")
    args = parser.parse_args()
    if args.documents is not None and args.documents < 1:
        parser.error(f"--documents must be at least 1, got {args.documents}")
    if args.seed == HELD_OUT:
        parser.error(f"--seed {HELD_OUT} is that of the documents which are measured on; take another")
    whole = args.documents is None and args.longest == "3.5M"
    results = (HERE if whole else args.folder) / "results.json"
    read_results(results)  # what cannot be read is told before anything is trained
    work = Work(args.folder.resolve(), args.seed, args.variant, args.chunk_first)
    warm = warm_up(work)
    trained = reinforce(work, warm)
    names = list(LENGTHS)[: list(LENGTHS).index(args.longest) + 1]
    most, short = (
        {name: min(counts[name], args.documents or counts[name]) for name in names if name in counts}
        for counts in (LENGTHS if work.plain else SHORT, SHORT)
    )
    rows = measure(work, trained, "rl", "greedy", most)
    step = {}
    if work.plain and work.seed == 0:
        rows += measure(work, trained, "rl", "top_p", short) + measure(work, trained, "rl", "sampled", short)
        rows += measure(work, warm, "warmup", "greedy", short) + measure(work, warm, "warmup", "sampled", short)
        step = {"step": {name: step_seconds(work, warm, name) for name in WITHOUT}}
    else:
        rows += measure(work, warm, "warmup", "greedy", {"1K": most["1K"]})
    figures = {"seconds": seconds(work.folder), "accuracy": rows, "steps": steps(work.folder / "rl"), **step}
    enter(work.name, figures, results)


@dataclass(frozen=True)
class Work:
    """What is trained and measured. place: of the folders of all works."""

    place: Path
    seed: int
    variant: str
    chunk_first: bool

    @property
    def plain(self) -> bool:
        """Whether it is the task as it stands, which all lengths are read of."""
        return self.variant == "plain" and not self.chunk_first

    @property
    def name(self) -> str:
        """In results.json."""
        parts = [f"seed {self.seed}", "" if self.variant == "plain" else self.variant]
        return " ".join(part for part in (*parts, "chunk_first" if self.chunk_first else "") if part)

    @property
    def folder(self) -> Path:
        return self.place / self.name.replace(" ", "-")

    @property
    def changes(self) -> dict[str, Any]:
        """Keys of the configurations that are others for it."""
        changes: dict[str, Any] = {"data.seed": self.seed, "data.variant": self.variant}
        if self.chunk_first:
            changes["agent.template"] = [" question", "{problem}", " text", "{chunk}", " memory", "{memory}", " update"]
        return changes


def train(config: str, changes: dict[str, Any], *options: str) -> None:
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    palimpsest("train", HERE / config, *settings, *options)


def warm_up(work: Work) -> Path:
    """-> the folder of the model after the last stage."""
    model = work.folder / "model"
    if not model.exists():
        write_model(model, work.seed)
    for name, stage_changes in STAGES.items():
        place = work.folder / f"warmup-{name}"
        if not (place / "model").exists():
            changes = {**stage_changes, **work.changes, "model.path": str(model), "log.folder": str(place)}
            if work.variant != "plain" and "data.keys" in changes:  # more facts of each would not fit into a unit
                changes["data.keys"] = [min(keys, MOST_KEYS) for keys in changes["data.keys"]]
            train("warmup.yaml", changes, "--resume")
        model = place / "model"
    return model


def reinforce(work: Work, model: Path) -> Path:
    """-> the folder of the model after the last step."""
    changes = {**work.changes, "agent.sampling.seed": work.seed, "model.path": str(model)}
    train("rl.yaml", {**changes, "log.folder": f"{work.folder}/rl"}, "--resume")
    return max((work.folder / "rl" / "checkpoints").glob("step-*")) / "model"


def step_seconds(work: Work, model: Path, name: str) -> dict[str, float]:
    """Medians over the steps of a short run from the warm-up model with something switched off, the first one aside."""
    folder = work.folder / f"step-{name.replace(' ', '-')}"
    if not (folder / "checkpoints" / f"step-{TIMED:08}").exists():
        shutil.rmtree(folder, ignore_errors=True)  # one that was stopped would go on with a step that is a first one
        changes = {**work.changes, **WITHOUT[name], "model.path": str(model), "log.folder": str(folder)}
        train("rl.yaml", {**changes, "rollout.steps": TIMED, "checkpoint.every": TIMED})
    found = [step["seconds"] for step in steps(folder)][1:]
    found = [{**parts, "rest": 2 * parts["step"] - sum(parts.values())} for parts in found]  # the step is one of them
    return {part: statistics.median(parts[part] for parts in found) for part in found[0]}


def measure(work: Work, model: Path, name: str, sampling: str, documents: dict[str, int]) -> list[dict[str, Any]]:
    """A row of results for each length."""
    rows = []
    settings = [word for key, value in work.changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    for length, count in documents.items():
        output = work.folder / f"accuracy-{name}.jsonl"
        words = ["bench", "reading_accuracy", HERE / "rl.yaml", *settings, "--model", model, "--output", output]
        words += ["--lengths", length, "--sampling", sampling, "--documents"]
        if length in LONG:  # documents end together, and what is read of them until then is lost when it is stopped
            for known in range(AT_ONCE, count, AT_ONCE):
                palimpsest(*words, known)
        [row] = json.loads(palimpsest(*words, count).splitlines()[-1])["rows"]
        rows.append({"model": name, **row})
    return rows


def seconds(folder: Path) -> dict[str, float]:
    """Of all steps of the warm-up, and of the reinforcement learning."""
    logs = {"warmup": folder.glob("warmup-*/log.jsonl"), "rl": folder.glob("rl/log.jsonl")}
    lines = {name: [line for file in files for line in read_log(file)] for name, files in logs.items()}
    return {
        name: sum(line["machine"]["seconds"]["step"] for line in found if line["kind"] == "step")
        for name, found in lines.items()
    }


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
                    "draft_acceptance": machine["draft_acceptance"].get("all"),  # none without drafts
                    "seconds": machine["seconds"],
                }
            )
    return found


def read_results(file: Path) -> dict[str, Any]:
    """The figures of all works, by name; none where there is no file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        raise SystemExit(f"{file} is not JSON ({error}); restore it, or move it away for a new one") from error
    if not isinstance(found, dict):
        raise SystemExit(f"{file} does not hold figures by work; restore it, or move it away for a new one")
    return found


def enter(name: str, figures: dict[str, Any], file: Path = HERE / "results.json") -> None:
    """Put the figures of a work into a file of results, which is whole at any time."""
    text = json.dumps({**read_results(file), name: figures}, indent=1) + "\n"
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)


if __name__ == "__main__":
    try:
        main()
    except PalimpsestError as error:
        sys.exit(f"palimpsest: {error}")

"""Make the embedded model a memory agent: warm-up, learning, accuracy; `python examples/embedded/embedded.py`.

What is done already is not done again, and a run that was stopped goes on. The adapters are in run/embedded, figures in
results.json there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from palimpsest.bench.command import palimpsest, printed
from palimpsest.engine import lora, reading_file
from palimpsest.engine.config import AgentConfig, SamplingParams
from palimpsest.engine.defaults import embedded_model_path
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import PalimpsestError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "run" / "embedded"

LENGTHS = {"1K": 64, "4K": 64, "16K": 32, "64K": 24, "256K": 4}  # documents of each
SHORT, MIDDLE = ("1K", "4K"), ("1K", "4K", "16K")
# What is measured, by name: what of rl.yaml is other, and the lengths.
WORKS = {
    "one_fact": ("data.variant=one_fact", tuple(LENGTHS)),
    "two_hop": ("data.variant=two_hop", MIDDLE),
    "last_value": ("data.variant=last_value", MIDDLE),
    "other_filler": ("data.filler=mixed", MIDDLE),
    "direct": ("model.engine.max_context=8192", SHORT),  # the whole document in one prompt
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, help="at most so many of each length")
    parser.add_argument("--longest", choices=tuple(LENGTHS), default="256K", help="leave longer documents out")
    parser.add_argument("--stop-after", choices=("warmup", "rl"), default="rl", help="what is trained (%(default)s)")
    args = parser.parse_args()
    if args.documents is not None and args.documents < 1:
        parser.error(f"--documents must be at least 1, got {args.documents}")
    adapters: dict[str, Path | None] = {"base": None, "warmup": warm_up()}
    if args.stop_after == "rl":
        adapters["rl"] = reinforce()
    names = list(LENGTHS)[: list(LENGTHS).index(args.longest) + 1]
    documents = {name: min(LENGTHS[name], args.documents or LENGTHS[name]) for name in names}
    rows = [row for name, adapter in adapters.items() for row in measure(name, adapter, documents)]
    results = {"rows": rows, "prose": {name: prose(adapter) for name, adapter in adapters.items()}}
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def train(config: str, **changes: Any) -> None:
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    palimpsest("train", HERE / config, *settings, "--resume")


def warm_up() -> Path:
    """-> the adapter after both supervised stages."""
    train("quiz.yaml", **{"log.folder": str(FOLDER / "quiz")})
    train("warmup.yaml", **{"model.adapter": str(FOLDER / "quiz" / "adapter"), "log.folder": str(FOLDER / "warmup")})
    return FOLDER / "warmup" / "adapter"


def reinforce() -> Path:
    """-> the adapter after the last step, in bfloat16, with palimpsest.json."""
    train("rl.yaml", **{"model.adapter": str(FOLDER / "warmup" / "adapter"), "log.folder": str(FOLDER / "rl")})
    place = FOLDER / "adapter"
    if not place.exists():
        newest = max((FOLDER / "rl" / "checkpoints").glob("step-*"))
        engine = Engine(embedded_model_path())
        lora.load(engine, newest / "adapter")
        lora.save(engine.model, place, embedded_model_path().name, dtype=torch.bfloat16)
        reading_file.write(place, AgentConfig(512, 96, 24, sampling=SamplingParams(temperature=0.0)))
    return place


def measure(name: str, adapter: Path | None, documents: dict[str, int]) -> Iterator[dict[str, Any]]:
    """A row of results for each length and kind of question, on words and sentences that are held out."""
    for length, count in documents.items():
        for work, (change, lengths) in WORKS.items():
            if length not in lengths or (name == "base" and length not in SHORT):
                continue
            words = ["bench", "reading_accuracy", HERE / "rl.yaml", "--lengths", length, "--documents", count]
            words += ["--method", "direct" if work == "direct" else "memory"]
            words += ["--set", "data.split=held_out", "--set", change]
            words += ["--set", "model.adapter=null"] if adapter is None else ["--adapter", adapter]
            output = FOLDER / "accuracy" / f"{name}-{work}.jsonl"
            [row] = json.loads(palimpsest(*words, "--output", output).splitlines()[-1])["rows"]
            yield {"model": name, "work": work, **row}


def prose(adapter: Path | None) -> dict[str, Any]:
    """What prose.py finds."""
    command = [sys.executable, HERE / "prose.py", *(() if adapter is None else ("--adapter", adapter))]
    found: dict[str, Any] = json.loads(printed(command).splitlines()[-1])
    return found


if __name__ == "__main__":
    try:
        main()
    except PalimpsestError as error:
        sys.exit(f"palimpsest: {error}")

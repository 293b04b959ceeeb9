"""Where a training step's time goes: `python -m palimpsest.bench.rl_step`.

Groups of readings of one document each, then one update on them; with everything that a memory agent's engine can save
(open prompts, drafts, prefixes shared by a group in rollout and training), and with all of it off. The results of the
two are the same, the seconds are not. The reward is a made-up one: what it is does not change what a step costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engine.config import AgentConfig, EngineConfig, SamplingParams
from ..engine.defaults import embedded_model_path
from ..engine.engine import Engine
from ..engine.errors import ConfigError, PalimpsestError
from ..engine.memory_agent import MemoryAgent
from ..rl.config import AlgorithmConfig
from ..rl.optimizer import OptimizerConfig
from ..rl.rollout import Rollout
from ..rl.step_report import StepReport
from ..rl.trainer import Trainer
from ..rl.trainer_config import TrainerConfig
from ..rl.trajectory import Problem

__all__ = ["main", "run"]

TEXT = Path(__file__).resolve().parents[1] / "examples" / "demo" / "harbour.txt"
QUESTION = "Which ships were lost?"
VARIANTS = {"all on": True, "all off": False}
EXIT_MISSED, EXIT_ERROR = 1, 2


@dataclass(frozen=True)
class Work:
    """documents, each read `rollouts` times in `chunks` chunks; limits in tokens."""

    documents: int
    rollouts: int
    chunks: int
    chunk_tokens: int
    memory_tokens: int
    answer_tokens: int

    def __str__(self) -> str:
        return f"{self.documents} documents x {self.rollouts} rollouts x {self.chunks} chunks of {self.chunk_tokens}"


FULL = Work(4, 4, 3, 512, 64, 32)
QUICK = Work(4, 4, 3, 64, 12, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit code: 0, 1 when --check finds a broken promise, 2 after a mistake of the user."""
    args = _parser().parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        report = run(args.model, QUICK if args.quick else FULL, args.rounds)
    except PalimpsestError as error:
        print(f"palimpsest bench rl_step: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(_table(report["rows"]))
    print(json.dumps(report), flush=True)
    return EXIT_MISSED if args.check and any(target["met"] is False for target in report["targets"]) else 0


def run(model: str | None, work: Work, rounds: int) -> dict[str, Any]:
    """The JSON document of the report. Raises PalimpsestError for a model that cannot be used."""
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {rounds}")
    path = str(embedded_model_path()) if model is None else model
    ways = {name: _Way(path, work, saving) for name, saving in VARIANTS.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way.step())
            print(f"{name}: a step took {found[name][-1]['seconds']:.1f} s", file=sys.stderr)
    rows = [
        {"engine": "palimpsest", "work": str(work), "variant": name, **_median(some)} for name, some in found.items()
    ]
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__, "model": Path(path).name}
    return {"bench": "rl_step", "machine": machine, "rows": rows, "targets": _targets(rows)}


class _Way:
    """One way to make steps, with an engine of its own."""

    def __init__(self, path: str, work: Work, saving: bool) -> None:
        config = EngineConfig(open_prompt=saving, drafts=saving, max_sequences=work.documents * work.rollouts)
        self.engine = Engine(path, dataclasses.replace(config, kv_share=0.1))
        sampling = SamplingParams(temperature=1.0)
        agent = MemoryAgent(
            self.engine,
            AgentConfig(
                chunk_tokens=work.chunk_tokens,
                memory_tokens=work.memory_tokens,
                answer_tokens=work.answer_tokens,
                template="chunk_first",
                sampling=sampling,
            ),
        )
        algorithm = AlgorithmConfig(group_size=work.rollouts, kl=0.0)
        config_of_training = TrainerConfig(
            algorithm=algorithm,
            optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=0),
            train_tokens=4096,
            share_prefixes=saving,
        )
        self.trainer = Trainer(self.engine, config_of_training)
        self.rollout = Rollout(agent, lambda answer, references: len(answer) % 2, algorithm)
        ids = self.engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        size = work.chunks * work.chunk_tokens - work.chunks  # a cut may split a word into more tokens than it had
        parts = [self.engine.tokenizer.decode(ids[i * size : (i + 1) * size]) for i in range(work.documents)]
        self.problems = [Problem(part, QUESTION, ()) for part in parts]
        self.work = work

    def step(self) -> dict[str, Any]:
        addresses = [p.data_ptr() for p in self.engine.model.parameters()]
        started = time.perf_counter()
        report = self.trainer.step(self.rollout.groups(self.problems, self.work.documents))
        seconds = time.perf_counter() - started
        moved = zip(self.engine.model.parameters(), addresses, strict=True)
        return {
            "seconds": seconds,
            **{f"{name}_s": part for name, part in report.seconds.items()},
            "rest_s": seconds - sum(report.seconds.values()),
            "tokens": report.tokens,
            "weight_sync_bytes": sum(p.nbytes for p, address in moved if p.data_ptr() != address),
            "recomputed_logprobs": report.recomputed,
            "mismatch": _mismatch(report),
        }


def _mismatch(report: StepReport) -> float:
    return report.first["largest_difference"]


def _median(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the seconds; the counts add up, the mismatch is the largest."""
    row = {
        name: round(statistics.median(s[name] for s in steps), 4) for name in steps[0] if name.endswith(("_s", "nds"))
    }
    row |= {name: sum(s[name] for s in steps) for name in ("tokens", "weight_sync_bytes", "recomputed_logprobs")}
    return row | {"mismatch": max(s["mismatch"] for s in steps), "rounds": len(steps)}


def _targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The promises: nothing is copied, nothing computed twice, and the trainer's probabilities are the rollout's."""
    targets = []
    for row in rows:
        for name in ("weight_sync_bytes", "recomputed_logprobs", "mismatch"):
            label = f"rl_step.{row['variant'].replace(' ', '_')}.float32.{name}"
            targets.append({"name": label, "value": row[name], "target": 0, "met": row[name] == 0})
    return targets


def _table(rows: Sequence[dict[str, Any]]) -> str:
    parts = ("rollout", "loss", "update", "rest")
    lines = [rows[0]["work"], f"{'variant':<10}{'seconds':>9}" + "".join(f"{part:>16}" for part in parts)]
    for row in rows:
        shares = "".join(f"{row[f'{part}_s']:>9.2f} s {row[f'{part}_s'] / row['seconds']:>4.0%}" for part in parts)
        lines.append(f"{row['variant']:<10}{row['seconds']:>9.2f}{shares}")
    copied = sum(row["weight_sync_bytes"] for row in rows)
    again = sum(row["recomputed_logprobs"] for row in rows)
    largest = max(row["mismatch"] for row in rows)
    return "\n".join(
        [*lines, f"weight sync {copied} bytes, log-probabilities recomputed {again}, largest mismatch {largest:g}"]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="palimpsest bench rl_step",
        description="Measure a training step, part by part; the last line is JSON.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="PATH", help="Hugging Face folder or GGUF file (the embedded SmolLM2-135M)")
    add("--check", action="store_true", help="exit with 1 when a promise is broken")
    add("--quick", action="store_true", help="shorter chunks and responses")
    add("--threads", type=int, metavar="N", help="CPU threads (torch's choice)")
    add("--rounds", type=int, metavar="N", default=1, help="of which medians are taken (%(default)s)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

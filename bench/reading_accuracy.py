"""How accuracy holds as documents grow: `python -m palimpsest.bench.reading_accuracy run.yaml --lengths 1K,64K`.

The configuration is that of a training run on a generated task; the documents have another seed. Each answer is in the
file of results before the next one is waited for, and a run that is started again goes on where that file ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..engine import lora
from ..engine.config import AgentConfig, SamplingParams
from ..engine.defaults import embedded_model_path
from ..engine.engine import Engine
from ..engine.errors import ConfigError, PalimpsestError
from ..engine.memory_agent import MemoryAgent
from ..engine.sequence import Segment
from ..engine.templates import Slot
from ..rl.config_file import load_config
from ..rl.data import Source
from ..rl.evaluation import outcomes
from ..rl.rewards import Scorer
from ..rl.run_config import RunConfig
from ..rl.tasks import TaskConfig

__all__ = ["main", "run"]

HELD_OUT = 1_000_000  # seed of the documents
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "sampled": SamplingParams(temperature=1.0),
}
METHODS = ("memory", "direct")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
EXIT_ERROR = 2

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit code: 0, or 2 after a mistake of the user."""
    args = _parser().parse_args(argv)
    try:
        config = load_config(args.config, args.set)
        lengths = [_tokens(text) for text in args.lengths.split(",")]
        samplings = args.sampling.split(",")
        model = dataclasses.replace(config.model, path=args.model or config.model.path)
        if args.adapter is not None:
            model = dataclasses.replace(model, lora=None, adapter=args.adapter)
        config = dataclasses.replace(config, model=model)
        report = run(config, lengths, samplings, args.documents, args.method, args.seed, args.output)
    except PalimpsestError as error:
        print(f"palimpsest bench reading_accuracy: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(_table(report["rows"]))
    print(json.dumps(report), flush=True)
    return 0


def run(
    config: RunConfig,
    lengths: Sequence[int],
    samplings: Sequence[str],
    documents: int,
    method: str,
    seed: int,
    output: Path,
) -> dict[str, Any]:
    """The JSON document of the report: a row for each length (tokens) and way of sampling.

    seed: of the documents, 0 to documents - 1 of each length. An adapter of the configuration is merged into its model.
    Raises PalimpsestError for what cannot be read, for a file of results of something else, and for documents that the
    configuration trains on.
    """
    for name in samplings:
        if name not in SAMPLINGS:
            raise ConfigError(f"--sampling takes {', '.join(SAMPLINGS)}, got {name!r}")
    if documents < 1:
        raise ConfigError(f"--documents must be at least 1, got {documents}")
    if isinstance(config.data, TaskConfig) and config.data.seed == seed:
        raise ConfigError(f"--seed {seed} is data.seed: the model was trained on these documents; name another seed")
    path = config.model.path or embedded_model_path()
    if not isinstance(config.agent, AgentConfig):
        raise ConfigError("reading_accuracy measures the memory agent; leave agent.function out")
    engine = Engine(path, config.model.engine)
    if config.model.adapter is not None:
        lora.merge(engine, config.model.adapter)
    agent = MemoryAgent(engine, config.agent)
    plain = config.plain()
    reader = {name: value for name, value in plain["agent"].items() if name != "sampling"}  # --sampling stands for it
    subject = {**engine.describe(), "method": method, "seed": seed, "data": plain["data"]}
    results = _Results(output, {**subject, "agent": reader, "reward": config.reward.name})
    for length in lengths:
        source = _source(config, seed, length)
        for name in samplings:
            left = [i for i in range(documents) if i not in results.known(length, name)]
            started = time.perf_counter()
            found = _memory if method == "memory" else _direct
            for row in found(agent, source, left, config.reward.name, SAMPLINGS[name]):
                seconds, started = time.perf_counter() - started, time.perf_counter()
                results.add({"length": length, "sampling": name, **row, "seconds": round(seconds, 4)})
    rows = [results.summary(length, name, documents) for length in lengths for name in samplings]
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__, "model": Path(path).name}
    return {"bench": "reading_accuracy", "machine": machine, "method": method, "rows": rows, "targets": []}


def _source(config: RunConfig, seed: int, length: int) -> Source:
    """The configuration's task with other documents."""
    if not isinstance(config.data, TaskConfig):
        raise ConfigError("reading_accuracy needs a task whose documents have any length: data.task=slots or facts")
    return dataclasses.replace(config.data, seed=seed, tokens=length).source()


def _memory(
    agent: MemoryAgent, source: Source, indices: Sequence[int], reward: str, sampling: SamplingParams
) -> Iterator[Row]:
    for outcome in outcomes(agent, source, indices, reward, sampling=sampling):
        counters = outcome.reading.counters
        yield {
            "index": outcome.index,
            "reward": outcome.reward,
            "answer": outcome.reading.answer,
            "turns": counters.turns,
            "tokens": counters.document_tokens,
            "undecoded": counters.undecoded_turns,
            "truncated": counters.truncated_memories,
        }


def _direct(
    agent: MemoryAgent, source: Source, indices: Sequence[int], reward: str, sampling: SamplingParams
) -> Iterator[Row]:
    """One turn for the whole document, which stands where the final turn has the memory. What the window does not hold
    has no reward."""
    engine, scorer = agent.engine, Scorer(reward)
    params = dataclasses.replace(sampling, max_tokens=agent.config.answer_tokens)
    for index in indices:
        problem = source.problem(index)
        document = engine.tokenizer.encode("".join(problem.document))
        values = {Slot.PROBLEM: engine.tokenizer.encode(problem.question), Slot.MEMORY: document}
        prompt: list[Segment] = agent.final_prompt.fill(values)
        row: Row = {"index": index, "reward": None, "answer": None, "turns": 1, "tokens": len(document)}
        if sum(len(segment.ids) for segment in prompt) + params.max_tokens <= engine.longest:
            [completion] = engine.generate([prompt], dataclasses.replace(params, seed=index))
            row |= {"answer": completion.text, "reward": scorer(completion.text, problem.answers)}
        yield row


class _Results:
    """Rows in a file, one JSON line each, the first of which says what they are about; there before `add` returns."""

    def __init__(self, path: Path, subject: Row) -> None:
        """Raises ConfigError for a file that cannot be used, or of something else; it stays as it is."""
        self.path = path
        self.rows: dict[tuple[int, str, int], Row] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be used ({error.strerror}); name a file") from error
        whole = content[: content.rfind(b"\n") + 1]  # a killed run may have left half a line
        lines = self._rows(whole)
        header = {**subject, **lines[0]} if lines else subject  # files of earlier versions say less
        begun = lines or json.dumps(subject).encode().startswith(content)
        if header != subject or not begun:
            raise ConfigError(
                f"{path} holds results of another model, task or configuration; move it away, or name another --output"
            )
        for row in lines[1:]:
            self._enter(row)
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        if not lines:
            self._append(subject)

    def add(self, row: Row) -> None:
        self._append(row)
        self._enter(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def known(self, length: int, sampling: str) -> set[int]:
        return {index for at, name, index in self.rows if (at, name) == (length, sampling)}

    def summary(self, length: int, sampling: str, documents: int) -> Row:
        """A row of the report. undecoded: share of turns that took no decode step."""
        rows = [self.rows[length, sampling, i] for i in range(documents)]
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        turns, seconds = sum(row["turns"] for row in rows), sum(row["seconds"] for row in rows)
        mean = math.fsum(rewards) / len(rewards) if rewards else None
        spread = math.fsum((reward - mean) ** 2 for reward in rewards) if mean is not None else 0.0
        return {
            "work": f"{length} tokens",
            "tokens": length,
            "sampling": sampling,
            "documents": len(rewards),
            "reward": mean,
            "standard_error": math.sqrt(spread / (len(rewards) - 1) / len(rewards)) if len(rewards) > 1 else None,
            "tokens_per_s": sum(row["tokens"] for row in rows) / seconds if seconds else None,
            "undecoded": sum(row.get("undecoded", 0) for row in rows) / turns if turns else None,
            "seconds": seconds,
        }

    def _rows(self, content: bytes) -> list[Row]:
        rows: list[Row] = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or not (number == 1 or row.keys() >= {"length", "sampling", "index"}):
                raise ConfigError(
                    f"{self.path}, line {number}, is no result; move the file away, or name another --output"
                )
            rows.append(row)
        return rows

    def _enter(self, row: Row) -> None:
        self.rows[row["length"], row["sampling"], row["index"]] = row

    def _append(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _tokens(text: str) -> int:
    """The number that "16K" or "3.5M" stands for."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KM]?)", text.strip())
    if match is None:
        raise ConfigError(f"--lengths takes numbers of tokens such as 1024, 16K or 3.5M, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def _table(rows: Sequence[Row]) -> str:
    lines = [f"{'document':<18}{'sampling':<10}{'n':>5}{'reward':>9}{'+-':>8}{'tokens/s':>10}{'undecoded':>11}"]
    for row in rows:
        reward = "      n/a" if row["reward"] is None else f"{row['reward']:>9.3f}"
        error = f"{row['standard_error']:>8.3f}" if row["standard_error"] is not None else f"{'':>8}"
        speed = f"{row['tokens_per_s']:>10,.0f}" if row["tokens_per_s"] else f"{'':>10}"
        lines.append(
            f"{row['work']:<18}{row['sampling']:<10}{row['documents']:>5}{reward}{error}{speed}{row['undecoded']:>11.1%}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="palimpsest bench reading_accuracy",
        description="Measure accuracy at many document lengths; the last line is JSON.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", type=Path, help="the YAML of a training run on a generated task")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="change a key of it, as in `palimpsest train`")
    add("--model", metavar="PATH", help="instead of the configuration's")
    add("--adapter", metavar="FOLDER", help="instead of the configuration's")
    add(
        "--lengths", metavar="N,...", default="1K,4K,16K", help="of documents, in tokens: 1024, 16K, 3.5M (%(default)s)"
    )
    add("--documents", type=int, metavar="N", default=64, help="of each length (%(default)s)")
    add("--method", choices=METHODS, default="memory", help="chunk by chunk, or all in one prompt (%(default)s)")
    add("--sampling", metavar="NAME,...", default="greedy", help=f"of {', '.join(SAMPLINGS)} (%(default)s)")
    add("--seed", type=int, metavar="N", default=HELD_OUT, help="of the documents (%(default)s)")
    add("--output", metavar="FILE", type=Path, required=True, help="results, one JSON line each; goes on where it ends")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

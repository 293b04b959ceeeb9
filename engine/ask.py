"""The command `palimpsest ask`: one document, one question, the answer; progress on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from . import lora, reading_file
from .config import AgentConfig, EngineConfig
from .defaults import embedded_adapter_path, embedded_model_path
from .documents import Document, file_sha256, open_document
from .engine import Engine
from .errors import ConfigError, RequestError
from .memory_agent import MemoryAgent
from .reading import Event, Reading, ReadingCounters, TextProgress, TurnEnded, TurnStarted
from .trace import traced

__all__ = ["run"]

TAIL_CHARACTERS = 400


def run(args: argparse.Namespace) -> int:
    """Carry out the command with the arguments that cli.py parsed; -> exit code. Raises PalimpsestError."""
    if args.resume and args.trace is None:
        raise ConfigError("--resume needs --trace FILE, the trace to go on with")
    if sys.stdout is None:
        raise RequestError("standard output is closed, so the answer could not be shown; leave it open")
    console = Console(stderr=True, highlight=False, markup=False)
    sha256 = None if args.trace is None else file_sha256(args.file)
    document = open_document(args.file)
    model = embedded_model_path() if args.model is None else args.model
    adapter = args.adapter
    if args.model is None:
        adapter = adapter or embedded_adapter_path()
        what = "small and not trained as a memory agent" if adapter is None else f"with the adapter {adapter}"
        console.print(f"model: {Path(model).name}, {what}; --model names another one")
    agent = make_agent(model, adapter, args)
    if agent.engine.graph_bytes:
        console.print(f"CUDA graphs: {agent.engine.graph_bytes / 2**20:,.0f} MiB")
    with closing(_events(agent, document, sha256, args)) as events:
        reading = Display(console, document).show(events)
    # JSON in ASCII: an encoding that lacks a character must not put an escape into it that JSON does not know
    _print(json.dumps(_summary(agent, args, reading)) if args.json else _printable(reading.answer))
    return 0


def _print(output: str) -> None:
    try:
        print(output, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RequestError(
            f"cannot write to standard output ({error.strerror}); this was to be written:\n{output}"
        ) from error


def make_agent(model: str | Path, adapter: str | Path | None, args: argparse.Namespace) -> MemoryAgent:
    """An engine for one reading and the agent on it, as the arguments say; for what they leave open, as the adapter was
    trained."""
    trained = AgentConfig() if adapter is None else reading_file.read(adapter)
    engine_config = EngineConfig(
        dtype=args.dtype, weights=args.weights, backend=args.backend, threads=args.threads, max_sequences=2
    )
    agent_config = dataclasses.replace(
        trained,
        **_given(args, "chunk_tokens", "memory_tokens", "answer_tokens", "template", "final_form"),
        sampling=dataclasses.replace(trained.sampling, **_given(args, "temperature", "top_p"), seed=args.seed),
        strip_thinking=args.strip_thinking or trained.strip_thinking,
        keep_turns=False,
    )
    engine = Engine(model, engine_config)
    if adapter is not None:
        lora.merge(engine, adapter)
    return MemoryAgent(engine, agent_config)


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _events(
    agent: MemoryAgent, document: Document, sha256: str | None, args: argparse.Namespace
) -> Generator[Event, None, None]:
    if args.trace is None:
        return agent.stream(document, args.question)
    return traced(agent, document, args.question, args.trace, resume=args.resume, document_sha256=sha256)


def _summary(agent: MemoryAgent, args: argparse.Namespace, reading: Reading) -> dict[str, Any]:
    return {
        "answer": reading.answer,
        "memory": reading.memory,
        "question": args.question,
        "document": args.file,
        "model": agent.engine.describe(),
        "config": dataclasses.asdict(agent.config),
        "counters": dataclasses.asdict(reading.counters),
    }


class Display:
    """Shows a reading's events: a line and the memory per turn; on a terminal also a bar and the text being written."""

    def __init__(self, console: Console, document: Document) -> None:
        self._console = console
        self._document = document
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[pace]}"))
        self._task = self._bar.add_task("reading", total=None, pace="")
        self._written = Text(style="dim")
        self._started = time.perf_counter()
        self._first_tokens: int | None = None
        self._total_tokens: float | None = None
        self._memory = ""

    def show(self, events: Generator[Event, None, None]) -> Reading:
        """Consume the events; -> the finished reading."""
        with Live(Group(self._bar, self._written), console=self._console, transient=True):
            for event in events:
                if isinstance(event, TurnStarted):
                    self._turn_started(event)
                elif isinstance(event, TextProgress):
                    self._written.append(_printable(event.text))
                    self._written.right_crop(max(0, len(self._written) - TAIL_CHARACTERS))
                elif isinstance(event, TurnEnded):
                    self._turn_ended(event)
                else:
                    self._tell(_costs(event.reading.counters))
                    return event.reading
        raise RuntimeError("the reading ended without an answer")

    def _turn_started(self, event: TurnStarted) -> None:
        if self._first_tokens is None:
            self._first_tokens = event.document_tokens
            if event.index:
                self._tell(f"going on with turn {event.index}, {event.document_tokens:,} tokens read before")
        self._written.plain = ""
        self._total_tokens = self._estimate(event.document_tokens + event.chunk_tokens + event.tokens_ahead)
        what = f"memory {event.index + 1}" if event.kind == "update" else "answer"
        self._bar.update(self._task, description=what, total=self._total_tokens)

    def _turn_ended(self, event: TurnEnded) -> None:
        turn = event.turn
        if turn.kind == "final":
            self._tell(f"answer: {len(turn.response_ids)} tokens, {turn.seconds:.1f} s")
            return
        pace = self._pace(event.document_tokens)
        self._bar.update(self._task, completed=event.document_tokens, pace=pace)
        cut = ", cut at its limit" if turn.finish_reason == "length" else ""
        self._tell(
            f"memory {turn.index + 1}: {len(turn.response_ids)} tokens{cut}, {turn.seconds:.1f} s; "
            f"{event.document_tokens:,} tokens read{self._share(event.document_tokens)}, {pace}"
        )
        changed = event.memory != self._memory
        self._tell(_printable(event.memory) if changed else "(unchanged)", style="dim")
        self._memory = event.memory

    def _tell(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, soft_wrap=True)  # the terminal wraps; a log file keeps one line

    def _estimate(self, tokens: int) -> float | None:
        """Tokens of the whole document, if the part handed out so far held `tokens`; None where its size is unknown."""
        total, done = self._document.total, self._document.done
        return tokens * total / done if total and done else None

    def _share(self, tokens: int) -> str:
        return f" ({tokens / self._total_tokens:.0%})" if self._total_tokens else ""

    def _pace(self, tokens: int) -> str:
        """Document tokens per second since the start and, where the document's size is known, the time left."""
        rate = (tokens - (self._first_tokens or 0)) / (time.perf_counter() - self._started)
        if self._total_tokens is None:
            return f"{rate:,.0f} tokens/s"
        left = int(max(0.0, self._total_tokens - tokens) / rate)
        return f"{rate:,.0f} tokens/s, {left // 60}:{left % 60:02d} left"


def _costs(counters: ReadingCounters) -> str:
    return (
        f"{counters.turns} turns, {counters.undecoded_turns} of them without a decode step; "
        f"{counters.seconds / counters.turns:.2f} s a turn"
    )


def _printable(text: str) -> str:
    """Without control characters: a document must not steer the terminal."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")

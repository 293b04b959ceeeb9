"""A trace: a reading's turns in a JSON Lines file, each on disk when it ends, to go on from after a crash."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from .errors import TraceError
from .memory_agent import MemoryAgent
from .memory_reading import MemoryReading
from .reading import Event, Request, Turn, TurnEnded
from .sequence import DraftCounters

__all__ = ["FORMAT", "Trace", "differences", "traced", "turn_from", "turn_values"]

FORMAT = 1
TURN_FIELDS = tuple(field.name for field in dataclasses.fields(Turn))
# Why a recorded prompt may differ, by the first segment that does.
CAUSES = {
    "head": "the chat template is another one, or it writes the date",
    "chunk": "the document differs",
}


def traced(
    agent: MemoryAgent,
    document: str | Iterable[str],
    question: str,
    path: str | Path,
    *,
    resume: bool = False,
    document_sha256: str | None = None,
) -> Generator[Event, None, None]:
    """Read as MemoryAgent.stream does, with a trace at `path` that each turn reaches before its event is yielded.

    resume: go on after the last whole turn of the trace at `path`, to the answer that the uninterrupted reading gives.
    Its turns yield no events; the document is read again, without the model, to check that their prompts come out the
    same. document_sha256: hash of the document's file, where there is one: goes into the header and is compared.
    Raises TraceError for a file that is in the way, is no trace, or belongs to something else, and for resuming with
    memory_kv="carried", since no trace holds KV; else as `open` does.
    A file that is not a trace is never written to.
    """
    if resume and agent.config.memory_kv == "carried":
        raise TraceError(
            "a reading with memory_kv='carried' can't be resumed: its answer depends on KV that no trace holds; "
            "leave out resume (--resume) and start a new trace, or read with memory_kv='exact'"
        )
    reading = agent.open(document, question)
    header = make_header(agent, question, reading.chunk_tokens, document_sha256)
    trace = Trace.resume(path, header) if resume else Trace.create(path, header)
    return _run(agent, reading, trace)


def _run(agent: MemoryAgent, reading: MemoryReading, trace: Trace) -> Generator[Event, None, None]:
    with trace, closing(agent.run(reading)) as events:
        for turn in trace.recorded():
            _replay(reading, turn, trace.path)
        for event in events:
            if isinstance(event, TurnEnded):
                trace.append(event.turn)
            yield event


def make_header(agent: MemoryAgent, question: str, chunk_tokens: int, document_sha256: str | None) -> dict[str, Any]:
    """First line of a trace: all that decides the answer, as plain JSON values; and where the model lay.

    chunk_tokens: what the reading takes per turn, which may be less than configured: the engine's room decides.
    """
    header = {
        "format": FORMAT,
        "document_sha256": document_sha256,
        "question": question,
        "model": agent.engine.describe(),
        "config": dataclasses.asdict(agent.config) | {"chunk_tokens": chunk_tokens},
    }
    return cast(dict[str, Any], json.loads(json.dumps(header)))


class Trace:
    """An open trace file, a context manager: `recorded` reads the turns it holds, `append` adds one."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path = path
        self._file = file

    @classmethod
    def create(cls, path: str | Path, header: Mapping[str, Any]) -> Trace:
        """Start a trace. Raises TraceError if the file exists or cannot be written."""
        path = _path(path)
        try:
            file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise TraceError(f"{path} exists; resume it (--resume), remove it or choose another name") from error
        except OSError as error:
            raise TraceError(f"cannot write the trace {path}: {error.strerror}") from error
        trace = cls(path, file)
        trace._write(header)
        return trace

    @classmethod
    def resume(cls, path: str | Path, header: Mapping[str, Any]) -> Trace:
        """Open a trace to go on with. A last line that was cut while being written is dropped from the file.

        Raises TraceError if there is no such file, if its header differs from `header` (the message names what
        differs), and if it has no whole line and is not what a cut `header` leaves.
        """
        path = _path(path)
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise TraceError(f"cannot resume the trace {path}: it is no regular file; name the file of a trace")
            first, length = _whole_lines(path)
            file = path.open("r+b", buffering=0)
        except OSError as error:
            raise TraceError(
                f"cannot resume the trace {path}: {error.strerror}; leave out --resume to start one"
            ) from error
        trace = cls(path, file)
        try:
            if length:
                _compare(path, _parse(first, path, 1), header)
            elif not _line(header).startswith(first):
                raise TraceError(
                    f"{path} is no trace: it has no whole line, and what it has is no head of this trace's"
                )
            file.truncate(length)
            file.seek(length)
            if not length:
                trace._write(header)
        except BaseException:
            file.close()
            raise
        return trace

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, turn: Turn) -> None:
        """Write one turn; it is on disk when this returns. Raises TraceError if it cannot be."""
        self._write(turn_values(turn))

    def recorded(self) -> Iterator[Turn]:
        """The turns in the file, one at a time. Raises TraceError for a damaged line."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number > 1:
                    yield _turn(_parse(line, self.path, number), self.path, number)

    def _write(self, values: Mapping[str, Any]) -> None:
        left = memoryview(_line(values))
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise TraceError(f"cannot write the trace {self.path}: {error.strerror}") from error


def _path(path: object) -> Path:
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise TraceError(f"a trace is named by a path, a str or Path without NUL characters; got {path!r}")
    return Path(path)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _whole_lines(path: Path) -> tuple[bytes, int]:
    """The first line, and the bytes up to the last line break: a line without one was cut while being written."""
    first, length = b"", 0
    with path.open("rb") as file:
        for line in file:
            first = first or line
            if line.endswith(b"\n"):
                length += len(line)
    return first, length


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise TraceError(
            f"line {number} of {path} is not JSON ({error}): the trace is damaged, start a new one"
        ) from error
    if not isinstance(values, dict):
        raise TraceError(f"line {number} of {path} is not a JSON object: no trace of a reading")
    return values


def _turn(values: dict[str, Any], path: Path, number: int) -> Turn:
    try:
        return turn_from(values)
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise TraceError(
            f"line {number} of {path} is not a turn ({error}): the trace is damaged, start a new one"
        ) from error


def turn_values(turn: Turn) -> dict[str, Any]:
    """A turn as plain JSON values."""
    values = {name: getattr(turn, name) for name in TURN_FIELDS}
    drafts = {source: dataclasses.asdict(counters) for source, counters in turn.drafts.items()}
    ids = {"prompt_ids": list(turn.prompt_ids), "response_ids": list(turn.response_ids)}
    return values | ids | {"drafts": drafts}


def turn_from(values: Mapping[str, Any]) -> Turn:
    """The turn that turn_values gave. Raises what Python raises for values that are none."""
    ids = {name: array("i", values[name]) for name in ("prompt_ids", "response_ids")}
    drafts = {source: DraftCounters(**counters) for source, counters in values.get("drafts", {}).items()}
    return Turn(**(dict(values) | ids | {"drafts": drafts}))


def _compare(path: Path, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if recorded.get("format") != FORMAT:
        raise TraceError(
            f"{path} is not a trace of format {FORMAT}: its first line has format {recorded.get('format')!r}"
        )
    found = dict(differences(recorded, given))
    found.pop("model.model", None)  # where it lies; which one it is say its fingerprints
    if found:
        details = "; ".join(f"{key} was {was!r} and is now {now!r}" for key, (was, now) in found.items())
        raise TraceError(
            f"{path} belongs to another reading: {details}. Resume with the same values or start a new trace"
        )


def differences(was: Any, now: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Where two nested mappings of JSON values differ: keys joined by dots, with both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*was, *now]):
            yield from differences(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now:
        yield key, (was, now)


def _replay(reading: MemoryReading, turn: Turn, path: Path) -> None:
    """Go through a recorded turn. Raises TraceError unless document, memory and templates give its very prompt."""
    request = reading.next()
    if request is None:
        raise TraceError(f"{path} has turns after the answer: the trace is damaged, start a new one")
    if (request.kind, request.index) != (turn.kind, turn.index):
        raise TraceError(
            f"turn {request.index} of this reading is {request.kind}, that of {path} is {turn.kind} {turn.index}: "
            "the document has another length now, or lines are missing"
        )
    different = _first_difference(request, turn.prompt_ids)
    if different is not None:
        cause = CAUSES.get(different, "the chat template or the trace was changed")
        raise TraceError(
            f"turn {turn.index} of {path} had another prompt, from its segment {different!r} on: {cause}; "
            "resume with the same document and model, or start a new trace"
        )
    reading.record(turn)


def _first_difference(request: Request, recorded: array[int]) -> str | None:
    """Name of the first segment that differs from the recorded prompt, None if all are equal."""
    start = 0
    for segment in request.segments:
        end = start + len(segment.ids)
        if recorded[start:end] != segment.ids:
            return segment.name
        start = end
    return None if start == len(recorded) else request.segments[-1].name

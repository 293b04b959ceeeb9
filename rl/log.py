"""The log of a run: one JSON object per line, on disk before the next step begins; trackers get its numbers too."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from ..engine.errors import TraceError
from .data import Notice

__all__ = ["RunLog", "Tracker", "numbers", "read_log", "warnings_noticed"]


class Tracker(Protocol):
    """Takes the numbers of a line, for a display elsewhere."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Appends lines to a file. Each has "kind" ("start", "step", "eval", "event") and "step", how many were done then.

    Whatever depends on the machine or the time of day stands under "machine"; all else is the same when a run is done
    again. events: how often each was named.
    """

    def __init__(
        self, path: str | Path | None, trackers: Iterable[Tracker] = (), *, keep_steps: int | None = None
    ) -> None:
        """path: None keeps no lines, as on ranks that are not main. keep_steps: go on after this step: later lines of
        the file are dropped. None starts a new file.

        Raises TraceError for a file that is in the way, or cannot be written, and while another process writes to it.
        """
        if path is None:
            path, keep_steps = os.devnull, None
        self.path = Path(path)
        self.trackers = list(trackers)
        self.events: Counter[str] = Counter()
        with self._written():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = None if path == os.devnull else _locked(self.path)
            if keep_steps is not None and self.path.exists():
                _cut(self.path, keep_steps)
                self.events.update(line["name"] for line in read_log(self.path) if line["kind"] == "event")
            if keep_steps is None and path != os.devnull and self.path.exists() and self.path.stat().st_size:
                raise TraceError(
                    f"{self.path} exists: there is a run in this folder; go on with it (--resume), or set log.folder"
                )
            self._file = self.path.open("ab", buffering=0)

    def add(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a line; its numbers go to the trackers, under the kind's name. Raises TraceError for a full disk."""
        line = (json.dumps(_finite({"kind": kind, "step": step, **values})) + "\n").encode()
        with self._written():
            if self._file.write(line) < len(line):  # the rest is refused as well
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind != "event":
            for tracker in self.trackers:
                tracker.add(step, dict(numbers(values, kind)))

    def event(self, name: str, message: str, step: int) -> None:
        """Append an event and count it."""
        self.events[name] += 1
        self.add("event", step, {"name": name, "message": message})

    def flush(self) -> None:
        """Return when all lines are on the disk. Raises TraceError when they don't get there."""
        if self._lock is not None:
            with self._written():
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        for tracker in self.trackers:
            tracker.close()
        if self._lock is not None:
            self._lock.close()

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceError(
                f"cannot write the log {self.path}: {error.strerror}; make room and go on with --resume, or choose "
                "another log.folder"
            ) from error


def read_log(path: str | Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; a last one that was cut while being written is left out.

    Raises TraceError for a line that is none of a log.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            try:
                values = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{path}, line {number + 1} is not JSON ({error}); move the file away") from error
            if not isinstance(values, dict) or not isinstance(values.get("step"), int):
                raise TraceError(f"{path}, line {number + 1} is no line of a run's log; move the file away")
            yield values


@contextmanager
def warnings_noticed(notice: Notice) -> Iterator[None]:
    """Inside the block a warning is an event, each time anew, so that a run done again logs it in the same step."""

    def tell(message: Warning | str, *_: object, **__: object) -> None:
        notice("warning", str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = tell
        yield


def numbers(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """All numbers in nested mappings, by the names on the way joined with "/"; of a list the mean."""
    for name, value in values.items():
        where = f"{path}/{name}"
        if isinstance(value, Mapping):
            yield from numbers(value, where)
        elif isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
            yield where, sum(value) / len(value)
        elif isinstance(value, (int, float)):
            yield where, float(value)


def _locked(log: Path) -> IO[bytes]:
    """A file beside the log, locked for this process until it is closed, or the process ends in whatever way."""
    file = log.with_name(f".{log.name}.lock").open("wb")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TraceError(
            f"another process writes to {log}; wait until it has ended, or set log.folder to another folder"
        ) from error
    except OSError:
        pass  # a file system without locks
    return file


def _cut(path: Path, step: int) -> None:
    """Keep the lines up to a step, so that those which are written again stand there once."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        for line in read_log(path):
            if line["step"] <= step:
                file.write((json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _finite(value: Any) -> Any:
    """JSON knows no infinity: such numbers become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value

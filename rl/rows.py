"""Rows of JSONL and parquet files: checked once in order, then read one at a time: files may exceed the memory."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.errors import RequestError

if TYPE_CHECKING:
    import pyarrow.parquet

__all__ = ["BadRow", "JsonlFile", "ParquetFile", "RowFile", "open_rows"]

SUFFIXES = (".jsonl", ".parquet")
BATCH_ROWS = 64  # of a parquet file that are held while it is checked


@dataclass(frozen=True)
class BadRow:
    """What is wrong with a row. kind: names it in counts. detail: of this row."""

    kind: str
    detail: str = ""


class RowFile(Protocol):
    """path: of the file. `scan` goes through all rows in order, `read` takes one by its number in that order."""

    path: Path

    def scan(self) -> Iterator[Mapping[str, Any] | BadRow]: ...

    def read(self, number: int) -> Mapping[str, Any]: ...

    def place(self, number: int) -> str: ...


def open_rows(path: str | Path) -> RowFile:
    """By the suffix. Raises RequestError for a file that is missing, unreadable or of another kind."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise RequestError(f"{path} has the suffix {path.suffix or '(none)'!r}, data files are {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise RequestError(f"there is no data file {path}; check data.path")
    return JsonlFile(path) if path.suffix == ".jsonl" else ParquetFile(path)


class JsonlFile:
    """A JSON object per line, in UTF-8; empty lines do not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = array("q")
        self._lines = array("q")

    def scan(self) -> Iterator[Mapping[str, Any] | BadRow]:
        """All rows, those that cannot be read as BadRow. Afterwards `read` knows where each begins."""
        del self._offsets[:], self._lines[:]
        offset = 0
        with _readable(self.path).open("rb") as file:
            for i, line in enumerate(file):
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(i + 1)
                    yield _parse(line)
                offset += len(line)

    def read(self, number: int) -> Mapping[str, Any]:
        """Row `number` of a file that was scanned. Raises RequestError if it has changed since."""
        with _readable(self.path).open("rb") as file:
            file.seek(self._offsets[number])
            row = _parse(file.readline())
        if isinstance(row, BadRow):
            raise RequestError(f"{self.place(number)} has changed since the start ({row.kind}); start again")
        return row

    def place(self, number: int) -> str:
        """What a message calls a row."""
        return f"{self.path}, line {self._lines[number]}"


class ParquetFile:
    """A parquet file. `read` holds the row group that it read last."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError without pyarrow, and for what is no parquet file."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise RequestError(f"reading {path} needs pyarrow: pip install pyarrow") from error
        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise RequestError(f"{path} is no parquet file ({error}); check data.path") from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._starts = list(accumulate(sizes, initial=0))
        self._held: tuple[int, pyarrow.Table] | None = None

    def scan(self) -> Iterator[Mapping[str, Any] | BadRow]:
        """All rows, those that cannot be read as BadRow. Raises RequestError for a damaged file."""
        with self._undamaged():
            for batch in self._file.iter_batches(batch_size=BATCH_ROWS):
                for i in range(batch.num_rows):
                    yield _first(batch.slice(i, 1))

    def read(self, number: int) -> Mapping[str, Any]:
        """Row `number`. Raises RequestError if the file has changed since the start."""
        group = bisect_right(self._starts, number) - 1
        if self._held is None or self._held[0] != group:
            self._held = None  # two groups at once would be twice the memory
            with self._undamaged():
                self._held = (group, self._file.read_row_group(group))
        row = _first(self._held[1].slice(number - self._starts[group], 1))
        if isinstance(row, BadRow):
            raise RequestError(f"{self.place(number)} has changed since the start ({row.kind}); start again")
        return row

    def place(self, number: int) -> str:
        """What a message calls a row."""
        return f"{self.path}, row {number}"

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (OSError, pyarrow.ArrowException) as error:
            raise RequestError(f"{self.path} is damaged ({error}); write or copy it again") from error


def _readable(path: Path) -> Path:
    try:
        path.open("rb").close()
    except OSError as error:
        raise RequestError(f"cannot read the data file {path}: {error.strerror}") from error
    return path


def _parse(line: bytes) -> Mapping[str, Any] | BadRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow("broken UTF-8", f"at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return BadRow("not JSON", str(error))
    return row if isinstance(row, dict) else BadRow("no JSON object", f"a {type(row).__name__}")


def _first(batch: Any) -> Mapping[str, Any] | BadRow:
    try:
        row: dict[str, Any] = batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow("broken UTF-8", f"at byte {error.start} of a text")
    return row

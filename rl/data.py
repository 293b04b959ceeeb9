"""Data: where a run's problems come from. A Source gives the problem of any index, so a position in it is a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..engine.config import _require, _require_bool, _require_choice, _require_int
from ..engine.errors import RequestError
from ..engine.tokenizer import Tokenizer
from .rows import BadRow, RowFile, open_rows
from .trajectory import Problem

__all__ = ["DataConfig", "FileSource", "Notice", "Source"]

TRUNCATIONS = ("none", "centre", "head")
BAD_ROWS = ("refuse", "skip")
NAMED_PLACES = 3  # of each kind of bad row, in a message

Notice = Callable[[str, str], None]  # takes an event's name, by which it is counted, and a message


class Source(Protocol):
    """Problems by index, which counts up without end; equal indices give equal problems."""

    def problem(self, index: int) -> Problem: ...


@dataclass(frozen=True)
class DataConfig:
    """Rows of problems in files; the column names default to those of MemAgent's data (arXiv 2507.02259).

    path: a .jsonl or .parquet file, or a list of them. question, document, answers, id, extra: columns; a dot leads
    into one, as in "reward_model.ground_truth". A question is text or a list with one message of the user's, answers a
    text or a list of texts. Only question, document and answers must be there; without document (None) the agent's
    question is all there is. extra: a mapping for the reward.
    truncation: "none" reads documents of any length whole, "head" keeps their first document_tokens tokens, "centre"
    the first and the last half of as many (MemAgent's training).
    bad_rows: rows that lack something, or have an empty document or the id of another row: "refuse" to start, or "skip"
    and count them.
    shuffle: another order in each epoch, from seed.
    """

    path: str | tuple[str, ...]
    question: str = "prompt"
    document: str | None = "context"
    answers: str = "reward_model.ground_truth"
    id: str = "extra_info.index"
    extra: str = "extra_info"
    truncation: str = "none"
    document_tokens: int | None = None
    bad_rows: str = "refuse"
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        owner = "DataConfig"
        paths = (self.path,) if isinstance(self.path, str) else self.path
        ok = isinstance(paths, (list, tuple)) and paths and all(isinstance(path, str) for path in paths)
        _require(bool(ok), f"{owner}.path must be a file's path or a list of them, got {self.path!r}")
        object.__setattr__(self, "path", tuple(paths))
        twice = sorted(path for path, count in Counter(self.path).items() if count > 1)
        _require(
            not twice, f"{owner}.path names {' and '.join(twice)} twice, whose rows would count twice; name it once"
        )
        for name in ("question", "answers", "id", "extra"):
            value = getattr(self, name)
            _require(isinstance(value, str), f"{owner}.{name} must be a column's name, got {value!r}")
        ok = self.document is None or isinstance(self.document, str)
        _require(ok, f"{owner}.document must be a column's name or null, got {self.document!r}")
        _require_choice(owner, "truncation", self.truncation, TRUNCATIONS)
        _require_choice(owner, "bad_rows", self.bad_rows, BAD_ROWS)
        if self.document_tokens is not None:
            _require_int(owner, "document_tokens", self.document_tokens, 1)
        _require(
            (self.truncation == "none") == (self.document_tokens is None),
            f"{owner}.document_tokens ({self.document_tokens}) is the limit of truncation='head' or 'centre', and "
            f"truncation is {self.truncation!r}; set both or neither",
        )
        _require_bool(owner, "shuffle", self.shuffle)
        _require_int(owner, "seed", self.seed, 0)

    def __str__(self) -> str:
        if self.truncation == "none":
            return "documents are read whole, whatever their length"
        kept = "their first" if self.truncation == "head" else "the first and the last half of"
        return f"of documents longer than {self.document_tokens:,} tokens {kept} {self.document_tokens:,} are kept"


class FileSource:
    """The problems of files, epoch after epoch.

    places: how many problems there are. bad: kinds of rows that were skipped, counted.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, notice: Notice) -> None:
        """Goes through the files once. notice: is told of bad rows, and of each document when it is truncated.

        Raises RequestError for files that cannot be read, hold bad rows unless they are to be skipped, or nothing else.
        """
        self.config, self._tokenizer, self._notice = config, tokenizer, notice
        self._files = [open_rows(path) for path in config.path]
        self._rows: list[tuple[RowFile, int]] = []
        self.bad: Counter[str] = Counter()
        self._order: tuple[int, Any] | None = None
        found: dict[str, list[str]] = {}
        for file in self._files:
            self._check(file, found)
        if found:
            self._report(found)
        if not self._rows:
            raise RequestError(f"{' and '.join(config.path)} hold no usable row; put problems into them")

    @property
    def places(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        """Raises RequestError if the file has changed since the start."""
        epoch, place = divmod(index, self.places)
        file, number = self._rows[self._shuffled(epoch)[place] if self.config.shuffle else place]
        row = self._problem(file.read(number), file, number)
        if isinstance(row, BadRow):
            raise RequestError(f"{file.place(number)} has changed since the start ({row.kind}); start again")
        return row if self.config.document_tokens is None else self._truncated(row, self.config.document_tokens)

    def _check(self, file: RowFile, found: dict[str, list[str]]) -> None:
        ids = set[str]()
        for number, row in enumerate(file.scan()):
            problem = row if isinstance(row, BadRow) else self._problem(row, file, number)
            if isinstance(problem, Problem):
                if problem.id not in ids:
                    ids.add(problem.id)
                    self._rows.append((file, number))
                    continue
                problem = BadRow("id of another row", repr(problem.id))
            self.bad[problem.kind] += 1
            places = found.setdefault(problem.kind, [])
            if len(places) < NAMED_PLACES:
                places.append(f"{file.place(number)}{f' ({problem.detail})' if problem.detail else ''}")

    def _report(self, found: Mapping[str, list[str]]) -> None:
        lines = [
            f"{self.bad[kind]} with {kind}: {'; '.join(places)}{'; ...' if self.bad[kind] > len(places) else ''}"
            for kind, places in found.items()
        ]
        if self.config.bad_rows == "refuse":
            raise RequestError(
                f"the data has {self.bad.total()} bad rows. "
                + ". ".join(lines)
                + ". Mend them, name other columns, or leave them out with data.bad_rows=skip"
            )
        for line in lines:
            self._notice("bad rows", f"left out: {line}")

    def _problem(self, row: Mapping[str, Any], file: RowFile, number: int) -> Problem | BadRow:
        config = self.config
        values = {name: _value(row, column) for name, column in self._columns().items()}
        missing = [config_name for config_name, value in values.items() if value is None]
        if missing:
            columns = self._columns()
            return BadRow(f"no {' and '.join(columns[name] for name in missing)}")
        question, answers, document = _question(values["question"]), _answers(values["answers"]), values.get("document")
        if question is None:
            return BadRow(f"a {config.question} that is neither text nor one message", f"{values['question']!r:.60}")
        if answers is None:
            return BadRow(f"a {config.answers} that is no text and no list of texts", f"{values['answers']!r:.60}")
        if document is not None and not isinstance(document, str):
            return BadRow(f"a {config.document} that is no text", f"{document!r:.60}")
        if document is not None and not document.strip():
            return BadRow("an empty document")
        for text in (question, document or "", *answers):
            if not _is_unicode(text):
                return BadRow("half a character", "a surrogate without its other half, as \\ud83d in JSON")
        extra, name = _value(row, config.extra), _value(row, config.id)
        if not (extra is None or isinstance(extra, Mapping)):
            return BadRow(f"a {config.extra} that is no mapping", f"{extra!r:.60}")
        if not (name is None or isinstance(name, (str, int))):
            return BadRow(f"a {config.id} that is neither text nor a whole number", f"{name!r:.60}")
        return Problem(document or "", question, answers, self._id(name, file, number), extra or {})

    def _columns(self) -> dict[str, str]:
        """Those that a row must have."""
        config = self.config
        columns = {"question": config.question, "answers": config.answers}
        return columns if config.document is None else {**columns, "document": config.document}

    def _id(self, value: str | int | None, file: RowFile, number: int) -> str:
        known = f"row {number}" if value is None else str(value)
        return known if len(self._files) == 1 else f"{file.path}: {known}"

    def _shuffled(self, epoch: int) -> Any:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.config.seed, epoch]).permutation(self.places))
        return self._order[1]

    def _truncated(self, problem: Problem, limit: int) -> Problem:
        document = str(problem.document)
        ids = self._tokenizer.encode(document)
        if len(ids) <= limit:
            return problem
        kept, text = limit, document
        while kept > 0 and len(self._tokenizer.encode(text)) > limit:  # a cut may split a word into more tokens
            first = kept if self.config.truncation == "head" else kept - kept // 2
            last = kept - first
            end = self._tokenizer.decode(ids[len(ids) - last :]).lstrip("\ufffd") if last else ""
            text = self._tokenizer.decode(ids[:first]).rstrip("\ufffd") + end  # half a character is none
            kept -= 1
        self._notice(
            "truncated document",
            f"problem {problem.id}: {len(ids):,} tokens, {self.config.truncation} cut to {limit:,}",
        )
        return Problem(text, problem.question, problem.answers, problem.id, problem.extra)


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Under a column's name, or along the dots in it; None where there is nothing."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _question(value: object) -> str | None:
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content") if value[0].get("role", "user") == "user" else None
    return value if isinstance(value, str) and value.strip() else None


def _answers(value: object) -> tuple[str, ...] | None:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not values or not all(isinstance(one, str) for one in values):
        return None
    return tuple(values)

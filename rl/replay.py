"""Trajectories on disk: what a rollout gave, in JSON Lines, to look at and to train from without rolling out.

FOLDER/step-00000007.jsonl      a header, then a line for each trajectory of the step that was the eighth
FOLDER/rank1/step-00000007.jsonl    of a run over several ranks: those of the second one
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from ..engine.config import SamplingParams
from ..engine.errors import TraceError
from ..engine.trace import turn_from, turn_values
from .process_group import ProcessGroup
from .step_report import StepReport
from .trainer import Trainer
from .trajectory import Group, Problem, Trajectory

__all__ = ["dumped", "has_step", "read_step", "recorded", "replay"]

FORMAT = 1


def dumped(groups: Generator[Group, None, None], folder: str | Path, step: int) -> Generator[Group, None, None]:
    """Pass groups on, each after it was written to the file of this step, which appears when all are in it.

    A file of the same step is replaced. Raises TraceError when it cannot be written.
    """
    with _StepFile(_file(Path(folder), step)) as file, closing(groups):
        for number, group in enumerate(groups):
            if not number:
                file.write({"format": FORMAT, "step": step, "sampling": dataclasses.asdict(group.sampling)})
            for trajectory in group.trajectories:
                file.write(_line(number if group.place is None else group.place, group, trajectory))
            yield group


def read_step(file: str | Path) -> Iterator[Group]:
    """The groups of a step's file, as they were rolled out; their problems without document and extra values.

    Raises TraceError, naming the line, for a damaged file.
    """
    place = Path(file)
    try:
        with place.open(encoding="utf-8") as stream:
            lines = (_parsed(place, number, line) for number, line in enumerate(stream, start=1))
            header = next(lines, None)
            if header is None:  # a step without groups
                return
            if header.get("format") != FORMAT:
                raise TraceError(f"{place} is of format {header.get('format')}, this program reads {FORMAT}")
            with _told(place, 1):
                sampling = SamplingParams(**header["sampling"])
            for _, members in groupby(enumerate(lines, start=2), key=lambda numbered: numbered[1].get("group")):
                yield _group(place, list(members), sampling)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trajectories {place}: {error}") from error


def replay(trainer: Trainer, folder: str | Path, process_group: ProcessGroup | None = None) -> Iterator[StepReport]:
    """Train on the steps that a run left in `folder`, from the trainer's present step on; -> a report of each.

    With the configuration, weights and steps of the run that rolled out, every number and weight is that run's. With
    others, rollouts of other weights must be allowed: AlgorithmConfig.correction. Raises TraceError when there is no
    file of the present step, or a damaged one; else as Trainer.step does.
    """
    yield trainer.step(recorded(folder, trainer.steps, process_group))
    while has_step(folder, trainer.steps):
        yield trainer.step(recorded(folder, trainer.steps, process_group))


def has_step(folder: str | Path, step: int) -> bool:
    """Whether there are trajectories of a step."""
    return bool(_files(Path(folder), step))


def recorded(folder: str | Path, step: int, process_group: ProcessGroup | None = None) -> Generator[Group, None, None]:
    """The groups of a step, of several ranks this one's share. Raises TraceError when there are none, and as read_step
    does."""
    ranks, place = ProcessGroup() if process_group is None else process_group, Path(folder)
    files = _files(place, step)
    if not files:
        there = sorted({file.stem for file in place.rglob("step-*.jsonl")})
        raise TraceError(
            f"{place} has no trajectories of step {step} ({f'{there[0]} to {there[-1]}' if there else 'none'} are "
            "there); lower rollout.steps, go on from the checkpoint of another step, or name another run's folder"
        )
    for file in files[ranks.rank :: ranks.size]:
        yield from read_step(file)


def _files(place: Path, step: int) -> list[Path]:
    name = _file(place, step).name
    of_ranks = sorted(place.glob(f"rank*/{name}"), key=lambda file: (len(file.parent.name), file.parent.name))
    return [place / name] if (place / name).is_file() else of_ranks


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}.jsonl"


class _StepFile:
    """A file that gets its name when the block around it ends well."""

    def __init__(self, target: Path) -> None:
        self._target, self._partial = target, target.with_suffix(".partial")
        with self._named():
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("w", encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        with self._named():
            self._file.write(json.dumps(values) + "\n")

    def __enter__(self) -> _StepFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._named(), self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if error is None:
            with self._named():
                self._partial.replace(self._target)
        else:
            self._partial.unlink(missing_ok=True)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceError(f"cannot write the trajectories {self._target}: {error.strerror}") from error


def _line(place: int, group: Group, trajectory: Trajectory) -> dict[str, Any]:
    problem = group.problem
    return {
        "group": place,
        "weights_version": group.weights_version,
        "problem": None if problem is None else [problem.id, problem.question, problem.answers],
        "reward": trajectory.reward,
        "correct": trajectory.correct,
        "turns": [turn_values(turn) for turn in trajectory.turns],
    }


def _group(place: Path, members: list[tuple[int, dict[str, Any]]], sampling: SamplingParams) -> Group:
    trajectories = []
    for number, values in members:
        with _told(place, number):
            turns = [turn_from(turn) for turn in values["turns"]]
            version, number_of_group = values["weights_version"], values["group"]
            trajectories.append(Trajectory(turns, values["reward"], values["correct"]))
            problem = _problem(values["problem"])
    return Group(trajectories, sampling, version, number_of_group, problem)


def _problem(values: list[Any] | None) -> Problem | None:
    if values is None:
        return None
    name, question, answers = values
    return Problem("", question, answers, name)


def _parsed(place: Path, number: int, line: str) -> dict[str, Any]:
    with _told(place, number):
        return {**json.loads(line)}


@contextmanager
def _told(place: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise TraceError(f"line {number} of {place} is damaged ({error!r}); leave this step out") from error

"""Checkpoints: all that a run goes on from, each in a folder that appears complete or not at all.

FOLDER/step-00000010/
    model/ or adapter/                      for `Engine` and transformers, or for PEFT; what is trained
    optimizer-00001-of-00001.safetensors    moments and float32 masters; one file from each rank
    state.json                              counters, data position, random states
    manifest.json                           size and sha256 of every other file
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..engine import checkpoint, lora
from ..engine.checkpoint import flush, new_folder, read_json, write_json
from ..engine.config import _require_int
from ..engine.engine import Engine
from ..engine.errors import CheckpointError
from ..engine.tensor_files import StoredTensor, read_header
from .process_group import ProcessGroup
from .supervised import SupervisedTrainer
from .trainer import Trainer

__all__ = ["CheckpointConfig", "Checkpoints"]

FORMAT = 1
MODEL, ADAPTER, STATE, MANIFEST = "model", "adapter", "state.json", "manifest.json"
NAME = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class CheckpointConfig:
    """every: steps from one checkpoint to the next; a run that ends leaves one too. keep: so many of the newest stay,
    and the best."""

    every: int = 10
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            _require_int("CheckpointConfig", name, getattr(self, name), 1)


class Checkpoints:
    """The checkpoints of a run, in one folder that is theirs alone; all ranks see the same one."""

    def __init__(
        self, folder: str | Path, keep: int = CheckpointConfig.keep, process_group: ProcessGroup | None = None
    ) -> None:
        """Takes away what a run that was killed left half written or half removed."""
        self.folder, self.keep = Path(folder), keep
        self._ranks = ProcessGroup() if process_group is None else process_group
        if self._ranks.main:
            for rest in self.folder.glob(".step-*.partial"):
                shutil.rmtree(rest, ignore_errors=True)

    def all(self) -> list[Path]:
        """The folders of all checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [place for place in self.folder.iterdir() if NAME.fullmatch(place.name)]
        return sorted(found, key=_steps)

    @property
    def steps(self) -> int | None:
        """Steps taken before the newest one was saved."""
        places = self.all()
        return _steps(places[-1]) if places else None

    def start(self, resume: bool) -> int | None:
        """-> steps of the one that a run goes on from; None for a run that begins.

        Raises CheckpointError when one that is not to go on would begin among the checkpoints of another.
        """
        if not resume and self.steps is not None:
            raise CheckpointError(
                f"{self.folder} exists: there is a run in this folder; go on with it (--resume), or set log.folder"
            )
        return self.steps if resume else None

    def save(self, trainer: Trainer | SupervisedTrainer, run: Mapping[str, Any], score: float | None = None) -> Path:
        """Write a checkpoint of the steps taken so far; -> its folder. Then older ones go that are not to be kept.

        run: plain JSON values, for `restore` to give back. score: what makes one the best, the larger the better.
        Raises CheckpointError when it cannot be written, or is there already.
        """
        state, ranks, engine = trainer.state_dict(), self._ranks, trainer.engine
        tensors = state.pop("optimizer")
        target = self.folder / f"step-{trainer.steps:08}"
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(new_folder(target, self._bytes(trainer, tensors))) if ranks.main else None
            place = _led(engine, ranks.gather(own)[0])
            assert place is not None  # the main rank's
            file = place / _shard(engine, f"{ranks.rank + 1:05}", f"{ranks.size:05}")
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
            flush(file)  # by the machine that wrote it
            told = ranks.gather(dict(run))  # so the files of these ranks are there
            if ranks.rank == 0:
                weights = engine.describe()["weights"]  # together with those that hold parts of this model: theirs too
                header = {"format": FORMAT, "step": trainer.steps, "score": score, "weights": weights}
                _save_weights(engine, place)
            if ranks.main:
                text = json.dumps({**header, "trainer": state, "ranks": told})
                (place / STATE).write_text(text + "\n", encoding="utf-8")
                manifest = {name: dataclasses.asdict(_content(place / name)) for name in _files(place)}
                write_json(place / MANIFEST, manifest)
        ranks.gather(_led(engine, None))  # it has its name
        if ranks.main:
            self._prune()
        return target

    def restore(self, trainer: Trainer | SupervisedTrainer) -> dict[str, Any] | None:
        """Bring trainer and engine to the newest checkpoint; -> what this rank of the run had given to it.

        None without any checkpoint. Another number of ranks than before is fine, unless they hold parts of one model.
        Raises CheckpointError, naming the newest one, when it is damaged or of another model; an older one is never
        taken silently.
        """
        ranks, engine = self._ranks, trainer.engine
        place = _led(engine, ranks.gather(self._whole() if ranks.main else None)[0])
        if place is None:
            return None
        state = read_json(place / STATE)
        files = list(place.glob(_shard(engine, "?????", "?????")))
        if not files:
            raise CheckpointError(f"{place} was saved with other parts of the model on a rank; use as many as then")
        stored = {name: tensor for file in files for name, tensor in read_header(file).items()}
        _restore_weights(engine, place)
        if engine.describe()["weights"] != state["weights"]:
            raise CheckpointError(f"{place} was saved with another model below its adapters; give the same model")
        trainer.load_state_dict(state["trainer"] | {"optimizer": _Tensors(stored)})
        told = state["ranks"]
        run: dict[str, Any] = told[min(ranks.rank, len(told) - 1)]
        return run

    def _bytes(self, trainer: Trainer | SupervisedTrainer, tensors: Mapping[str, Tensor]) -> int:
        """Some size of a whole checkpoint."""
        parts = 1 if trainer.engine.parallel is None else trainer.engine.parallel.size
        moments = self._ranks.size * sum(tensor.nbytes for tensor in tensors.values())
        return parts * (moments + sum(parameter.nbytes for parameter in trainer.engine.model.parameters()))

    def _whole(self) -> Path | None:
        """The newest."""
        places = self.all()
        if not places:
            return None
        place = places[-1]
        found = _damage(place)
        if found is not None:
            whole = next((other for other in reversed(places[:-1]) if _damage(other) is None), None)
            remedy = (
                f"remove it to go on from {whole.name}, which is whole: rm -r {place}"
                if whole is not None
                else "no other one is whole, so start again without resuming, in another folder"
            )
            raise CheckpointError(f"checkpoint {place} is damaged: {found}; {remedy}")
        return place

    def _prune(self) -> None:
        places = self.all()
        scores = {place: read_json(place / STATE)["score"] for place in places}
        scored = [place for place in places if scores[place] is not None]
        best = max(scored, key=scores.__getitem__, default=None)  # the first of equals
        for place in places[: -self.keep]:
            if place != best:
                _remove(place)


class _Tensors(Mapping[str, Tensor]):
    """Stored tensors, each read when it is asked for: an optimizer's state need not be in memory twice."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


@dataclass(frozen=True)
class _Content:
    bytes: int
    sha256: str


def _content(file: Path) -> _Content:
    with file.open("rb") as stream:
        return _Content(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def _files(place: Path) -> list[str]:
    return sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())


def _steps(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def _led(engine: Engine, place: Path | None) -> Path | None:
    """What the first of the ranks that hold parts of this model knows."""
    return place if engine.parallel is None else engine.parallel.lead(place)


def _shard(engine: Engine, rank: str, size: str) -> str:
    parallel = engine.parallel
    part = "" if parallel is None else f"-part-{parallel.rank + 1}-of-{parallel.size}"
    return f"optimizer-{rank}-of-{size}{part}.safetensors"


def _damage(place: Path) -> str | None:
    """What is wrong with a checkpoint's files."""
    try:
        manifest = read_json(place / MANIFEST)
        for name in sorted({*manifest, *_files(place)} - {MANIFEST}):
            if name not in manifest or not (place / name).is_file():
                return f"{name} {'does not belong to it' if name not in manifest else 'is missing'}"
            if dataclasses.asdict(_content(place / name)) != manifest[name]:
                return f"{name} is not what was written"
        version = read_json(place / STATE).get("format")
    except (CheckpointError, OSError) as error:
        return str(error)
    return None if version == FORMAT else f"it has format {version}, this program reads {FORMAT}"


def _save_weights(engine: Engine, place: Path) -> None:
    if lora.adapters(engine.model):
        lora.save(engine.model, place / ADAPTER, engine.model_path)
    else:
        engine.save(place / MODEL)


def _restore_weights(engine: Engine, place: Path) -> None:
    adapters = bool(lora.adapters(engine.model))
    if not (place / (ADAPTER if adapters else MODEL)).is_dir():
        have, want = ("all weights", "adapters alone") if adapters else ("adapters alone", "all weights")
        raise CheckpointError(f"{place} holds {have}, but this trainer trains {want}; use the same LoraConfig")
    with engine.update(), torch.no_grad():
        if adapters:
            lora.restore(engine.model, place / ADAPTER)
        else:
            checkpoint.restore(dict(engine.model.named_parameters()), place / MODEL, engine.parallel)


def _remove(place: Path) -> None:
    """Never leaves a part of it under its name."""
    doomed = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".partial", dir=place.parent))
    place.rename(doomed / place.name)
    shutil.rmtree(doomed, ignore_errors=True)

"""Trackers: the numbers of a log's lines, for TensorBoard and for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.errors import ConfigError
from .log import Tracker
from .run_config import LogConfig

__all__ = ["TensorBoard", "WeightsAndBiases", "trackers"]


def trackers(config: LogConfig, run: Mapping[str, Any]) -> list[Tracker]:
    """Those that a configuration asks for. run: the whole configuration, as plain values.

    Raises ConfigError for one that is not installed.
    """
    folder, found = Path(config.folder), list[Tracker]()
    if config.tensorboard:
        found.append(TensorBoard(folder / "tensorboard"))
    if config.wandb is not None:
        found.append(WeightsAndBiases(folder, config.wandb, config.wandb_mode, run))
    return found


class TensorBoard:
    """Writes event files into a folder. Steps that a resumed run takes again are shown in place of the first ones."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("log.tensorboard needs a package: pip install tensorboard") from error
        self._folder, self._make = folder, SummaryWriter
        self._writer: SummaryWriter | None = None

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars."""
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of W&B, which goes by the name of the folder; "offline" writes it there, for `wandb sync`.

    A resumed run is another one there, from the step on at which it goes on.
    """

    def __init__(self, folder: Path, project: str, mode: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("log.wandb needs a package: pip install wandb") from error
        folder.mkdir(parents=True, exist_ok=True)
        arguments: dict[str, Any] = {"name": folder.name, "dir": str(folder), "mode": mode, "config": dict(config)}
        try:
            self._run = wandb.init(project=project, **arguments)
        except wandb.Error as error:
            raise ConfigError(f"Weights & Biases refuses ({error}); log in, or set log.wandb_mode=offline") from error

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Send scalars."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()

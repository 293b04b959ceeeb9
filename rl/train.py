"""The command `palimpsest train`: a run from a YAML file."""

from __future__ import annotations

from collections.abc import Sequence

from .config_file import load_config
from .run import Run

__all__ = ["run"]


def run(path: str, changes: Sequence[str]) -> int:
    """Carry out the command; -> exit code. Raises PalimpsestError."""
    Run(load_config(path, changes)).train()
    return 0

"""Resident: how much memory an engine takes at its worst, measured in a process of its own."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..engine.errors import ConfigError
from .ours import VARIANTS, Ours

__all__ = ["Resident", "grown", "resident"]

ALLOWANCE = 200e6  # bytes beside weights, KV and the interpreter with torch
ROOM = 16
PEAK = "VmHWM:"  # of this program alone; getrusage's figure is inherited from the parent process
BARE = f"import torch; print([line for line in open('/proc/self/status') if line.startswith('{PEAK}')][0])"


@dataclass(frozen=True)
class Resident:
    """Bytes. bare: an interpreter with torch. used: at the peak, after a prompt was read and answered. weights, kv: of
    the tensors.
    """

    bare: int
    used: int
    weights: int
    kv: int

    @property
    def allowed_over_used(self) -> float:
        """1 or more when the peak is within the allowance."""
        return (self.bare + self.weights + self.kv + ALLOWANCE) / self.used

    def __str__(self) -> str:
        parts = (f"{name} {getattr(self, name) / 1e6:.0f}" for name in ("bare", "weights", "kv"))
        return f"{self.used / 1e6:.0f} MB at the peak; {', '.join(parts)}"


def resident(model: str, dtype: str, context: int, threads: int) -> Resident:
    """Load `model` as variant `dtype`, read a prompt of `context` tokens and write a few. Linux only (ConfigError)."""
    try:
        bare = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"the peak of resident memory is read from /proc/self/status: {error.stderr}") from error
    # A fresh interpreter: a forked one would count what this process has loaded.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        used, weights, kv = pool.apply(_use, (model, dtype, context, threads))
    return Resident(_peak(bare), used, weights, kv)


def grown(work: Callable[[], object], device: torch.device) -> int:
    """Bytes by which torch's memory on a GPU, or this process's resident memory, rises at most while it does `work`.

    Resident memory on Linux only (ConfigError).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - held
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
        before = _peak(status.read_text())
        kept = work()  # a result that is let go of could not be told from one that was never there
        rise = _peak(status.read_text()) - before
    except OSError as error:
        raise ConfigError(f"the peak of resident memory is read and reset in /proc/self: {error}") from error
    del kept
    return rise


def _use(model: str, dtype: str, context: int, threads: int) -> tuple[int, int, int]:
    """Runs in the other process; -> peak, weights and KV in bytes."""
    ours = Ours(model, VARIANTS[dtype], sequences=1, longest=context + ROOM, threads=threads)
    ours.decode(1, context, ROOM // 2)
    decoder, runner = ours.engine.model, ours.engine.runner
    parts = (getattr(module, name, None) for module in decoder.modules() for name in ("weight", "bias", "cos", "sin"))
    weights = sum(part.nbytes for part in parts if part is not None)
    kv = sum(layer.key.nbytes + layer.value.nbytes for layer in runner.pages)
    return _peak(Path("/proc/self/status").read_text()), weights, kv


def _peak(status: str) -> int:
    """Bytes of the line `VmHWM: 12345 kB`."""
    line = next(line for line in status.splitlines() if line.startswith(PEAK))
    return int(line.split()[1]) * 1024

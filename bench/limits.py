"""Limits: what this machine could do at best, measured beside the work that is compared with it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from ..engine import cpu
from ..engine.errors import ConfigError
from .costs import Cost

__all__ = ["Limits", "Probe", "Prober"]

READ_BYTES = 512 * 2**20  # far beyond any cache
REPEATS = 2_000_000  # some 10 ms of multiply-adds
TRIES = 3


@dataclass(frozen=True)
class Limits:
    """flops_per_s: float32 multiply-adds from registers, 2 operations each. bytes_per_s: reads from memory."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, cost: Cost) -> float:
        """The time below which no implementation gets: the larger of arithmetic and reading (roofline model)."""
        return max(cost.flops / self.flops_per_s, cost.bytes / self.bytes_per_s)


class Prober(Protocol):
    """Measures the limits of what runs the work. isa: its name or instruction set. best: of all measurements."""

    isa: str
    best: Limits

    def measure(self) -> Limits:
        """The limits now."""


class Probe:
    """Measures the CPU's limits with as many threads as torch is set to, each the best of a few tries.

    best: the highest rates that any measurement found.
    """

    def __init__(self) -> None:
        """Raises ConfigError when the extension is not built."""
        try:
            from .. import _C
        except ImportError as error:
            raise ConfigError(
                "the machine's limits are measured by the extension palimpsest._C, "
                f"which cannot be imported ({error}); run `make build`"
            ) from error
        self._kernels = _C.CpuKernels("best")
        self._memory = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        cpu.use_huge_pages([self._memory])  # as the weights lie
        self.isa = self._kernels.isa
        self.best = Limits(0.0, 0.0)

    def measure(self) -> Limits:
        """The limits now; takes some 0.1 s."""
        now = Limits(max(self._flops() for _ in range(TRIES)), max(self._bytes() for _ in range(TRIES)))
        flops, read = now.flops_per_s, now.bytes_per_s
        self.best = Limits(max(flops, self.best.flops_per_s), max(read, self.best.bytes_per_s))
        return now

    def _flops(self) -> float:
        start = time.perf_counter()
        done = self._kernels.multiply_add(REPEATS)
        return done / (time.perf_counter() - start)

    def _bytes(self) -> float:
        start = time.perf_counter()
        self._kernels.read_memory(self._memory.data_ptr(), self._memory.numel())
        return self._memory.nbytes / (time.perf_counter() - start)

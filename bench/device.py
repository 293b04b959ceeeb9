"""A GPU for the benchmarks: its clock, its limits, its memory. Without one, the CPU that stands in for it in trials."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ..engine.errors import ConfigError
from .limits import Limits

__all__ = ["DeviceProbe", "device_of", "seconds_of", "synchronize"]

FLUSH_BYTES = 2**30  # many times the L2 cache; writing it takes longer than the launches that are queued behind it
READ_BYTES = 2**31
SIDE = 8192  # of the matrices
TINY_SIDE, TINY_BYTES = 64, 2**20
TRIES = 5


def device_of(name: str) -> torch.device:
    """ "cuda" or "cpu". Raises ConfigError for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "there is no GPU that torch can use (torch.cuda.is_available() is False); --device cpu --tiny tries the "
            "same code on a CPU"
        )
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Of one call. On a GPU the median of a few with cold caches, between two events behind a write of FLUSH_BYTES."""
    return statistics.median(_once(work, device) for _ in range(TRIES if device.type == "cuda" else 1))


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    start_event, end_event = (_event() for _ in range(2))
    flush.zero_()
    start_event.record()
    work()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceProbe:
    """Measures a GPU's limits by torch: products of bfloat16 matrices, and reading (or copying, if that is faster).

    best: the highest rates that any measurement found. isa: the GPU's name and compute capability.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        side, size = (SIDE, READ_BYTES) if on_gpu else (TINY_SIDE, TINY_BYTES)
        # Random: a GPU multiplies matrices of equal numbers faster than any that a model has, since fewer bits change.
        self._matrix = torch.randn(side, side, device=device).to(torch.bfloat16)
        self._memory = torch.ones(size // 4, dtype=torch.float32, device=device)
        self._target = torch.empty_like(self._memory)
        self.isa = "no GPU: times mean nothing"
        if on_gpu:
            major, minor = torch.cuda.get_device_capability(device)
            self.isa = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
        self.best = Limits(0.0, 0.0)
        self.measure()  # what libraries set up once

    def measure(self) -> Limits:
        """The limits now; takes some 0.1 s."""
        flops = 2.0 * len(self._matrix) ** 3 / self._fastest(lambda: self._matrix @ self._matrix)
        read = self._memory.nbytes / self._fastest(self._memory.sum)
        copied = 2 * self._memory.nbytes / self._fastest(lambda: self._target.copy_(self._memory))
        now = Limits(flops, max(read, copied))
        self.best = Limits(max(now.flops_per_s, self.best.flops_per_s), max(now.bytes_per_s, self.best.bytes_per_s))
        return now

    def _fastest(self, work: Callable[[], object]) -> float:
        return min(_once(work, self._device) for _ in range(TRIES))

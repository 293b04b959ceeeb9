"""Sample: how long a piece of work took, and what the rest of the machine did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

__all__ = ["Sample", "timed"]


@dataclass(frozen=True)
class Sample:
    """seconds: wall time. others: cores' worth of CPU time that other processes used meanwhile; much of it spoils the
    sample.
    """

    seconds: float
    others: float


def timed(work: Callable[[], object]) -> Sample:
    """Run `work` once in this process."""
    busy, own, start = _machine_busy(), time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    others = _machine_busy() - busy - (time.process_time() - own)
    return Sample(seconds, max(0.0, others / seconds))


def _machine_busy() -> float:
    """CPU seconds that all cores together were not idle since the machine started; what a hypervisor took counts."""
    times = psutil.cpu_times()
    # Linux counts a guest's time in `user` as well, so those fields are not added again.
    fields = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, field, 0.0) for field in fields))

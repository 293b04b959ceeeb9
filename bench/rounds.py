"""Measured: engines taking turns on one piece of work, round by round, so that the machine's moods hit all alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .clock import Sample
from .costs import Cost
from .limits import Limits, Prober
from .peers import PeerError

__all__ = ["Entry", "Measured", "alternate", "best", "ratio"]

PAUSE = 0.1  # seconds: OpenMP's threads spin a while for more work before they sleep, and would disturb who comes next


@dataclass(frozen=True)
class Entry:
    """One engine on one piece of work.

    tokens: how many one run computes. cost: of one run. run: takes the round's number; round 0 warms up.
    """

    engine: str
    work: str
    dtype: str
    context: int
    batch: int
    tokens: int
    cost: Cost
    run: Callable[[int], Sample]


@dataclass
class Measured:
    """An entry with one sample and one measurement of the machine's limits per round."""

    entry: Entry
    samples: list[Sample] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of one run, the median."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def tokens_per_s(self) -> float:
        return self.entry.tokens / self.seconds

    @property
    def limit(self) -> float:
        """Tokens per second at the machine's limit, the median over the rounds."""
        return statistics.median(self.entry.tokens / limits.seconds(self.entry.cost) for limits in self.limits)

    @property
    def share(self) -> float:
        """The share of the limit that was reached, the median of the rounds' own ratios."""
        pairs = zip(self.samples, self.limits, strict=True)
        return statistics.median(limits.seconds(self.entry.cost) / sample.seconds for sample, limits in pairs)

    @property
    def others(self) -> float:
        """Cores' worth of CPU time that the rest of the machine used, the median."""
        return statistics.median(sample.others for sample in self.samples)


def alternate(entries: Sequence[Entry], rounds: int, probe: Prober) -> list[Measured]:
    """Run every entry once per round, after one round to warm up; the limits are measured anew in each round.

    A peer that fails is left out, with a line on stderr.
    """
    measured = [Measured(entry) for entry in entries]
    for number in range(rounds + 1):
        limits = probe.measure()
        for one in list(measured):
            time.sleep(PAUSE)
            try:
                sample = one.entry.run(number)
            except PeerError as error:
                print(f"{one.entry.work} {one.entry.context}: {error}; left out", file=sys.stderr)
                measured.remove(one)
                continue
            if number > 0:
                one.samples.append(sample)
                one.limits.append(limits)
    return measured


def ratio(ours: Measured, theirs: Measured) -> float:
    """Our speed over theirs, the median of the rounds' own ratios; above 1 we are faster."""
    per_token = [sample.seconds / theirs.entry.tokens for sample in theirs.samples]
    pairs = zip(ours.samples, per_token, strict=True)
    return statistics.median(their / (sample.seconds / ours.entry.tokens) for sample, their in pairs)


def best(measured: Sequence[Measured]) -> Measured | None:
    """The fastest of several, None of none."""
    return max(measured, key=lambda one: one.tokens_per_s, default=None)

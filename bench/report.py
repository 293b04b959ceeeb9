"""Report: what a benchmark found, as a table for people and one JSON line for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from .limits import Limits
from .rounds import Measured

__all__ = ["Report", "Target", "describe_machine", "row"]


@dataclass(frozen=True)
class Target:
    """A promise: `value` should reach `target`; None when there was nothing to compare with.

    name: work.context.dtype.quantity.
    """

    name: str
    value: float | None
    target: float

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value >= self.target


@dataclass(frozen=True)
class Report:
    """bench: its name. machine: see describe_machine. rows: see row."""

    bench: str
    machine: dict[str, Any]
    rows: list[dict[str, Any]]
    targets: list[Target]

    @property
    def missed(self) -> bool:
        return any(target.met is False for target in self.targets)

    def print(self) -> None:
        """The tables, and as the last line the JSON document."""
        print(_machine_line(self.machine))
        print(_rows_table(self.rows))
        print(_targets_table(self.targets))
        targets = [{**vars(target), "met": target.met} for target in self.targets]
        print(
            json.dumps({"bench": self.bench, "machine": self.machine, "rows": self.rows, "targets": targets}),
            flush=True,
        )


def row(measured: Measured) -> dict[str, Any]:
    """A line of the report. seconds: of one run, the median. limit: tokens/s at the machine's limit. share: of it.

    others: cores' worth of CPU time that the rest of the machine used, one figure per round.
    """
    entry = measured.entry
    return {
        "engine": entry.engine,
        "work": entry.work,
        "dtype": entry.dtype,
        "context": entry.context,
        "batch": entry.batch,
        "seconds": _rounded(measured.seconds),
        "tokens_per_s": _rounded(measured.tokens_per_s),
        "limit": _rounded(measured.limit),
        "share": _rounded(measured.share),
        "rounds": len(measured.samples),
        "others": [round(sample.others, 2) for sample in measured.samples],
    }


def describe_machine(isa: str, limits: Limits) -> dict[str, Any]:
    """What the figures belong to; threads, and the limits in GFLOP/s and GB/s."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "isa": isa,
        "threads": torch.get_num_threads(),
        "peak_gflop_per_s": _rounded(limits.flops_per_s / 1e9),
        "read_gb_per_s": _rounded(limits.bytes_per_s / 1e9),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _rounded(value: float) -> float:
    """Five digits: more would be noise."""
    return float(f"{value:.5g}")


def _machine_line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads: "
        f"{machine['peak_gflop_per_s']:.0f} GFLOP/s, {machine['read_gb_per_s']:.1f} GB/s"
    )


def _rows_table(rows: Sequence[dict[str, Any]]) -> str:
    head = f"{'work':<11}{'context':>8} {'dtype':<9}{'engine':<34}{'ms':>10}{'tokens/s':>10}{'limit':>9}{'share':>7}"
    lines = [f"{head}{'others':>8}"]
    for one in rows:
        others = sorted(one["others"])[len(one["others"]) // 2] if one["others"] else 0.0
        lines.append(
            f"{one['work']:<11}{one['context']:>8} {one['dtype']:<9}{one['engine']:<34}{one['seconds'] * 1e3:>10.1f}"
            f"{one['tokens_per_s']:>10.1f}{one['limit']:>9.1f}{one['share']:>7.0%}{others:>8.2f}"
        )
    return "\n".join(lines)


def _targets_table(targets: Sequence[Target]) -> str:
    words = {True: "met", False: "MISSED", None: "no peer"}
    lines = [f"{'target':<44}{'value':>8}{'at least':>10}"]
    for target in targets:
        value = "-" if target.value is None else f"{target.value:.3f}"
        lines.append(f"{target.name:<44}{value:>8}{target.target:>10.2f}  {words[target.met]}")
    return "\n".join(lines)

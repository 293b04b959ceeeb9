"""`palimpsest bench kernels`: every kernel timed beside its floor and torch; with --compile-only as Triton builds it.

Timed on a GPU, with shapes of Qwen2.5-7B; with --device cpu --tiny the same code runs under Triton's interpreter, whose
times mean nothing. Built for sm_80 and sm_90, no GPU needed, with shapes of Qwen2.5-7B and 14B, and attention of other
heads. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..engine.errors import ConfigError, PalimpsestError
from .clock import Sample
from .device import DeviceProbe, device_of, seconds_of
from .kernel_builds import HEADS, SHAPES, builds
from .report import describe_machine, row
from .rounds import Entry, Measured, alternate, ratio

if TYPE_CHECKING:
    import torch

    from .kernel_cases import Case

__all__ = ["main"]

CAPABILITIES = (80, 90)
ROUNDS = 5
EXIT_MISSED = 1
EXIT_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; -> exit code: 1 when a compiled kernel spills registers, lacks the matrix instructions, or takes
    more shared memory than there is."""
    options = _parser().parse_args(argv)
    try:
        return _compile(options) if options.compile_only else _measure(options)
    except ImportError as error:
        print(f"palimpsest bench kernels: {error}; pip install 'palimpsest-rl[triton]'", file=sys.stderr)
    except PalimpsestError as error:
        print(f"palimpsest bench kernels: {error}", file=sys.stderr)
    return EXIT_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="palimpsest bench kernels", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--compile-only", action="store_true", help="compile, and run nothing")
    add("--quick", action="store_true", help="with --compile-only: the first model only")
    add("--device", choices=("cuda", "cpu"), help="where the kernels run (cuda)")
    add("--tiny", action="store_true", help="tiny shapes; the only ones for --device cpu")
    add("--rounds", type=int, metavar="N", help=f"of which medians are taken ({ROUNDS})")
    return parser


def _compile(options: argparse.Namespace) -> int:
    from ..triton_kernels.tuning import SHARED_BYTES
    from .compile_ahead import compile_ahead

    if options.device is not None or options.tiny or options.rounds is not None:
        raise ConfigError("--compile-only runs nothing: leave out --device, --tiny and --rounds")
    if _interpreted():
        raise ConfigError("the interpreter compiles nothing; unset TRITON_INTERPRET")
    rows, missed = [], []
    for shape in SHAPES[:1] if options.quick else (*SHAPES, *HEADS):
        for build in builds(shape):
            for capability in (c for c in CAPABILITIES if c >= build.least):
                compiled = compile_ahead(
                    build.kernel, build.types, build.constants, capability, warps=build.warps, stages=build.stages,
                    fused=build.fused,
                )  # fmt: skip
                wgmma = "wgmma" in compiled.ptx
                row = {
                    "model": shape.name, "kernel": build.name, "target": f"sm_{capability}",
                    "registers": compiled.registers, "shared_bytes": compiled.shared_bytes,
                    "spill_bytes": compiled.spill_bytes, "wgmma": wgmma,
                }  # fmt: skip
                rows.append(row)
                lacks_wgmma = build.tensor and capability >= 90 and not wgmma
                if compiled.spill_bytes or lacks_wgmma or compiled.shared_bytes > SHARED_BYTES[divmod(capability, 10)]:
                    missed.append(row)
    _print_builds(rows)
    print(json.dumps({"bench": "kernels", "rows": rows, "missed": missed}), flush=True)
    return EXIT_MISSED if missed else 0


def _interpreted() -> bool:
    from ..triton_kernels.arithmetic import INTERPRETED

    return bool(INTERPRETED.value)


def _measure(options: argparse.Namespace) -> int:
    if options.quick:
        raise ConfigError("--quick goes with --compile-only; for little shapes say --tiny")
    rounds = ROUNDS if options.rounds is None else options.rounds
    if rounds < 1:
        raise ConfigError(f"--rounds takes a whole number of at least 1, not {rounds}")
    if options.device == "cpu":
        if not options.tiny:
            raise ConfigError("--device cpu runs kernels under Triton's interpreter, which takes --tiny shapes only")
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    device = device_of(options.device or "cuda")
    if _interpreted() != (device.type == "cpu"):
        raise ConfigError("--device cpu and the interpreter (TRITON_INTERPRET=1) go together, and not with a GPU")
    from .kernel_cases import SIZES, cases

    probe, rows = DeviceProbe(device), []
    for case in cases(SIZES["tiny" if options.tiny else "full"], device):
        rows.append(_line(case, alternate(_entries(case, device), rounds, probe)))
    _print_times(rows, probe)
    machine = describe_machine(probe.isa, probe.best)
    print(json.dumps({"bench": "kernels", "machine": machine, "rows": rows, "targets": []}), flush=True)
    return 0


def _entries(case: Case, device: torch.device) -> list[Entry]:
    def entry(engine: str, run: Any) -> Entry:
        return Entry(
            engine, case.kernel, case.dtype, case.context, case.rows, case.rows, case.cost,
            lambda _: Sample(seconds_of(run, device), 0.0),
        )  # fmt: skip

    return [entry(case.engine, case.ours), *([entry("torch", case.torch)] if case.torch else [])]


def _line(case: Case, measured: Sequence[Measured]) -> dict[str, Any]:
    """As report.row, and: seconds of the floor, FLOP/s and bytes/s reached, seconds of torch and its speed in ours."""
    ours, *others = measured
    torch_seconds = others[0].seconds if others else None
    return row(ours) | {
        "floor_seconds": statistics.median(limits.seconds(case.cost) for limits in ours.limits),
        "flops_per_s": case.cost.flops / ours.seconds,
        "bytes_per_s": case.cost.bytes / ours.seconds,
        "torch_seconds": torch_seconds,
        "vs_torch": ratio(ours, others[0]) if others else None,
    }


def _print_builds(rows: Sequence[Mapping[str, Any]]) -> None:
    """As kernels.md has them."""
    print("| model | kernel | target | registers | shared bytes | spilled | wgmma |\n|---|---|---|---|---|---|---|")
    for one in rows:
        *values, wgmma = one.values()
        print(f"| {' | '.join(map(str, values))} | {'yes' if wgmma else ''} |")


def _print_times(rows: Sequence[Mapping[str, Any]], probe: DeviceProbe) -> None:
    print(f"{probe.isa}: {probe.best.flops_per_s / 1e12:.1f} TFLOP/s bfloat16, {probe.best.bytes_per_s / 1e9:.0f} GB/s")
    table = Table(
        "kernel", "by", "dtype", "rows", "context", "ms", "floor", "share", "TFLOP/s", "GB/s", "torch", "gain"
    )
    for one in rows:
        milliseconds = (one["seconds"], one["floor_seconds"], one["torch_seconds"])
        ms, floor, torch_ms = ("" if seconds is None else f"{seconds * 1e3:.4f}" for seconds in milliseconds)
        gain = "" if one["vs_torch"] is None else f"{one['vs_torch']:.2f}x"
        rates = f"{one['flops_per_s'] / 1e12:.1f}", f"{one['bytes_per_s'] / 1e9:.0f}"
        name = one["work"], one["engine"], one["dtype"], str(one["batch"]), str(one["context"] or "")
        table.add_row(*name, ms, floor, f"{one['share']:.0%}", *rates, torch_ms, gain)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())

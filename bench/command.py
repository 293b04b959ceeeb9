"""A command in a process of its own, for scripts that run many, one after the other."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["palimpsest", "printed"]

ROOT = Path(__file__).resolve().parents[1]


def palimpsest(*words: object) -> str:
    """Run a command of the package, in the folder that holds it; -> what it printed. See `printed`."""
    return printed([sys.executable, "-m", "palimpsest", *words])


def printed(command: Sequence[object]) -> str:
    """Run a command in the package's folder; -> what it printed.

    Where the command fails this process ends with its exit code: it has told why on stderr. SIGTERM is passed on, and
    Ctrl-C a terminal gives to both; either way the command is waited for, so that a training run leaves a checkpoint.
    """
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number)),
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        }
        try:
            output, _ = process.communicate()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    code = process.returncode
    if code:
        raise SystemExit(code if code > 0 else 128 - code)  # as a shell says of a command that a signal ended
    return output

"""Commands in processes of their own: signals reach them, and what they leave undone is told by an exit code alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from palimpsest.bench.command import ROOT, palimpsest, printed

CHILD = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
signal.signal(signal.SIGINT, lambda number, _: told.append(number))
print("ready", file=sys.stderr, flush=True)
while not told:
    time.sleep(0.01)
time.sleep(0.6)  # longer than a parent of subprocess.run waits
print("saved after", told, file=sys.stderr, flush=True)
sys.exit(143)
"""
PARENT = f"""
import sys
from palimpsest.bench.command import printed
printed([sys.executable, "-c", {CHILD!r}])
"""


def start() -> subprocess.Popen[str]:
    """A script that runs a command, and the command at work; both in a process group of their own."""
    path = {"PYTHONPATH": str(ROOT / ".typing"), "PATH": ""}
    command = [sys.executable, "-c", PARENT]
    process = subprocess.Popen(command, env=path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    time.sleep(0.1)  # the parent has its handlers
    return process


def test_what_a_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".typing"))
    assert printed([sys.executable, "-c", "import os; print(os.getcwd())"]) == f"{ROOT}\n"
    assert palimpsest("train", "--help").startswith("usage: palimpsest train")


@pytest.mark.parametrize(("code", "ends"), [("raise SystemExit(2)", 2), ("import os; os.kill(os.getpid(), 15)", 143)])
def test_its_failure_is_the_end(code: str, ends: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        printed([sys.executable, "-c", code])
    assert caught.value.code == ends and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_script_waits_for_its_command(number: signal.Signals) -> None:
    with start() as process:
        if number == signal.SIGTERM:
            process.send_signal(number)  # as kill does
        else:
            os.killpg(process.pid, number)  # as a terminal does
        _, told = process.communicate(timeout=20)
    assert told == f"saved after [{int(number)}]\n" and process.returncode == 143

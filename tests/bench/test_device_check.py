"""The script that builds, tests and measures on a GPU, in the parts that a CPU can run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from palimpsest.bench import options

pytest.importorskip("triton", reason="triton is not installed")
SCRIPT = Path(options.__file__).with_name("device_check.sh")


def check(*arguments, **environment):
    changed = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=250, env=changed)


def test_one_section():
    done = check("--device", "cpu", "--tiny", "--only", "loss")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("missing: ")
    assert "loss.20.bfloat16.speed_vs_plain" in done.stdout
    assert last.split() == ["loss", last.split()[1], "s", "ok"]


def test_a_failing_section_does_not_hide_the_next_one():
    done = check("--device", "cpu", "--tiny", "--only", "prefill,loss")  # no model was made
    assert done.returncode == 1
    assert [line.split()[-2:] for line in done.stdout.splitlines()[-2:]] == [["failed", "(2)"], ["s", "ok"]]


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        ([], {"PYTHON": "/bin/false"}, "need a Python"),
        (["--device", "cpu"], {}, "cpu goes with --tiny"),
        (["--only", "nothing"], {}, "there are build tests kernels"),
        (["--only", ","], {}, "there are build tests kernels"),
        (["--device", "cpu", "--tiny", "--only", "decode_batches"], {}, "there are build tests kernels"),
        (["--fast"], {}, "unknown option --fast"),
    ],
)
def test_what_cannot_be_done_is_said_first(arguments, environment, reason):
    done = check(*arguments, **environment)
    assert done.returncode == 2
    assert reason in done.stdout + done.stderr

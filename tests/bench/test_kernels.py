"""The Triton kernels build for sm_80 and sm_90: no register spilled, matrix instructions where they count."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def compiled(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: here the kernels may be defined for the interpreter, which compiles nothing.
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "palimpsest", "bench", "kernels", "--compile-only", *options]
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, env=inherited | {"PYTHONPATH": path} | environment
    )


def judge(done: subprocess.CompletedProcess[str]) -> None:
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, (report["missed"], done.stderr)
    rows = report["rows"]
    assert {row["target"] for row in rows} == {"sm_80", "sm_90"}
    assert all(row["spill_bytes"] == 0 for row in rows)
    assert any(row["wgmma"] for row in rows if row["kernel"].startswith("attention prefill"))


def test_kernels_of_one_model() -> None:
    judge(compiled("--quick"))


@pytest.mark.slow
def test_kernels_of_all_models() -> None:
    judge(compiled())


def test_the_interpreter_is_refused() -> None:
    done = compiled(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in done.stderr

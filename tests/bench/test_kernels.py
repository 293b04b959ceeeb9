"""The Triton kernels build for sm_80 and sm_90: no register spilled, matrix instructions where they count; and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from palimpsest.bench import kernel_builds, kernels

triton = pytest.importorskip("triton", reason="triton is not installed")


def compiled(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: here the kernels may be defined for the interpreter, which compiles nothing.
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "palimpsest", "bench", "kernels", "--compile-only", *options]
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=inherited | {"PYTHONPATH": path} | environment
    )


def assert_compiled(done: subprocess.CompletedProcess[str]) -> None:
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, (report["missed"], done.stderr)
    rows = report["rows"]
    assert {row["target"] for row in rows} == {"sm_80", "sm_90"}
    assert all(row["spill_bytes"] == 0 for row in rows)
    assert any(row["wgmma"] for row in rows if row["kernel"].startswith("attention prefill"))


def test_kernels_of_one_model() -> None:
    done = compiled("--quick")
    assert_compiled(done)
    written = Path(kernels.__file__).with_name("kernels.md").read_text()
    if f"triton {triton.__version__};" in written:
        assert [line for line in done.stdout.splitlines()[:-1] if line not in written] == []


@pytest.mark.slow
def test_kernels_of_all_models() -> None:
    assert_compiled(compiled())


# What changes from step to step: numbers, and arrays that lie anywhere in a step's memory.
NUMBERS = {"rows", "spans", "table_stride"}
ARRAYS = {"query_start", "kv_length", "kv_start", "tables", "rows", "skipped", "positions", "slots"}


@pytest.mark.parametrize("shape", [kernel_builds.SHAPES[0], kernel_builds.HEADS[0]])
def test_no_step_has_a_kernel_built_anew(shape: kernel_builds.Shape) -> None:
    """The table's build is the one that is launched, whatever a step's numbers are and wherever its arrays lie."""
    for build in kernel_builds.builds(shape):
        told = getattr(build.kernel, "kwargs", None) or vars(build.kernel)  # the interpreter's, or Triton's own
        numbers, arrays = (set(told[name] or ()) for name in ("do_not_specialize", "do_not_specialize_on_alignment"))
        attends = {"tiles"} if build.name.startswith("attention") else set()
        of_step = NUMBERS | attends | ARRAYS
        changing = {name: build.types[name].startswith("*") for name in build.types if name in of_step}
        assert {name for name, is_array in changing.items() if is_array} == arrays, build.name
        assert {name for name, is_array in changing.items() if not is_array} == numbers, build.name


def test_the_interpreter_is_refused() -> None:
    done = compiled(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in done.stderr


def test_every_kernel_is_timed_beside_its_floor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from palimpsest.bench import kernel_cases

    monkeypatch.setattr(kernel_cases, "FlashInfer", lambda *_: lambda query, *_: query)  # as if it were installed
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert kernels.main(["--device", device, "--tiny", "--rounds", "1"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ("no GPU: times mean nothing" in report["machine"]["isa"]) == (device == "cpu")
    assert [row["work"] for row in report["rows"] if row["engine"] == "flashinfer"] == [
        *["attention decode"] * 2, "attention prefill"
    ]  # fmt: skip
    timed = {row["work"] for row in report["rows"]}
    assert {"linear", "attention decode", "attention prefill", "attention backward", "draw", "norm", "rotate"} <= timed
    for row in report["rows"]:
        assert row["seconds"] > 0 and row["floor_seconds"] > 0 and row["bytes_per_s"] > 0
        assert (row["torch_seconds"] is None) == (row["vs_torch"] is None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_options_that_cannot_be_met(capsys: pytest.CaptureFixture[str]) -> None:
    for options, reason in (
        ([], "no GPU"),
        (["--device", "cpu"], "--tiny"),
        (["--quick", "--tiny"], "--compile-only"),
        (["--rounds", "0"], "at least 1, not 0"),
        *(
            (["--compile-only", *ignored], "leave out")
            for ignored in (["--tiny"], ["--rounds", "2"], ["--device", "cpu"])
        ),
    ):
        assert kernels.main(options) == 2
        assert reason in capsys.readouterr().err

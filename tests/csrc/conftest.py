"""Fixtures for the kernel tests: each instruction set that this machine runs, fixed random numbers, thread counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

_C = pytest.importorskip("palimpsest._C", reason="the extension is not built")


def _available() -> list[str]:
    found = []
    for name in ("scalar", "avx2", "avx512", "avx512vnni"):
        try:
            found.append(_C.CpuKernels(name).isa)
        except ValueError:
            continue
    return found


@pytest.fixture(params=_available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once with the kernels of each instruction set."""
    monkeypatch.setattr("palimpsest.engine.cpu._kernels", _C.CpuKernels(request.param))
    return str(request.param)


@pytest.fixture
def on_each_isa(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], list[Tensor]]:
    """A function that computes the same thing with the kernels of every instruction set."""

    def compute(function: Callable[[], Tensor]) -> list[Tensor]:
        results = []
        for name in _available():
            monkeypatch.setattr("palimpsest.engine.cpu._kernels", _C.CpuKernels(name))
            results.append(function())
        return results

    return compute


@pytest.fixture(autouse=True)
def _fixed(fixed_numbers_and_threads: None) -> None:
    """For all kernel tests."""

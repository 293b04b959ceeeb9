"""The kernels run on the GPU where there is one, else on the CPU under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any of them is imported

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _fixed_numbers() -> None:
    torch.manual_seed(1)

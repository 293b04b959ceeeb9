"""Where the kernels run (see tests/conftest.py), and fixed random numbers."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(autouse=True)
def _fixed_numbers() -> None:
    torch.manual_seed(1)

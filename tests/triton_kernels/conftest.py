"""Where the kernels run (see tests/conftest.py), and fixed random numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _fixed_numbers() -> None:
    torch.manual_seed(1)

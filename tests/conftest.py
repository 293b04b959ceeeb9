"""Before any test: Triton's interpreter where there is no GPU, and one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, Triton's own at its import

torch.set_num_threads(1)  # the models are tiny; tests of threads say how many they want


@pytest.fixture
def fixed_numbers_and_threads() -> Iterator[None]:
    """The same random numbers in every test, and the number of threads as it was before."""
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

"""Before any test: Triton's interpreter where there is no GPU, and one thread."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, Triton's own at its import

torch.set_num_threads(1)  # the models are tiny; tests of threads say how many they want

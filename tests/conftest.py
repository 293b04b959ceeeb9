"""Before any test imports Triton: without a GPU its kernels run on the CPU, under its interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, Triton's own at its import

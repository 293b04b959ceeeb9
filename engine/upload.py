"""upload: numbers from the CPU to the device that computes with them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["upload"]


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on `device`, by a copy that nothing waits for; itself where that is the CPU.

    torch keeps pinned memory until the copy out of it is done.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)

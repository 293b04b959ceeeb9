"""Slab: memory in which tensors lie side by side on huge pages, however small each of them is.

A decode step reads all weights, and with pages of 4 KiB a core reads little more than half as fast. What torch.empty
gives below some megabytes comes from the heap, between what else lives there, where Linux makes few huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor

__all__ = ["Slab", "trim_heap"]

CHUNK_BYTES = 64 << 20  # of address space; only what is written becomes resident
ALIGNMENT = 64


class Slab:
    """Hands out memory for tensors; each is a storage of its own, and the last tensor of a chunk to go frees it."""

    def __init__(self) -> None:
        self._chunk, self._used = _chunk(0), 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A dense tensor [shape] on the CPU, not initialised."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        first = -(-self._used // ALIGNMENT) * ALIGNMENT
        if first + count * dtype.itemsize > len(self._chunk):
            self._chunk, first = _chunk(count * dtype.itemsize), 0
        self._used = first + count * dtype.itemsize
        return torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=first).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """A dense copy of a tensor."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _chunk(least: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(least, CHUNK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def trim_heap() -> None:
    """Give free memory of the heap back to the system, where the C library is glibc, which keeps what copies took."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)

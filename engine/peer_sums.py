"""PeerSums: sums over the ranks of a tensor-parallel model through each other's GPU memory (csrc/cuda/all_reduce.cu).

For ranks on one machine whose GPUs reach each other. An element is the sum in the order of the ranks, so the bits are
those of gathering all parts and adding them up, which takes its place where this cannot be. Never run on a GPU yet.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import cuda

__all__ = ["PeerSums", "connect"]

MOST_RANKS = 8
CAPACITY = 1 << 23  # numbers summed at once: 2048 tokens of 4096; a region takes three times their bytes
ONE_SHOT_BYTES = 256 << 10  # up to here every rank reads all parts: one barrier instead of two is worth more


class PeerSums:
    """regions: of each rank, as addresses that this one has mapped."""

    def __init__(self, rank: int, regions: Sequence[int]) -> None:
        self._rank, self._regions = rank, list(regions)

    def fits(self, x: Tensor) -> bool:
        """Whether a call takes x: float32 on the GPU, dense and aligned, a multiple of 4 numbers and not too many."""
        plain = x.dtype == torch.float32 and x.is_cuda and x.is_contiguous() and x.data_ptr() % 16 == 0
        return plain and x.numel() % 4 == 0 and 0 < x.numel() <= CAPACITY

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, of one shape, in the order of the ranks. `fits` must hold; all ranks call it."""
        out = torch.empty_like(x)
        two_shot = len(self._regions) > 2 and x.nbytes > ONE_SHOT_BYTES
        cuda.all_reduce(x, out, CAPACITY, self._regions, self._rank, two_shot=two_shot)
        return out


def connect(group: dist.ProcessGroup) -> PeerSums | str:
    """Map the ranks' memory into each other; all call it together. -> the same kind on all ranks: why not, if not."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    reason, own, handle = cuda.unavailable(), 0, b""
    if reason is None and size > MOST_RANKS:
        reason = f"there are {size} ranks, and at most {MOST_RANKS} are summed so"
    if reason is None:
        try:
            own, handle = cuda.peer_region(CAPACITY)
        except RuntimeError as error:
            reason = str(error)
    offers = _all(group, size, (reason, socket.gethostname(), handle))
    reason = next((why for why, _, _ in offers if why is not None), None)
    if reason is None and len({host for _, host, _ in offers}) > 1:
        reason = "the ranks are on several machines"
    if reason is not None:
        return reason
    regions = []
    try:
        regions = [own if other == rank else cuda.open_region(offers[other][2]) for other in range(size)]
    except RuntimeError as error:
        reason = str(error)
    reason = next((why for why in _all(group, size, reason) if why is not None), None)
    return PeerSums(rank, regions) if reason is None else reason


def _all(group: dist.ProcessGroup, size: int, value: object) -> list[Any]:
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values

"""ProcessGroup: the ranks that train one model together, and what they tell each other.

A process that is alone is a group of one rank, for which all of this is nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..engine.errors import ConfigError, RankError
from .rank_watch import RankWatch

__all__ = ["ProcessGroup"]

T = TypeVar("T")

BUCKET = 1 << 23  # numbers that travel at once


class ProcessGroup:
    """Ranks that work on different groups of a step (data parallel).

        with ProcessGroup.start() as process_group:
            trainer = Trainer(engine, config, process_group)

    Leaving the block by an error ends all ranks, each with a message that names this one and the error; so does a rank
    that is killed.

    rank, size: of this process, and of them all. main: whether this process is the one that writes what all know.
    local_size: processes on this machine, which share its memory and cores. tensor: of the ranks that hold parts of one
    model and so work on the same groups; None where each rank holds a whole one.
    """

    def __init__(self) -> None:
        """One rank; `start` makes more."""
        self.rank, self.size = 0, 1
        self.main, self.local_size = True, 1
        self.tensor: dist.ProcessGroup | None = None
        self._tensors: dist.ProcessGroup | None = None
        self._objects: dist.ProcessGroup | None = None
        self._watch: RankWatch | None = None

    @classmethod
    def start(cls, tensor: int = 1, timeout: float = 3600.0) -> ProcessGroup:
        """Join the ranks that torchrun started; a process that it did not start is alone.

        tensor: neighbouring ranks that hold one model together. timeout: longest time that a rank waits for another, in
        seconds; groups whose rollout takes longer than that of others need more. NCCL carries tensors where there is a
        GPU, gloo the rest. Raises ConfigError when the ranks do not divide by `tensor`, or lack what torchrun tells.
        """
        self = cls()
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if tensor < 1 or ranks % tensor:
            raise ConfigError(
                f"{ranks} ranks do not divide into models of {tensor} ranks each; start torchrun with "
                f"--nproc-per-node a multiple of {max(tensor, 1)}, or change `tensor`"
            )
        if ranks == 1:
            return self
        try:
            store, rank, _ = next(rendezvous("env://"))
        except ValueError as error:
            raise ConfigError(f"WORLD_SIZE is {ranks}, but {error}; start ranks with torchrun") from error
        limit = timedelta(seconds=timeout)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore("collectives", store),
            rank=rank,
            world_size=ranks,
            timeout=limit,
        )
        self._watch = RankWatch(PrefixStore("watch", store.clone()), rank, ranks)
        self.rank, self.size, self.main = rank // tensor, ranks // tensor, rank == 0
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        data = [list(range(first, ranks, tensor)) for first in range(tensor)]
        self._tensors = _subgroup(data, limit)
        self._objects = _subgroup(data, limit, "gloo")
        if tensor > 1:
            models = [list(range(first, first + tensor)) for first in range(0, ranks, tensor)]
            self.tensor = _subgroup(models, limit)
        return self

    def gather(self, value: T) -> list[T]:
        """What every rank has given, in the order of ranks, on all of them. Values that pickle can carry."""
        if self._objects is None:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with self._named():
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(own)]), self._objects)
            longest = int(max(sizes))
            found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(own)] = own
            dist.all_gather(found, padded, self._objects)
        return [pickle.loads(bytes(part[: int(size)].numpy())) for part, size in zip(found, sizes, strict=True)]

    @torch.no_grad()
    def reduce(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Add up the ranks' tensors, in place on the rank `owner`; on others they stay. bfloat16 is summed in float32.

        The same shapes and dtypes on all ranks.
        """
        if self._tensors is None:
            return
        for bucket in _buckets(tensors):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket])
            with self._named():
                dist.reduce(flat, group=self._tensors, group_dst=owner)
            if self.rank == owner:
                _unflatten(flat, bucket)

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Give the tensors of rank `owner` to all, in place."""
        if self._tensors is None:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._named():
                dist.broadcast(flat, group=self._tensors, group_src=owner)
            if self.rank != owner:
                _unflatten(flat, bucket)

    def check(self) -> None:
        """Raise RankError if another rank is known to have failed."""
        if self._watch is not None and self._watch.failure is not None:
            raise RankError(self._watch.failure)

    def fail(self, error: BaseException) -> None:
        """End all other ranks, as this one cannot go on with what they do together."""
        if self._watch is None or isinstance(error, RankError):
            return
        if not isinstance(error, RuntimeError) or self._watch.explain() is None:  # torch raises it for a lost rank
            self._watch.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the group in peace: wait until all ranks have come here."""
        if self._watch is None:
            return
        self.gather(None)
        self._watch.close()
        self.gather(None)  # the store may go with its first process, so only when nobody looks into it any more
        dist.destroy_process_group()
        self._watch = self._tensors = self._objects = self.tensor = None

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An error in here is that of another rank, as a rule; say whose."""
        try:
            yield
        except RuntimeError as error:
            reason = None if self._watch is None else self._watch.explain()
            raise RankError(reason or f"ranks could not exchange what they must: {error}") from error


def _subgroup(parts: list[list[int]], limit: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """That of `parts` which this process belongs to; every process must make them all."""
    groups: list[dist.ProcessGroup] = [dist.new_group(part, limit, backend) for part in parts]
    return next(group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, as many as make BUCKET numbers."""
    for _, same in itertools.groupby(tensors, key=lambda tensor: tensor.dtype):
        bucket, numbers = list[Tensor](), 0
        for tensor in same:
            if bucket and numbers + tensor.numel() > BUCKET:
                yield bucket
                bucket, numbers = [], 0
            bucket.append(tensor)
            numbers += tensor.numel()
        yield bucket


def _unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))

"""TensorParallel: a model over the ranks of a torch process group, for inference and training on the same shards.

Applied from outside to a model of one rank's shards (see shards.py): what the ranks' attention and MLP give is summed.
Every rank schedules, samples and trains by itself. That works since all that decides a step comes from the calls that
the engine got and from the tokens drawn, which are the same on every rank where the calls are. `agree` compares both
before whatever the ranks do together, and refuses what would leave one rank waiting for another.

Exactness: a sum over ranks is taken in their order, element by element, so it does not depend on the batch, and all
ranks have the same bits. The order of a ring all-reduce depends on the size of what is summed. On GPUs that reach each
other's memory one kernel makes the sum (peer_sums.py), else all parts are gathered and folded: the same bits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .errors import RequestError
from .model_config import ModelConfig
from .peer_sums import PeerSums, connect
from .shards import Shards

if TYPE_CHECKING:
    from .model import Decoder
    from .step import Step

__all__ = ["TensorParallel", "whole_parameters"]

T = TypeVar("T")

OCCASIONS = ("configuration", "step", "training pass", "update", "saving", "fingerprint", "decision")


class TensorParallel:
    """This rank's place in a group, and what the ranks do together. rank, size: in the group. shards: of the model."""

    def __init__(self, group: dist.ProcessGroup, config: ModelConfig) -> None:
        """config: of the whole model. Raises ConfigError for one that cannot be split over the group."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.shards = Shards(config, self.size)
        self._group = group
        on_gpu = dist.get_backend(group) == dist.Backend.NCCL
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._calls, self._history = 0, blake2b(digest_size=7)
        self._failed = False
        self._peers = self._connect() if on_gpu else None

    def apply(self, model: Decoder) -> None:
        """Make a model of this rank's shards a part of the whole."""
        model.parallel = self
        for layer in model.layers:
            for part in (layer.self_attn, layer.mlp):
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        return self.shards.cut(name, whole, self.rank)

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' x, in the order of the ranks."""
        if self._peers is not None and self._peers.fits(x):
            return self._peers(x)
        return _fold(self._gather(x))

    def _connect(self) -> PeerSums | None:
        """None, with a warning, where sums have to go through NCCL."""
        peers = connect(self._group)
        if isinstance(peers, PeerSums):
            return peers
        if self.rank == 0:
            warnings.warn(f"sums over ranks go through NCCL, which takes longer: {peers}", stacklevel=2)
        return None

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        self.agree("decision", b"")
        return int(self._gather(torch.tensor([number], device=self._device)).min())

    def lead(self, value: T) -> T:
        """Rank 0's value on all ranks, for what may differ between them, such as what depends on the time it takes.

        A value that pickle can carry.
        """
        self.agree("decision", b"")
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]

    def hash_of_all(self, digest: bytes) -> bytes:
        """sha256 of the ranks' digests, which are equally long, in order."""
        self.agree("fingerprint", b"")
        digests = self._gather(torch.tensor(list(digest), dtype=torch.uint8, device=self._device))
        return sha256(bytes(digests.flatten().tolist())).digest()

    def note(self, call: str, *values: object) -> None:
        """Enter a call that decides steps to come into what the ranks must agree on."""
        self._calls += 1
        for value in (call, *values):
            self._history.update(value if isinstance(value, bytes) else repr(value).encode())

    def agree(self, occasion: str, content: bytes) -> None:
        """Go on when all ranks are about to do the same, after the same calls. occasion: one of OCCASIONS.

        Raises RequestError on all ranks when they are not, and ever after. Content is compared by its hash.
        """
        if self._failed:
            raise RequestError(
                "the ranks of this tensor-parallel engine do different things, or this one left a step before its end; "
                "end all its processes and start them anew"
            )
        hashes = (self._history.digest(), blake2b(content, digest_size=7).digest())
        mine = [OCCASIONS.index(occasion), self._calls, *(int.from_bytes(digest, "big") for digest in hashes)]
        rows = self._gather(torch.tensor(mine, device=self._device)).tolist()
        for rank, row in enumerate(rows):
            if row != rows[0]:
                self._failed = True
                raise RequestError(_disagreement(rank, row, rows[0]))

    @contextmanager
    def together(self, occasion: str, content: bytes) -> Iterator[None]:
        """Agree, then run a block in which all ranks exchange numbers. Who leaves it early cannot exchange any more."""
        self.agree(occasion, content)
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def step(self, step: Step) -> AbstractContextManager[None]:
        """The block in which all ranks run the same step."""
        parts = [repr((step.copies, step.moves)).encode()]
        for span in step.spans:
            parts.append(repr((span.sequence.id, span.start, hash(span.pages), span.samples, span.source)).encode())
            parts += [span.ids.tobytes(), span.draft.tobytes(), span.scored_targets.tobytes()]
        return self.together("step", b"|".join(parts))

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Before an update: complete those gradients of which each rank has a part, see shards.py."""
        partial = {name: p for name, p in parameters.items() if self.shards.has_partial_gradient(name)}
        grads = {name: p.grad for name, p in partial.items() if p.grad is not None}
        if not grads:
            return
        gathered = self._gather(torch.cat([grad.flatten() for grad in grads.values()]))
        sizes = [grad.numel() for grad in grads.values()]
        for (name, grad), parts in zip(grads.items(), torch.split(gathered, sizes, dim=1), strict=True):
            copies = self.shards.copies(name)
            first = self.rank // copies * copies
            grad.copy_(_fold(parts[first : first + copies]).view_as(grad))

    def norm(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> float:
        """Of the whole model's gradient. Each part counts once: on the first of the ranks that hold it."""
        counted = [
            gradient
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None and self.rank % self.shards.copies(name) == 0
        ]
        square = nn.utils.get_total_norm(counted).double().square().to(self._device)
        return math.sqrt(float(self.sum(square)))

    def whole(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters on the CPU, gathered one by one on all ranks together; only rank 0 keeps them."""
        self.agree("saving", repr(list(parameters)).encode())
        found = {}
        for name, part in parameters.items():
            joined = self._join(name, part.detach())
            if self.rank == 0:
                found[name] = joined.to("cpu")
        return found

    def _join(self, name: str, part: Tensor) -> Tensor:
        if self.shards.copies(name) == self.size:
            return part
        return self.shards.join(name, list(self._gather(part)))

    def _gather(self, x: Tensor) -> Tensor:
        """[...] of each rank -> [size, ...]."""
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(out), x.contiguous(), group=self._group)
        return out

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        return _apply(_Enter, x, self), *others

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        return _apply(_Leave, out, self)


def whole_parameters(model: Decoder) -> dict[str, Tensor]:
    """A model's parameters by name, whole: those of `whole_config`. Of ranks that hold parts of it, all call this
    together, and only rank 0 gets them; the others nothing."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters if model.parallel is None else model.parallel.whole(parameters)


class _Enter(Function):
    """The same rows on every rank; their gradient is the sum of what the ranks make of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.sum(grad), None


class _Leave(Function):
    """The sum of the ranks' rows; each of them gets its whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel) -> Tensor:
        return parallel.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _apply(function: type[Function], x: Tensor, parallel: TensorParallel) -> Tensor:
    result: Tensor = function.apply(x, parallel)  # type: ignore[no-untyped-call]
    return result


def _fold(parts: Tensor) -> Tensor:
    """[ranks, ...] -> [...], summed in order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _disagreement(rank: int, theirs: list[int], first: list[int]) -> str:
    if theirs[1] != first[1] or theirs[2] != first[2]:
        what = f"rank {rank} was given other requests than rank 0 ({theirs[1]} calls, rank 0 had {first[1]})"
    elif theirs[0] != first[0]:
        what = f"rank {rank} is at a {OCCASIONS[theirs[0]]}, rank 0 at a {OCCASIONS[first[0]]}"
    else:
        what = f"the {OCCASIONS[first[0]]} of rank {rank} differs from that of rank 0"
    return (
        f"{what}; the ranks of a tensor-parallel engine must make the same calls in the same order, with the same "
        "arguments, seeds and configuration"
    )

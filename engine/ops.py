"""Every op of the decoder once: its signature, its shape contract, and the choice of the backend that runs it.

A backend has functions of these names: `reference` (plain torch, the specification), `cpu` (C++ kernels) and
`triton_ops` (Triton and CUDA C++ kernels, on a GPU); `autograd` joins the last two to their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from . import cpu, cpu_backward, cuda, reference
from .autograd import Differentiable
from .draw import Draw, Drawn
from .errors import ConfigError
from .packed_weight import PackedWeight

__all__ = ["Attend", "Ops", "Spans", "Turn", "on_gpu", "require_kinds", "select"]

GPU_WEIGHTS = ("native", "int8", "fp8")
FLOAT8_CAPABILITY = (8, 9)
INSTEAD_OF_FLOAT8 = {"weights": "int8", "kv_dtype": "bfloat16"}


@dataclass(frozen=True)
class Spans:
    """Which rows of a ragged batch belong to which sequence, and where each sequence's keys and values lie.

    query_start: int32 [spans + 1]; rows query_start[i] .. query_start[i + 1] belong to span i.
    kv_length: int32 [spans]; tokens of the sequence up to and including the span's last row.
    pages: int32 [spans, most pages]; page numbers in order, the unused rest of a row is 0.
    A row of span i stands at position kv_length[i] - (query_start[i + 1] - row) and sees positions up to its own.
    """

    query_start: Tensor
    kv_length: Tensor
    pages: Tensor


# The functions rms_norm and rotate of a backend.
Kernels = tuple[Callable[[Tensor, Tensor, float], Tensor], Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]


@dataclass(frozen=True)
class Turn:
    """What heads go through before they attend: the model's norm, if it has one, then the angle of their position.

    positions: int64 [T]. cos, sin: float32 tables [window, head_dim / 2] of every position's angles.
    query_norm, key_norm: [head_dim], of RMSNorm over each head; both or none. eps: of it.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0

    def __call__(self, heads: Tensor, weight: Tensor | None, kernels: Kernels) -> Tensor:
        """[T, heads, head_dim], normed and turned by kernels that do one or the other. weight: one of the norms."""
        rms_norm, rotate = kernels
        heads = heads if weight is None else rms_norm(heads, weight, self.eps)
        return rotate(heads, self.positions, self.cos, self.sin)


# The attending half of Ops.attend: query, key pages, value pages, spans, scale.
Attend = Callable[[Tensor, Tensor, Tensor, Spans, float], Tensor]


class Ops(Protocol):
    """What the decoder asks of a backend. T rows of tokens; x is float32 (float64 with float64 parameters).

    backend: "cpu" or "triton" where their kernels run, else "reference". device: where parameters and pages must lie.
    exact: whether a row's bits depend on nothing but the row. loss: the functions of rl/fused_loss.py: token_scores and
    the gradients of it and of linear.
    """

    backend: str
    device: torch.device
    exact: bool
    loss: Any

    def embedding(self, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """int64 [T], [vocabulary, hidden] -> [T, hidden] of `dtype`, the activations' type."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in], [out, in], [out] -> [T, out] = x W^T + b, accumulated in x's dtype."""

    def quantised_linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """[T, in], packed [out, in], [out] -> [T, out] = r(x) W^T + b, where r rounds x to int8.

        Per row and group of 32 columns (the last one filled up with zeros): values = x * (127 / m) to the nearest
        whole number, ties to even, with m = max |x|, 0 where m < 1e-30; their scale is m / 127. The products of a group
        are summed as whole numbers, dot = sum values * (code - zero). An output is the sum over rising groups of
        dot * (scale of x * scale of W), each followed, where W has minima, by (sum of values * scale of x) * minimum;
        then the bias. Every other operation is rounded to x's dtype, one by one.
        """

    def scaled_linear(self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in], int8 or float8_e4m3fn [out, in], float32 [out], [out] -> [T, out] = b(x) (codes * scales)^T + bias.

        b rounds x to bfloat16, which holds every code exactly. On a GPU, and in plain torch.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., n], [n] -> x / sqrt(mean(x^2) + eps) * weight over the last axis (RMSNorm, arXiv 1910.07467, eq. 4)."""

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """[T, n] twice, [n] -> x + added, and its rms_norm: the residual stream and what the next sublayer reads."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, turn: Turn, key_pages: Tensor, value_pages: Tensor,
        slots: Tensor, spans: Spans, scale: float,
    ) -> Tensor:  # fmt: skip
        """Norm and turn queries and keys, write the rows' keys and values to their slots, attend over the spans' pages.

        query [T, heads, head_dim], key and value [T, kv_heads, head_dim], pages [pages, kv_heads, page_size, columns]
        twice, slots int64 [T] -> [T, heads, head_dim]. Halves of a head are paired as (i, i + head_dim / 2) (RoFormer,
        arXiv 2104.09864, eq. 34, in the layout of Llama checkpoints). slot = page * page_size + offset; writing casts
        to the pages' dtype, or rounds to int8 or e4m3 (kv_rows.py says how and what `columns` is).
        softmax(scale q k^T) v (arXiv 1706.03762, eq. 1), causal; query head h reads kv head
        h // (heads / kv_heads). With gradients, spans may read only slots that this batch writes, and 8 bits
        are refused.
        """

    def move_kv(
        self, key_pages: Tensor, value_pages: Tensor, sources: Tensor, targets: Tensor, old: Tensor, new: Tensor,
        cos: Tensor, sin: Tensor,
    ) -> None:  # fmt: skip
        """Copy KV between slots of one layer, keys as they are at their new positions (rotary.turn_keys).

        sources, targets: int64 [N], no slot in both. old, new: int64 [N], positions. Not for pages of 8 bits.
        """

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """[T, n] twice -> gate * sigmoid(gate) * up (SwiGLU, arXiv 2002.05202, eq. 6)."""

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[R, vocabulary] -> [R], the logarithm of the sum of exponentials of each row."""

    def draw(self, logits: Tensor, rows: Sequence[Draw]) -> list[Drawn]:
        """[R, vocabulary], one Draw per row -> a token of each row, as draw.py defines it. Without gradient."""


OP_NAMES = tuple(name for name in vars(Ops) if not name.startswith("_"))


class _Selected:
    """One function per op."""

    def __init__(self, backend: str, functions: Any, loss: Any, device: torch.device, *, exact: bool) -> None:
        self.backend, self.device, self.exact, self.loss = backend, device, exact, loss
        self.__dict__.update({name: getattr(functions, name) for name in OP_NAMES})


def require_kinds(backend: str, weights: str, kv_dtype: str | None) -> None:
    """Refuse what an engine's kernels do not take, before its model is read. The arguments are those of EngineConfig.

    Raises ConfigError.
    """
    gpu = on_gpu(backend)
    if gpu and weights not in GPU_WEIGHTS:
        raise ConfigError(
            f"backend='triton' does not run weights={weights!r}; use {', '.join(map(repr, GPU_WEIGHTS))}, or "
            "backend='cpu'"
        )
    for name, value in (("weights", weights), ("kv_dtype", kv_dtype)):
        if value != "fp8" or backend == "reference":
            continue
        instead = f"{name}={INSTEAD_OF_FLOAT8[name]!r}"
        if not gpu:
            raise ConfigError(f"{name}='fp8' is for NVIDIA GPUs, and this engine has none; use {instead}")
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
            raise ConfigError(
                f"{name}='fp8' needs compute capability 8.9 (Ada) or later, and {torch.cuda.get_device_name()} has "
                f"{'.'.join(map(str, torch.cuda.get_device_capability()))}; use {instead}"
            )


def on_gpu(backend: str) -> bool:
    """Whether an engine with this EngineConfig.backend runs on a GPU."""
    return backend == "triton" or (backend == "auto" and torch.cuda.is_available())


def select(
    backend: str, parameters: torch.dtype, pages: torch.dtype, head_dim: int, group: int, attention: str = "auto",
    *, exact: bool = False,
) -> Ops:  # fmt: skip
    """Choose the function of every op for a model.

    backend: "reference", "cpu", "triton", or "auto": triton on a machine with a GPU, else cpu where it can, reference
    for the rest. parameters, pages: element types of the model and its KV. head_dim: size of a head. group: query heads
    per key head. attention, exact: of EngineConfig.
    Raises ConfigError when "cpu" or "triton" was asked for and cannot run here, or not such a model, and for attention
    or exactness that the backend does not have.
    """
    cpu_only = torch.device("cpu")
    if on_gpu(backend):
        return _triton(parameters, pages, head_dim, group, attention, exact)
    if attention != "auto":
        raise ConfigError(
            f"attention={attention!r} chooses kernels of a GPU, and this engine has none; leave it 'auto'"
        )
    reason = cpu.unavailable(parameters, pages, head_dim, group)
    if backend == "cpu" and reason is not None:
        raise ConfigError(f"backend='cpu' cannot run here: {reason}; use backend='reference' or 'auto'")
    if backend == "reference" or reason is not None:
        if exact:
            raise ConfigError(
                "exact=True, but plain torch (backend='reference') gives a row other bits in other company; use "
                f"backend='cpu'{'' if reason is None else f', which cannot run here: {reason}'}"
            )
        return _Selected("reference", reference, reference, cpu_only, exact=False)  # type: ignore[return-value]
    functions = Differentiable(cpu, cpu_backward)
    return _Selected("cpu", functions, cpu_backward, cpu_only, exact=True)  # type: ignore[return-value]


def _triton(parameters: torch.dtype, pages: torch.dtype, head_dim: int, group: int, attention: str, exact: bool) -> Ops:
    try:
        from . import triton_backward, triton_ops
    except ImportError as error:
        raise ConfigError(
            f"backend='triton' needs the package triton ({error}): pip install 'palimpsest-rl[triton]', or use "
            "backend='cpu'"
        ) from error
    device = triton_ops.device()
    for what, dtype, known in (
        ("parameters", parameters, triton_ops.DTYPES),
        ("KV pages", pages, triton_ops.KV_DTYPES),
    ):
        if dtype not in known:
            names = ", ".join(str(one).removeprefix("torch.") for one in known)
            raise ConfigError(f"backend='triton' takes {what} of {names}, not {dtype}; choose one of them")
    unfit = cuda.unfit_for_decode(pages, head_dim, group) if attention == "cuda" else None
    if unfit is not None:
        raise ConfigError(f"attention='cuda' takes {unfit}, or attention='auto' or 'triton'")
    attend = None
    if attention in ("flashinfer", "reference"):
        if exact:
            raise ConfigError(
                f"attention={attention!r} gives a row other bits in other company, which exact=True rules out; use "
                "attention='triton', or exact=False"
            )
        attend = reference.paged_attention if attention == "reference" else _flashinfer(pages, head_dim, device)
    functions = Differentiable(triton_ops.TritonKernels(attention, exact=exact, attend=attend), triton_backward)
    return _Selected("triton", functions, triton_backward, device, exact=exact)  # type: ignore[return-value]


def _flashinfer(pages: torch.dtype, head_dim: int, device: torch.device) -> Attend:
    from .flashinfer import FlashInfer

    return FlashInfer(pages, head_dim, device)

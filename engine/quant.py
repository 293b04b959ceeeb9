"""Weight-only quantisation, applied from outside to a finished model. For inference only.

Kinds: "int8" has one scale per row; "int8-gN" and "int4-gN" one per N = 32, 64 or 128 neighbours on the `in` axis;
"int4" is "int4-g32". Embedding, norms and biases stay as they are. Activations are rounded to int8 per row and group of
32 (`ops.quantised_linear`). A GPU reads "int8" and "fp8" (e4m3, one scale per row) as scaled_weight.py has them, and
keeps activations in bfloat16 (`ops.scaled_linear`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import EMBEDDING, HEAD
from .config import QUANTISED
from .errors import CheckpointError, ConfigError
from .model import Decoder, Linear
from .model_config import ModelConfig
from .ops import Ops, require_kinds
from .packed_weight import PackedWeight
from .scaled_weight import ScaledWeight

__all__ = [
    "HEAD_KIND",
    "QuantisedLinear",
    "ScaledLinear",
    "packed_kind",
    "quantise",
    "quantise_weight",
    "refill",
    "replace_weights",
    "round_weight",
]

HEAD_KIND = "int8-g32"
KINDS = (*QUANTISED, "fp8")
RANGES = {8: (-127, 127), 4: (-8, 7)}  # of codes, by bits
INT4_ENDS = (-8.0, -7.2, -9.0)
BLOCK = 1 << 20  # weights rounded at once: bounds the temporaries


class QuantisedLinear(nn.Module):
    """y = x W^T (+ b) with a packed W."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, ops: Ops) -> None:
        super().__init__()
        self.weight, self.bias, self.ops = weight, bias, ops
        for name in ("values", "scales", "minima"):  # so that they are part of the model's state
            self.register_buffer(name, getattr(weight, name))

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self.ops.quantised_linear(x, self.weight, self.bias)


class ScaledLinear(nn.Module):
    """y = x W^T (+ b) with 8-bit codes and a scale per row."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: ScaledWeight, bias: Tensor | None, ops: Ops) -> None:
        super().__init__()
        self.bias, self.ops = bias, ops
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self.ops.scaled_linear(x, self.codes, self.scales, self.bias)


def quantise(model: Decoder, kind: str) -> None:
    """Round the weights of all linear layers to `kind`, layer by layer, and let go of the originals.

    The head is rounded to HEAD_KIND with the int4 kinds; a tied head gets a packed copy of the embedding.
    Raises ConfigError for an unknown kind and for one that the model's kernels do not take, CheckpointError for weights
    that are not finite.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no kind of weights {kind!r} to quantise to; choose from {', '.join(KINDS)}")
    require_kinds(model.ops.backend, kind, None)
    for name in _linear_names(model):
        chosen = packed_kind(name, model.config, kind)
        if chosen is not None:
            replace_weights(model, {name: round_weight(model.get_parameter(name), chosen)})


def packed_kind(name: str, config: ModelConfig, weights: str) -> str | None:
    """What a parameter is rounded to with EngineConfig.weights = `weights`; None when it stays as it is."""
    if weights not in KINDS:
        return None
    if name == HEAD or (name == EMBEDDING and config.tie_embeddings):
        return HEAD_KIND if weights.startswith("int4") else weights
    return weights if name.endswith("_proj.weight") else None


def replace_weights(model: Decoder, packed: Mapping[str, PackedWeight | ScaledWeight]) -> None:
    """Put packed weights in the place of those of linear layers, by their checkpoint names.

    That of the embedding becomes the head of a model whose head is tied. Raises CheckpointError for other names.
    """
    names = _linear_names(model)
    for name, weight in packed.items():
        if name not in names:
            raise CheckpointError(f"{name!r} is no weight of a linear layer of this model; leave it out")
        path = "lm_head" if name == EMBEDDING else name.removesuffix(".weight")
        parent = model.get_submodule(path.rpartition(".")[0])
        old = getattr(parent, path.rpartition(".")[2])
        bias = None if old is None else old.bias
        if isinstance(weight, PackedWeight) and model.ops.backend == "triton":
            weight = ScaledWeight.of_packed(weight)
        setattr(parent, path.rpartition(".")[2], _linear(weight, bias, model.ops))


@torch.no_grad()
def refill(layer: QuantisedLinear | ScaledLinear, weight: Tensor, kind: str) -> None:
    """Give a layer other weights, [out, in], rounded to its kind, in place. Raises CheckpointError for weights that are
    not finite."""
    new = round_weight(weight, kind)
    if isinstance(layer, ScaledLinear) and isinstance(new, PackedWeight):
        new = ScaledWeight.of_packed(new)
    for name, buffer in layer.named_buffers():
        buffer.copy_(getattr(new, name))


def _linear(weight: PackedWeight | ScaledWeight, bias: Tensor | None, ops: Ops) -> QuantisedLinear | ScaledLinear:
    return ScaledLinear(weight, bias, ops) if isinstance(weight, ScaledWeight) else QuantisedLinear(weight, bias, ops)


def _linear_names(model: Decoder) -> list[str]:
    """The checkpoint's names of the linear layers' weights; the embedding when it is the head too."""
    names = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Linear)]
    return [*names, EMBEDDING] if model.lm_head is None else names


def round_weight(weight: Tensor, kind: str) -> PackedWeight | ScaledWeight:
    """Round [out, in] to a kind of EngineConfig.weights. Raises CheckpointError for weights that are not finite."""
    return ScaledWeight.float8(weight) if kind == "fp8" else quantise_weight(weight, kind)


def quantise_weight(weight: Tensor, kind: str) -> PackedWeight:
    """Round [out, in] to whole numbers with float16 scales. Raises CheckpointError for weights that are not finite.

    8 bits: scale = largest magnitude of the group / 127. 4 bits: the value of largest magnitude stands near one end of
    the codes, -8 as in llama.cpp's Q4_0 or a little off; of some such scales, each refitted to its codes by least
    squares, the one of least squared error is taken.
    """
    bits, group = _bits_and_group(kind)
    size = group or weight.shape[1]
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(len(weight), -(-weight.shape[1] // size), dtype=torch.float16)
    some = max(1, BLOCK // weight.shape[1])
    for first in range(0, len(weight), some):
        rows = slice(first, first + some)
        codes[rows], scales[rows] = _round_rows(weight[rows], bits, size)
    return PackedWeight.pack(codes, scales, None, bits, group)


def _round_rows(weight: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, in] and scales [rows, groups] of some rows."""
    columns = weight.shape[1]
    groups = F.pad(weight.float(), (0, -columns % size)).view(len(weight), -1, size)
    scales = _int8_scales(groups) if bits == 8 else _int4_scales(groups)
    codes = _round(groups, scales, RANGES[bits]) + (1 << (bits - 1))
    return codes.flatten(1)[:, :columns], scales.squeeze(2)


def _int8_scales(groups: Tensor) -> Tensor:
    return _finite(groups.abs().amax(dim=2, keepdim=True) / RANGES[8][1])


def _int4_scales(groups: Tensor) -> Tensor:
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    tries = torch.stack([_refit(groups, _finite(extreme / end)) for end in INT4_ENDS])
    errors = [(_round(groups, scales, RANGES[4]) * scales - groups).square().sum(2, keepdim=True) for scales in tries]
    return tries.gather(0, torch.stack(errors).argmin(dim=0, keepdim=True))[0]


def _refit(groups: Tensor, scales: Tensor) -> Tensor:
    """The scale of least squared error for the codes that `scales` gives."""
    codes = _round(groups, scales, RANGES[4])
    squares = codes.square().sum(dim=2, keepdim=True).clamp(min=1)
    return _finite((groups * codes).sum(dim=2, keepdim=True) / squares)


def _bits_and_group(kind: str) -> tuple[int, int]:
    name, _, group = kind.partition("-g")
    bits = int(name.removeprefix("int"))
    return bits, int(group) if group else {8: 0, 4: 32}[bits]


def _finite(scales: Tensor) -> Tensor:
    halves = scales.half()
    if not halves.isfinite().all():
        raise CheckpointError(
            "a weight is not finite, or too large to be quantised; load the model with native weights"
        )
    return halves


def _round(groups: Tensor, scales: Tensor, limits: tuple[int, int]) -> Tensor:
    """The nearest codes within the limits, as float32; 0 where the scale is 0."""
    wide = scales.float()
    return torch.where(wide != 0, groups / wide, 0).round_().clamp_(*limits)

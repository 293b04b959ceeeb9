"""LoRA: low-rank adapters put onto the linear layers of a finished model, trained and rolled out without merging.

y = x W^T + b + (alpha / rank) (x A^T) B^T, A drawn at random, B = 0 at first (LoRA, arXiv 2106.09685, section 4.1). The
parameters of the model keep their names and storage. On disk: the layout of the library PEFT.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .checkpoint import new_folder, read_json, write_json
from .config import _require, _require_int, _require_number, _tuple
from .errors import CheckpointError, ConfigError
from .model import Decoder, Linear
from .model_config import parameter_shapes
from .quant import QuantisedLinear, ScaledLinear, refill
from .tensor_files import find_tensors, read_header

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["LoraConfig", "LoraLinear", "adapters", "add", "disabled", "load", "merge", "restore", "save"]

LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MATRICES = ("lora_A", "lora_B")
# What PEFT can put into an adapter_config.json that changes what the adapter computes, and the values that do not.
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
}


@dataclass(frozen=True)
class LoraConfig:
    """rank: of the update of each layer. alpha: it is scaled by alpha / rank. targets: which linear layers of every
    decoder layer get one. seed: of the initial A."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = LINEAR_NAMES
    seed: int = 0

    def __post_init__(self) -> None:
        _require_int("LoraConfig", "rank", self.rank, 1)
        _require_number("LoraConfig", "alpha", self.alpha, 0.0, 1e6, open_low=True)
        _require_int("LoraConfig", "seed", self.seed, 0)
        object.__setattr__(self, "targets", _tuple("LoraConfig", "targets", self.targets))
        allowed = ", ".join(LINEAR_NAMES)
        _require(bool(self.targets), f"LoraConfig.targets must name at least one of {allowed}")
        for target in self.targets:
            _require(target in LINEAR_NAMES, f"LoraConfig.targets must be among {allowed}, got {target!r}")


class LoraLinear(Linear):
    """A linear layer with an adapter. lora_A: [rank, in]; lora_B: [out, rank], in the type of the activations."""

    def __init__(self, base: Linear, config: LoraConfig, first: Tensor) -> None:
        """Takes over the parameters of `base`. first: A at first, [rank, in]."""
        nn.Module.__init__(self)
        self.ops, self.weight, self.bias = base.ops, base.weight, base.bias
        zeros = torch.zeros(len(base.weight), config.rank, dtype=first.dtype)
        self.lora_A = nn.Parameter(first, requires_grad=False)
        self.lora_B = nn.Parameter(zeros, requires_grad=False)
        self.scale = config.alpha / config.rank
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]; each row by itself, as in every op."""
        out = super().forward(x)
        if not self.enabled:
            return out
        low = self.ops.linear(x, self.lora_A, None) * self.scale
        return out + self.ops.linear(low, self.lora_B, None)


def trained_parameters(model: Decoder) -> dict[str, nn.Parameter]:
    """Those that training changes, by name: of the adapters, if there are any, else all. They want gradients from now
    on."""
    only_adapters = bool(adapters(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not only_adapters or "lora_" in name)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapters(model: Decoder) -> dict[str, LoraLinear]:
    """The model's adapters by the name of their layer; none without LoRA."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def add(engine: Engine, config: LoraConfig) -> None:
    """Put fresh adapters onto an engine's model: what it computes stays the same until they are trained.

    Raises ConfigError if the model has adapters, RequestError as Engine.update does.
    """
    model = engine.model
    if adapters(model):
        raise ConfigError("this engine's model has LoRA adapters already; make another engine for others")
    generator = torch.Generator().manual_seed(config.seed)
    shapes = parameter_shapes(model.whole_config)
    with engine.update():
        for path, module in _targets(model, config):
            assert isinstance(module, Linear), "an update is of native weights"
            # Drawn for the whole layer on every rank that has a part of it, so that all draw the same.
            first = _first(config.rank, shapes[f"{path}.weight"][1], model.activation_dtype, generator)
            if model.parallel is not None:
                first = model.parallel.cut(f"{path}.lora_A", first)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LoraLinear(module, config, first))


def _targets(model: Decoder, config: LoraConfig) -> list[tuple[str, Linear | QuantisedLinear | ScaledLinear]]:
    """The layers that get an adapter, by name, in the order of the forward pass."""
    kinds = (Linear, QuantisedLinear, ScaledLinear)
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]
    return [(path, module) for path, module in linears if path.rpartition(".")[2] in config.targets]


def _first(rank: int, inputs: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    bound = 1 / math.sqrt(inputs)  # as PEFT draws it: Kaiming's uniform with a = sqrt(5)
    return torch.empty(rank, inputs, dtype=dtype).uniform_(-bound, bound, generator=generator)


@contextlib.contextmanager
def disabled(model: Decoder) -> Iterator[None]:
    """Inside the block the model computes as if it had no adapters."""
    layers = adapters(model).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def save(model: Decoder, folder: str | Path, base: str | Path | None = None, dtype: torch.dtype | None = None) -> None:
    """Write the adapters to a new folder that PEFT and `load` read. base: what PEFT is to call the model below. dtype:
    of the file, the adapters' own by default.

    Ranks that hold parts of the model all call this together, and only the first of them writes.
    Raises ConfigError for a model without adapters, CheckpointError when the folder cannot be written.
    """
    layers = adapters(model)
    if not layers:
        raise ConfigError("this model has no LoRA adapters to save; put some on with lora.add")
    rank, scale = _form(layers)
    found = {f"{name}.{part}": getattr(layer, part).detach() for name, layer in layers.items() for part in MATRICES}
    if model.parallel is not None:
        found = model.parallel.whole(found)
        if model.parallel.rank != 0:
            return
    tensors = {f"{PREFIX}{name}.weight": tensor.to(dtype).contiguous() for name, tensor in found.items()}
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(Path(folder), sum(tensor.nbytes for tensor in tensors.values())) as place:
        write_json(place / CONFIG_FILE, values)
        save_file(tensors, place / TENSOR_FILE, metadata={"format": "pt"})


def load(engine: Engine, folder: str | Path) -> None:
    """Put the adapters of a PEFT folder onto an engine's model.

    Raises CheckpointError for files that are absent, damaged, of another model, or of a kind of adapter that is not
    plain LoRA; otherwise as `add` does.
    """
    place = Path(folder)
    config = _read_config(place)
    tensors = _read_all(place, _shapes(engine.model, config))
    add(engine, config)
    with engine.update():
        _fill(engine.model, tensors)


def merge(engine: Engine, folder: str | Path) -> None:
    """Add the adapters of a PEFT folder to an engine's weights: W + (alpha / rank) B A, in float64, rounded once to the
    engine's dtype. Quantised weights are made anew: those of the checkpoint, merged in that way, then quantised.

    The model keeps no adapter and decodes as fast as before. Raises as `load` does, and ConfigError for an engine with
    weights="file" or weights that are split over ranks.
    """
    model, kind = engine.model, engine.config.weights
    if kind == "file" or model.parallel is not None:
        raise ConfigError(
            f"adapters are merged into whole weights; this engine has weights={kind!r} over "
            f"{1 if model.parallel is None else model.parallel.size} ranks; use another kind of weights on one rank"
        )
    place = Path(folder)
    config = _read_config(place)
    tensors = _read_all(place, _shapes(model, config))
    if adapters(model):
        raise ConfigError("this engine's model has LoRA adapters already; make another engine to merge others")
    stored = {} if kind == "native" else find_tensors(engine.tokenizer_folder)
    with engine.exchange(), torch.no_grad():
        for path, layer in _targets(model, config):
            first, second = (tensors[f"{PREFIX}{path}.{part}.weight"] for part in MATRICES)
            change = (config.alpha / config.rank) * (second @ first)
            if isinstance(layer, Linear):
                layer.weight.copy_(layer.weight.double() + change.to(layer.weight.device))
            else:
                weight = stored[f"{path}.weight"].read(getattr(torch, engine.config.dtype))
                refill(layer, (weight.double() + change).to(weight.dtype), kind)


def restore(model: Decoder, folder: str | Path) -> None:
    """Give the adapters that are on a model the values of a PEFT folder. The engine's weights must be being updated.

    Raises CheckpointError as `load` does, and for adapters of another rank, scale or place.
    """
    place = Path(folder)
    config = _read_config(place)
    layers = adapters(model)
    rank, scale = _form(layers)
    targets = {name.rpartition(".")[2] for name in layers}
    same = (config.rank, set(config.targets)) == (rank, targets) and math.isclose(config.alpha / config.rank, scale)
    if not same:
        raise CheckpointError(
            f"{place} has adapters of rank {config.rank} and alpha {config.alpha:g} on {', '.join(config.targets)}, "
            f"the model has some of rank {rank} and alpha {scale * rank:g} on {', '.join(sorted(targets))}; use the "
            "same LoraConfig"
        )
    _fill(model, _read_all(place, _shapes(model, config)))


def _form(layers: Mapping[str, LoraLinear]) -> tuple[int, float]:
    some = next(iter(layers.values()))
    return len(some.lora_A), some.scale


def _shapes(model: Decoder, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a PEFT folder holds for adapters of this form on the model."""
    whole = parameter_shapes(model.whole_config)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, _ in _targets(model, config):
        outputs, inputs = whole[f"{path}.weight"]
        shapes[f"{PREFIX}{path}.lora_A.weight"] = (config.rank, inputs)
        shapes[f"{PREFIX}{path}.lora_B.weight"] = (outputs, config.rank)
    return shapes


@torch.no_grad()
def _fill(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    for name, layer in adapters(model).items():
        for part in MATRICES:
            tensor = tensors[f"{PREFIX}{name}.{part}.weight"]
            tensor = tensor if model.parallel is None else model.parallel.cut(f"{name}.{part}", tensor)
            getattr(layer, part).copy_(tensor)


def _read_config(place: Path) -> LoraConfig:
    file = place / CONFIG_FILE
    values = read_json(file)
    for key, plain in PLAIN.items():
        if key in values and values[key] not in plain:
            raise CheckpointError(f"{file} has {key}={values[key]!r}; only plain LoRA adapters are supported")
    try:
        return LoraConfig(rank=values["r"], alpha=values["lora_alpha"], targets=tuple(values["target_modules"]))
    except (KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{file} describes no adapter for this model ({error})") from error


def _read_all(place: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    stored = read_header(place / TENSOR_FILE)
    for name in sorted(stored.keys() ^ shapes.keys()):
        what = "is missing" if name in shapes else "fits no layer of this model"
        raise CheckpointError(
            f"tensor {name!r} of {place / TENSOR_FILE} {what}; load it onto the model it was made for"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"tensor {name!r} of {place / TENSOR_FILE} has shape {stored[name].shape}, the model asks for {shape}; "
                "load it onto its own model"
            )
    return {name: stored[name].read(torch.float64) for name in shapes}

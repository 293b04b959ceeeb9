"""Checkpoint: a model's configuration and parameters, loaded from a Hugging Face folder or GGUF file, and saved."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from .errors import CheckpointError, ConfigError
from .json_fields import parse_object
from .model_config import ModelConfig, parameter_shapes
from .packed_weight import PackedWeight
from .parallel import TensorParallel
from .scaled_weight import ScaledWeight
from .slab import Slab, trim_heap
from .tensor_files import StoredTensor, find_tensors, write_tensors

__all__ = [
    "EMBEDDING",
    "HEAD",
    "Checkpoint",
    "flush",
    "load",
    "new_folder",
    "read_json",
    "restore",
    "save",
    "write_json",
]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model.

    parameters: Hugging Face name -> tensor, each in writable storage of its own; exactly `parameter_shapes(config)`,
    but for the weights of linear layers that are in `packed` instead (a tied embedding is in both).
    folder: the Hugging Face folder that holds the tokenizer's files. source: the path as it was given.
    parallel: where the parameters are this rank's part of those of `config`.
    """

    config: ModelConfig
    parameters: dict[str, Tensor]
    packed: dict[str, PackedWeight | ScaledWeight]
    folder: Path
    source: Path
    parallel: TensorParallel | None = None


def load(
    path: str | Path, dtype: torch.dtype, weights: str = "native", group: dist.ProcessGroup | None = None
) -> Checkpoint:
    """Load a Hugging Face folder, or a .gguf file through its converted folder, with parameters of `dtype`.

    weights: how linear layers keep theirs, see EngineConfig. At most one tensor is held twice, and none when the file's
    type is `dtype`; one that is packed is let go before the next is read.
    group: split the model over these ranks, in native weights; each keeps its part of a tensor and reads the next.
    Raises CheckpointError, naming the file or tensor, for anything missing, superfluous, mis-shaped or damaged, and
    ConfigError for weights="file" of a folder, and for what cannot be split.
    """
    from .quant import packed_kind, round_weight  # here, since it imports this module

    source = Path(path)
    if source.is_file():
        from .gguf import converted_folder  # here, since it imports this module to write the folder

        folder = converted_folder(source)
    elif source.is_dir():
        folder = source
    else:
        raise CheckpointError(f"{source} does not exist; give a Hugging Face model folder or a .gguf file")
    config = ModelConfig.from_hf(read_json(folder / "config.json"))
    parallel = None if group is None else TensorParallel(group, config)
    stored = find_tensors(folder)
    shapes = parameter_shapes(config)
    _check_names(folder, config, stored, shapes)
    slab = Slab()
    of_file = _packed_weights(source, config) if weights == "file" else {}
    packed: dict[str, PackedWeight | ScaledWeight] = {name: one.moved(slab.copy) for name, one in of_file.items()}
    parameters = {}
    for name, shape in shapes.items():
        if name in packed and name != EMBEDDING:
            continue
        kind = packed_kind(name, config, weights)
        stays = kind is None or name == EMBEDDING
        tensor = _read(stored[name], shape, dtype, slab if stays and parallel is None else Slab())
        if parallel is not None:
            tensor = slab.copy(parallel.cut(name, tensor))
        if kind is not None:
            packed[name] = round_weight(tensor, kind).moved(slab.copy)
            trim_heap()
        if stays:
            parameters[name] = tensor
    if config.tie_embeddings and HEAD in stored:
        _check_tied(stored[HEAD], parameters[EMBEDDING])
    return Checkpoint(config, parameters, packed, folder, source, parallel)


def _packed_weights(source: Path, config: ModelConfig) -> dict[str, PackedWeight]:
    """The weights that a GGUF file stores as integers, exactly as it stores them; see gguf.packed_weights."""
    if not source.is_file():
        raise ConfigError(
            f"weights='file' takes the integers of a GGUF file, but {source} is a folder; "
            "choose weights='int8' or another kind to quantise its weights"
        )
    from .gguf import packed_weights  # here, since it imports this module

    return packed_weights(source, config)


def save(
    folder: str | Path, config: ModelConfig, parameters: Mapping[str, Tensor], tokenizer_folder: str | Path
) -> None:
    """Write a Hugging Face folder that `transformers` and `load` read back bit for bit, in the parameters' own dtype.

    tokenizer_folder: where the tokenizer's files, generation_config.json and the special ids of config.json come from.
    The folder appears complete or not at all. Raises CheckpointError when it exists and is not empty, when it cannot be
    written, or when the parameters are not those of `config`.
    """
    shapes = parameter_shapes(config)
    for name in sorted(shapes.keys() ^ parameters.keys()):
        what = "is missing" if name in shapes else "does not belong to this configuration"
        raise CheckpointError(f"parameter {name!r} {what}; save exactly the names of parameter_shapes(config)")
    dtype = parameters[EMBEDDING].dtype
    for name, shape in shapes.items():
        given = parameters[name]
        if (tuple(given.shape), given.dtype) != (shape, dtype):
            raise CheckpointError(
                f"parameter {name!r} is {given.dtype} {tuple(given.shape)}; it must be {dtype} {shape}: "
                "save the parameters of one model in one dtype"
            )
    origin = Path(tokenizer_folder)
    special = _special_ids(origin)
    size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with new_folder(Path(folder), size) as place:
        write_json(place / "config.json", config.to_hf() | special | {"torch_dtype": str(dtype).removeprefix("torch.")})
        write_tensors(place, shapes, dtype, parameters.__getitem__)
        for name in COPIED:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, place / name)
        if not (place / "generation_config.json").exists():
            write_json(place / "generation_config.json", special)


def restore(parameters: Mapping[str, Tensor], folder: Path, parallel: TensorParallel | None = None) -> None:
    """Give a model's parameters, in place, the values of a folder that `save` wrote of a model of the same shapes.

    parallel: where the parameters are a rank's part of that model.
    Raises CheckpointError for other names or shapes and for damaged files.
    """
    stored = find_tensors(folder)
    for name in sorted(stored.keys() ^ parameters.keys()):
        what = "is missing in" if name in parameters else "is no parameter of this model, but in"
        raise CheckpointError(f"tensor {name!r} {what} {folder}; give the model that was saved")
    shapes = {} if parallel is None else parameter_shapes(parallel.shards.config)
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = _read(stored[name], shapes.get(name, tuple(parameter.shape)), parameter.dtype, Slab())
            parameter.copy_(tensor if parallel is None else parallel.cut(name, tensor))


@contextlib.contextmanager
def new_folder(target: Path, size: int) -> Iterator[Path]:
    """A folder to fill with some `size` bytes, which becomes `target` when the block ends well, else vanishes.

    Its content is on disk before it gets its name. Of several that are filled at once the first to end gets the name.
    Raises CheckpointError when `target` exists and is not empty, and when it cannot be written or the disk is too full.
    """
    _require_free(target)
    with contextlib.ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(target.parent).free
            if free < size:
                raise OSError(f"only {free} bytes are free")
            # The outer folder is for us alone, the inner one has the access rights that a folder here usually has.
            outer = tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
            stack.callback(shutil.rmtree, outer, ignore_errors=True)
            place = Path(outer, target.name)
            place.mkdir()
            yield place
            for file in (*place.iterdir(), place):
                flush(file)
            _require_free(target)
            _rename(place, target)
            flush(target.parent)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{target} cannot be written ({error}); it takes some {size} bytes: make room, or choose another place"
            ) from error


def _rename(place: Path, target: Path) -> None:
    try:
        place.rename(target)
    except OSError:
        _require_free(target)  # somebody else was faster
        raise


def _require_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder; name a new one, or remove it first")


def flush(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError when it is absent or damaged."""
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is absent; give a Hugging Face model folder or a .gguf file") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy or download it again") from error
    return parse_object(content, str(file), "copy or download it again")


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write an object as JSON text."""
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _special_ids(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    values = read_json(file) if file.is_file() else {}
    return {key: values[key] for key in TOKEN_IDS if values.get(key) is not None}


def _check_names(
    folder: Path, config: ModelConfig, stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for name in shapes:
        if name not in stored:
            hint = (
                " (if its embeddings are tied, set tie_word_embeddings to true in config.json)" if name == HEAD else ""
            )
            raise CheckpointError(f"tensor {name!r} is missing in {folder}; copy or download the folder again{hint}")
    for name in stored:
        # Buffers that old versions of transformers saved; the model computes them itself.
        harmless = name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tie_embeddings)
        if name not in shapes and not harmless:
            raise CheckpointError(
                f"tensor {name!r} in {stored[name].file} is no part of a {config.model_type} model of this shape; "
                "check that weights and config.json belong together"
            )


def _read(tensor: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype, slab: Slab) -> Tensor:
    if tensor.shape != shape:
        raise CheckpointError(
            f"tensor {tensor.name!r} in {tensor.file} has shape {tensor.shape}, config.json asks for {shape}; "
            "check that weights and config.json belong together"
        )
    return tensor.read(dtype, slab)


def _check_tied(head: StoredTensor, embedding: Tensor) -> None:
    """A head stored beside a tied embedding must be that embedding, or a choice would be made silently."""
    if not torch.equal(_read(head, tuple(embedding.shape), embedding.dtype, Slab()), embedding):
        raise CheckpointError(
            f"{head.file} has a {HEAD!r} that differs from {EMBEDDING!r}, but config.json says that they are tied; "
            "set tie_word_embeddings to false in config.json if the head is its own"
        )

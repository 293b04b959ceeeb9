"""Tensor files: the safetensors of a folder, read into storage of our own and written in shards.

Reading does not map the file: parameters are trained in place and must outlive the file, and resident memory must
not hold the model twice. Format: https://huggingface.co/docs/safetensors (8 bytes little-endian length, JSON, data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError

__all__ = ["StoredTensor", "find_tensors", "write_tensors"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
AGAIN = "copy or download the file again"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `length` bytes from `offset` of `file`; `kind` is its type in the format ("BF16")."""

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def read(self, dtype: torch.dtype) -> Tensor:
        """The tensor [shape] as `dtype`, in fresh writable memory.

        Raises CheckpointError for element types other than F64, F32, F16 and BF16 and for a file that ends early.
        """
        if self.kind not in DTYPES:
            raise CheckpointError(
                f"tensor {self.name!r} in {self.file} has element type {self.kind}; supported are {', '.join(DTYPES)}: "
                "use the unquantised model"
            )
        tensor = torch.empty(self.shape, dtype=DTYPES[self.kind])
        if tensor.nbytes != self.length:
            raise CheckpointError(
                f"tensor {self.name!r} in {self.file} has {self.length} bytes, not {tensor.nbytes}; {AGAIN}"
            )
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            read = stream.readinto(tensor.view(-1).view(torch.uint8).numpy().data)
        if read != self.length:
            raise CheckpointError(f"{self.file} is truncated inside tensor {self.name!r}; {AGAIN}")
        return tensor.to(dtype)


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's model.safetensors, or of the shards that model.safetensors.index.json names.

    Raises CheckpointError, naming the file, when one is absent, truncated or damaged, or when there are only pickles.
    """
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise CheckpointError(_nothing_found(folder))
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged ({error!r}); {AGAIN}") from error
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(f"shard {name} of {folder / INDEX} is absent; download it")
        tensors |= _read_header(folder / name)
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != Path(file).name:
            raise CheckpointError(f"tensor {name!r} is not in {folder / file}, where {INDEX} puts it; {AGAIN}")
    return tensors


def _nothing_found(folder: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds its weights as pickles only ({pickles[0]}), which can run code; convert it once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}; give a Hugging Face model folder or a .gguf file"


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} is truncated or no safetensors file ({size} bytes); {AGAIN}")
        header = stream.read(length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _stored(name, file, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of {file} is damaged ({error!r}); {AGAIN}") from error
    for tensor in tensors.values():
        if tensor.offset + tensor.length > size:
            raise CheckpointError(
                f"{file} is truncated: tensor {tensor.name!r} ends after the file's {size} bytes; {AGAIN}"
            )
    return tensors


def _stored(name: str, file: Path, entry: Mapping[str, Any], start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensor_of: Callable[[str], Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors of `dtype` as safetensors: one file up to `shard_bytes`, else shards and their index.

    tensor_of: gives the tensor of a name; it is asked shard by shard, so at most one shard is in memory beyond it.
    """
    shards: list[list[str]] = [[]]
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        places |= dict.fromkeys(names, file)
        tensors = {name: tensor_of(name).detach().to("cpu", dtype).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

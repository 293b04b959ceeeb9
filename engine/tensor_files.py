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

import torch
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError
from .json_fields import Fields, parse_object
from .slab import Slab

__all__ = ["StoredTensor", "find_tensors", "read_header", "write_tensors"]

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

    def read(self, dtype: torch.dtype | None = None, slab: Slab | None = None) -> Tensor:
        """The tensor [shape] as `dtype`, by default its own, in fresh writable memory, of `slab` if one is given.

        Raises CheckpointError for element types other than F64, F32, F16 and BF16 and for a file that ends early.
        """
        if self.kind not in DTYPES:
            raise CheckpointError(
                f"tensor {self.name!r} in {self.file} has element type {self.kind}; supported are {', '.join(DTYPES)}: "
                "use the unquantised model"
            )
        kind = DTYPES[self.kind]
        needed = math.prod(self.shape) * kind.itemsize
        if needed != self.length:
            raise CheckpointError(f"tensor {self.name!r} in {self.file} has {self.length} bytes, not {needed}; {AGAIN}")
        if dtype is not None and dtype != kind:
            # What is read only to be converted goes back to the system, not into a heap that keeps it.
            stored = self.read(slab=Slab())
            return stored.to(dtype) if slab is None else slab.empty(self.shape, dtype).copy_(stored)
        tensor = torch.empty(self.shape, dtype=kind) if slab is None else slab.empty(self.shape, kind)
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.offset)
                read = stream.readinto(tensor.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise CheckpointError(f"tensor {self.name!r} in {self.file} cannot be read ({error}); {AGAIN}") from error
        if read != self.length:
            raise CheckpointError(f"{self.file} is truncated inside tensor {self.name!r}; {AGAIN}")
        return tensor


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's model.safetensors, or of the shards that model.safetensors.index.json names.

    Raises CheckpointError, naming the file, when one is absent, truncated or damaged, or when there are only pickles.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise CheckpointError(_nothing_found(folder))
    index = Fields(parse_object(_content(folder / INDEX), str(folder / INDEX), AGAIN), str(folder / INDEX), AGAIN)
    weights = index.part("weight_map")
    places = {name: weights.text(name) for name in weights.values}
    present = {file.name for file in folder.iterdir() if file.is_file()}
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(places.values())):
        if shard not in present:
            raise CheckpointError(f"shard {shard!r} of {folder / INDEX} is absent; download it")
        tensors |= read_header(folder / shard)
    for name, shard in places.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"tensor {name!r} is not in {folder / shard}, where {INDEX} puts it; {AGAIN}")
    return tensors


def _content(file: Path, size: int = -1, start: int = 0) -> bytes:
    """At most `size` bytes of a file from `start`; all by default."""
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            return stream.read(size)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); {AGAIN}") from error


def _nothing_found(folder: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds its weights as pickles only ({pickles[0]}), which can run code; convert it once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}; give a Hugging Face model folder or a .gguf file"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, which must lie one after the other and fill it, as the format asks."""
    size = file.stat().st_size
    length = int.from_bytes(_content(file, 8), "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"{file} is truncated or no safetensors file ({size} bytes); {AGAIN}")
    entries = parse_object(_content(file, length, 8), f"the header of {file}", AGAIN)
    entries.pop("__metadata__", None)
    tensors = {name: _stored(name, file, entry, 8 + length) for name, entry in entries.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.length)):
        if tensor.offset + tensor.length > size:
            raise CheckpointError(
                f"{file} is truncated: tensor {tensor.name!r} ends after the file's {size} bytes; {AGAIN}"
            )
        if tensor.offset != end:
            raise CheckpointError(
                f"{file} is damaged: tensor {tensor.name!r} starts at byte {tensor.offset}, not at {end}, where the "
                f"one before it ends; {AGAIN}"
            )
        end += tensor.length
    if end != size:
        raise CheckpointError(f"{file} is damaged: its tensors end at byte {end} of {size}; {AGAIN}")
    return tensors


def _stored(name: str, file: Path, entry: object, start: int) -> StoredTensor:
    fields = Fields(entry, f"the header of {file} for tensor {name!r}", AGAIN)
    offsets = fields.integers("data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fields.failure(f"'data_offsets' in {fields.place} must be a begin and an end, got {offsets[:3]!r}")
    begin, end = offsets
    return StoredTensor(name, file, fields.text("dtype"), tuple(fields.integers("shape")), start + begin, end - begin)


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

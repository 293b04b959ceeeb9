"""GGUF -> Hugging Face folder, converted once and kept beside the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor, dequantize
from torch import Tensor

from .checkpoint import EMBEDDING, new_folder, write_json
from .errors import CheckpointError
from .gguf_file import read_gguf
from .gguf_tokenizer import tokenizer_files
from .json_fields import Fields
from .model_config import LARGEST_SIZE, ModelConfig, parameter_shapes
from .packed_weight import PackedWeight
from .quant import quantise_weight
from .rope_scaling import LARGEST_WINDOW, ORIGINAL
from .tensor_files import write_tensors

__all__ = ["converted_folder", "packed_weights"]

CONVERTER = 1  # raise it when the converted files change
STAMP = "gguf.json"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
FLOATS = ("F32", "F16", "BF16")
BLOCKS = {"Q8_0": (2, 8), "Q4_0": (2, 4), "Q4_1": (4, 4)}  # bytes before the codes of a block, bits of a code
TYPES = (*FLOATS, *BLOCKS, "Q4_K", "Q6_K")
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}


def converted_folder(file: Path) -> Path:
    """The Hugging Face folder of a GGUF file, with float32 parameters; made at the first call, found at later ones.

    It is FILE.gguf.converted beside the file or, where that cannot be written, in $XDG_CACHE_HOME/palimpsest
    (~/.cache/palimpsest). It is made again when the file's size or time of change differ. It takes 4 bytes for each
    parameter and stays there: 28 GB for a model of 7 billion; a UserWarning says so when it is made.
    Raises CheckpointError, naming the key, tensor or type, for a file that is damaged or not supported, and when the
    folder cannot be written.
    """
    status = file.stat()
    stamp = {"converter": CONVERTER, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    place = file.with_name(f"{file.name}.converted")
    if _is_current(place, stamp):
        return place
    if not os.access(file.parent, os.W_OK):
        place = _cache_folder(file)
        if _is_current(place, stamp):
            return place
    model = _Model(file)
    _remove_old(place, stamp)
    try:
        with new_folder(place, model.size) as folder:
            warnings.warn(
                f"{file.name} is converted once; the copy {place} takes {model.size / 1e9:.1f} GB, and is yours to "
                "remove",
                stacklevel=2,
            )
            model.write(folder)
            write_json(folder / STAMP, stamp)
    except CheckpointError:
        if not _is_current(place, stamp):  # another thread or process may have been faster
            raise
    return place


def packed_weights(file: Path, config: ModelConfig) -> dict[str, PackedWeight]:
    """Hugging Face name -> packed weight of each linear layer (and tied head) that a GGUF file stores as integers.

    Blocks of Q8_0, Q4_0 and Q4_1 are taken exactly as they are. Q4_K and Q6_K, which our kernels do not read, are
    rounded to int8-g32, which is finer than either. Matrices of floats are left out.
    """
    _, tensors = read_gguf(file)
    packed = {}
    for name, shape in parameter_shapes(config).items():
        tensor = tensors[_gguf_name(name)]
        is_linear = len(shape) == 2 and (name != EMBEDDING or config.tie_embeddings)
        if not is_linear or tensor.tensor_type.name in FLOATS:
            continue
        if tensor.tensor_type.name in BLOCKS:
            blocks = _hf_rows(name, torch.from_numpy(np.array(tensor.data)), config)
            packed[name] = _pack_blocks(blocks, tensor.tensor_type.name, shape[1])
        else:
            packed[name] = quantise_weight(_values(name, tensor, config), "int8-g32")
    return packed


def _pack_blocks(rows: Tensor, kind: str, columns: int) -> PackedWeight:
    """uint8 [out, bytes of a row]: blocks of 32 values, each a float16 scale, for Q4_1 a float16 minimum, the codes."""
    header, bits = BLOCKS[kind]
    blocks = rows.view(len(rows), columns // 32, -1)
    numbers = blocks[..., :header].contiguous().view(torch.float16)
    codes = blocks[..., header:]
    if bits == 4:  # the first 16 values in the low halves
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    else:
        codes = codes ^ 128  # from signed
    minima = numbers[..., 1] if header == 4 else None
    return PackedWeight.pack(codes.flatten(1), numbers[..., 0], minima, bits, 32)


def _is_current(place: Path, stamp: Mapping[str, int]) -> bool:
    try:
        return bool(json.loads((place / STAMP).read_bytes()) == stamp)
    except (OSError, ValueError):
        return False


def _remove_old(place: Path, stamp: Mapping[str, int]) -> None:
    """Remove our own folder of an older file or converter: renamed first, so that nobody meets half of it."""
    if not (place / STAMP).is_file():
        return
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", suffix=".old", dir=place.parent) as old:
        if not _is_current(place, stamp):  # another thread or process may have made it meanwhile
            with contextlib.suppress(FileNotFoundError):
                place.rename(Path(old, place.name))


def _cache_folder(file: Path) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    return root / "palimpsest" / f"{file.name}-{key}.converted"


class _Model:
    """A GGUF file, read and checked. size: bytes of its float32 parameters."""

    def __init__(self, file: Path) -> None:
        metadata, self._tensors = read_gguf(file)
        fields = Fields(metadata, f"the metadata of {file}", "use another file of this model")
        self._config = _config(fields, self._tensors)
        self._shapes = parameter_shapes(self._config)
        self._names = {name: _gguf_name(name) for name in self._shapes}
        _check(self._tensors, self._names, self._shapes)
        self._tokenizer = tokenizer_files(fields)
        self.size = 4 * sum(math.prod(shape) for shape in self._shapes.values())

    def write(self, folder: Path) -> None:
        """Write the files of a Hugging Face folder."""
        definition, settings, generation = self._tokenizer
        write_json(folder / "config.json", self._config.to_hf() | generation | {"torch_dtype": "float32"})
        (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
        write_json(folder / "tokenizer_config.json", settings)
        write_json(folder / "generation_config.json", generation)
        write_tensors(folder, self._shapes, torch.float32, self._parameter)

    def _parameter(self, name: str) -> Tensor:
        return _values(name, self._tensors[self._names[name]], self._config)


def _gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem, _, ending = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{INNER[layer[2]]}.{ending}" if layer else f"{OUTER[stem]}.{ending}"


def _config(given: Fields, tensors: Mapping[str, ReaderTensor]) -> ModelConfig:
    kind = given.text("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(f"GGUF architecture {kind!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if given.integer("split.count", 1) > 1:
        raise CheckpointError(
            "a GGUF model split over several files is not supported; merge it with llama-gguf-split --merge"
        )

    def size(key: str, default: int | None = None) -> int:
        return given.integer(f"{kind}.{key}", default, low=1, high=LARGEST_SIZE)

    experts = given.integer(f"{kind}.expert_count", 0)
    if experts:
        raise CheckpointError(f"{kind}.expert_count={experts}: mixture of experts is not supported; use a dense model")
    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if size(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{kind}.{key}={size(key)} differs from the head size {head_dim}; this is not supported"
            )
    embedding = tensors.get("token_embd.weight")
    theta = _shortest(given.number(f"{kind}.rope.freq_base", 10000.0, low=1.0, high=1e15, open_low=True))
    values = {
        "model_type": kind,
        "vocab_size": 1 if embedding is None else int(embedding.shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(given.number(f"{kind}.attention.layer_norm_rms_epsilon", low=0.0, high=1.0)),
        "rope_theta": theta,
        "max_position_embeddings": size("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    scaling = _rope_scaling(given, kind) or _llama3_scaling(tensors, theta, head_dim)
    return ModelConfig.from_hf(values | {"rope_scaling": scaling})


def _shortest(value: float) -> float:
    """The decimal number that was rounded to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(given: Fields, kind: str) -> dict[str, Any] | None:
    prefix = f"{kind}.rope.scaling."
    scaling = given.text(f"{prefix}type", "none")
    if scaling == "none":
        return None
    known = ("type", "finetuned", "factor", "original_context_length")
    for key in given.values:
        if key.startswith(prefix) and key.removeprefix(prefix) not in known:
            raise CheckpointError(f"GGUF key {key} is not supported; known are {', '.join(known)}: use another file")
    values: dict[str, Any] = {"rope_type": scaling}
    if f"{prefix}factor" in given.values:
        values["factor"] = _shortest(given.number(f"{prefix}factor", low=1.0, high=LARGEST_WINDOW))
    if scaling != "linear" and f"{prefix}original_context_length" in given.values:
        values[ORIGINAL] = given.integer(f"{prefix}original_context_length", low=1, high=LARGEST_WINDOW)
    return values


def _llama3_scaling(tensors: Mapping[str, ReaderTensor], theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaling, which GGUF files carry as a tensor of divisors, one per pair of dimensions.

    All published Llama 3.1 to 3.3 models share LLAMA3; the factor is the largest divisor. Others are refused.
    """
    if ROPE_FACTORS not in tensors:
        return None
    stored = np.asarray(tensors[ROPE_FACTORS].data, dtype=np.float64)
    if stored.shape == (head_dim // 2,) and np.isfinite(stored).all():
        factor = round(float(stored.max()), 3)  # float32 divisions left 8.000001
        low, high, original = LLAMA3.values()
        wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        if factor >= 1.0 and np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise CheckpointError(
        f"GGUF tensor {ROPE_FACTORS} is not Llama 3's rope scaling; use the Hugging Face folder instead"
    )


def _check(
    tensors: Mapping[str, ReaderTensor], names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for name in (*names.values(), *tensors):
        if name not in tensors:
            raise CheckpointError(f"GGUF tensor {name!r} is missing; copy or download the file again")
        if name not in names.values() and name != ROPE_FACTORS:
            raise CheckpointError(
                f"GGUF tensor {name!r} is not part of a dense model of this architecture; use another file"
            )
        sort = tensors[name].tensor_type
        if sort.name not in TYPES:
            raise CheckpointError(f"GGUF tensor {name!r} has type {sort.name}; supported are {', '.join(TYPES)}")
    for ours, name in names.items():
        shape = tuple(int(size) for size in reversed(tensors[name].shape))
        if shape != shapes[ours]:
            raise CheckpointError(f"GGUF tensor {name!r} has shape {shape}, the metadata asks for {shapes[ours]}")


def _values(name: str, tensor: ReaderTensor, config: ModelConfig) -> Tensor:
    """The float32 values of a tensor, in Hugging Face order of rows."""
    kind = GGMLQuantizationType(tensor.tensor_type)
    return _hf_rows(name, torch.from_numpy(np.array(dequantize(tensor.data, kind), dtype=np.float32)), config)


def _hf_rows(name: str, rows: Tensor, config: ModelConfig) -> Tensor:
    """The rows of a tensor, or of its blocks, in Hugging Face order."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if config.model_type == "llama" and heads is not None:
        # llama.cpp turns neighbouring rows (2i, 2i + 1) and has interleaved the two halves of each head for it.
        pairs = rows.view(heads, config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)
    return rows

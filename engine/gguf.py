"""GGUF -> Hugging Face folder, converted once and kept beside the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from torch import Tensor

from .checkpoint import new_folder, read_json, write_json
from .errors import CheckpointError
from .gguf_tokenizer import tokenizer_files
from .model_config import ModelConfig, parameter_shapes
from .tensor_files import write_tensors

__all__ = ["converted_folder"]

CONVERTER = 1  # raise it when the converted files change
STAMP = "gguf.json"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
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
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def converted_folder(file: Path) -> Path:
    """The Hugging Face folder of a GGUF file, with float32 parameters; made at the first call, found at later ones.

    It is FILE.gguf.converted beside the file or, where that cannot be written, in $XDG_CACHE_HOME/palimpsest
    (~/.cache/palimpsest). It is made again when the file's size or time of change differ.
    Raises CheckpointError, naming the key, tensor or type, for a file that is damaged or not supported.
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
    reader = _open(file)
    if (place / STAMP).is_file():
        shutil.rmtree(place)  # our own, of an older file or converter
    try:
        with new_folder(place) as folder:
            _convert(reader, folder)
            write_json(folder / STAMP, stamp)
    except CheckpointError:
        if not _is_current(place, stamp):  # another process may have been faster
            raise
    return place


def _is_current(place: Path, stamp: Mapping[str, int]) -> bool:
    return (place / STAMP).is_file() and read_json(place / STAMP) == stamp


def _cache_folder(file: Path) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    return root / "palimpsest" / f"{file.name}-{key}.converted"


def _open(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or no GGUF file ({error}); copy or download it again") from error


def _convert(reader: GGUFReader, folder: Path) -> None:
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tensors)
    shapes = parameter_shapes(config)
    names = {name: _gguf_name(name) for name in shapes}
    _check(tensors, names, shapes)
    definition, settings, generation = tokenizer_files(metadata)
    special = {key: generation[key] for key in ("eos_token_id",) if key in generation}
    write_json(folder / "config.json", config.to_hf() | special | {"torch_dtype": "float32"})
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", generation)
    write_tensors(folder, shapes, torch.float32, lambda name: _parameter(name, tensors[names[name]], config))


def _gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem, _, ending = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{INNER[layer[2]]}.{ending}" if layer else f"{OUTER[stem]}.{ending}"


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> ModelConfig:
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(f"GGUF architecture {kind!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            "a GGUF model split over several files is not supported; merge it with llama-gguf-split --merge"
        )

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{key}", default)
        if value is None:
            raise CheckpointError(f"the GGUF file has no {kind}.{key!s}; use another file of this model")
        return value

    if read("expert_count", 0):
        raise CheckpointError(f"{kind}.expert_count={read('expert_count')}: mixture of experts is not supported")
    heads, hidden = read("attention.head_count"), read("embedding_length")
    head_dim = read("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if read(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{kind}.{key}={read(key)} differs from the head size {head_dim}; this is not supported"
            )
    values = {
        "model_type": kind,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 1,
        "hidden_size": hidden,
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(read("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(read("rope.freq_base", 10000.0)),
        "max_position_embeddings": read("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    scaling = _rope_scaling(metadata, str(kind)) or _llama3_scaling(tensors, values["rope_theta"], head_dim)
    return ModelConfig.from_hf(values | {"rope_scaling": scaling})


def _shortest(value: float) -> float:
    """The decimal number that was rounded to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(metadata: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    prefix = f"{kind}.rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    scaling = given.pop("type", "none")
    given.pop("finetuned", None)
    if scaling == "none":
        return None
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    for key in given:
        if key not in names:
            raise CheckpointError(f"GGUF key {prefix}{key} is not supported; known are type, {', '.join(names)}")
    if scaling == "linear":
        given.pop("original_context_length", None)
    numbers = {names[key]: _shortest(value) if key == "factor" else value for key, value in given.items()}
    return {"rope_type": scaling, **numbers}


def _llama3_scaling(tensors: Mapping[str, ReaderTensor], theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaling, which GGUF files carry as a tensor of divisors, one per pair of dimensions.

    All published Llama 3.1 to 3.3 models share LLAMA3; the factor is the largest divisor. Others are refused.
    """
    if ROPE_FACTORS not in tensors:
        return None
    stored = np.asarray(tensors[ROPE_FACTORS].data, dtype=np.float64)
    factor = round(float(stored.max()), 3)  # float32 divisions left 8.000001
    low, high, original = LLAMA3.values()
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    if stored.shape != smooth.shape or not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise CheckpointError(
            f"GGUF tensor {ROPE_FACTORS} is not Llama 3's rope scaling; use the Hugging Face folder instead"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


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


def _parameter(name: str, tensor: ReaderTensor, config: ModelConfig) -> Tensor:
    """The float32 values of a tensor, in Hugging Face order of rows."""
    kind = GGMLQuantizationType(tensor.tensor_type)
    values = torch.from_numpy(np.array(dequantize(tensor.data, kind), dtype=np.float32))
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if config.model_type == "llama" and heads is not None:
        # llama.cpp turns neighbouring rows (2i, 2i + 1) and has interleaved the two halves of each head for it.
        pairs = values.view(heads, config.head_dim // 2, 2, *values.shape[1:])
        values = pairs.transpose(1, 2).reshape(values.shape)
    return values

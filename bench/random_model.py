"""A model of a published shape with random weights: what its speed needs, without a download."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..engine import checkpoint
from ..engine.defaults import embedded_model_path
from ..engine.gguf import converted_folder
from ..engine.model_config import ModelConfig, parameter_shapes

__all__ = ["RANDOM_MODELS", "random_model"]

# Names that --model takes -> the shape of https://huggingface.co/Qwen/Qwen2.5-0.5B (config.json).
RANDOM_MODELS = {
    "qwen2.5-0.5b-random": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }
}
DEVIATION = 0.02  # of the weights: small enough for activations of the usual size


@contextmanager
def random_model(name: str) -> Iterator[str]:
    """A temporary Hugging Face folder with bfloat16 weights (1 GB for 0.5B) and the embedded model's tokenizer."""
    config = ModelConfig.from_hf(RANDOM_MODELS[name])
    generator = torch.Generator().manual_seed(0)
    parameters = {
        key: torch.empty(shape, dtype=torch.bfloat16).normal_(float("norm" in key), DEVIATION, generator=generator)
        for key, shape in parameter_shapes(config).items()
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, name)
        checkpoint.save(folder, config, parameters, converted_folder(embedded_model_path()))
        parameters.clear()
        yield str(folder)

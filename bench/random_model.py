"""A model of a published shape with random weights: what its speed needs, without a download."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from ..engine import checkpoint
from ..engine.defaults import embedded_model_path
from ..engine.errors import CheckpointError
from ..engine.gguf import converted_folder
from ..engine.model_config import ModelConfig, parameter_shapes
from ..engine.tokenizer import Tokenizer

__all__ = ["RANDOM_MODELS", "main", "random_model", "write_random_model"]

# Names that --model takes -> the shapes of https://huggingface.co/Qwen/Qwen2.5-0.5B and -7B (config.json), and one of
# the same kind that Triton's interpreter can run.
RANDOM_MODELS: dict[str, dict[str, Any]] = {
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
RANDOM_MODELS["qwen2.5-7b-random"] = RANDOM_MODELS["qwen2.5-0.5b-random"] | {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
RANDOM_MODELS["tiny-random"] = RANDOM_MODELS["qwen2.5-0.5b-random"] | {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DEVIATION = 0.02  # of the weights: small enough for activations of the usual size
DRAWN = 4_194_301  # numbers; all weights repeat them. A prime, so that no two rows of a weight are alike
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a model that several benchmarks then share; -> exit code."""
    parser = argparse.ArgumentParser(description="Write a model with random weights.", allow_abbrev=False)
    parser.add_argument("name", choices=RANDOM_MODELS)
    parser.add_argument("folder", type=Path, help="where to; not there yet, or empty")
    options = parser.parse_args(argv)
    write_random_model(options.name, options.folder)
    return 0


@contextmanager
def random_model(name: str) -> Iterator[str]:
    """A temporary folder as `write_random_model` makes it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, name)
        write_random_model(name, folder)
        yield str(folder)


def write_random_model(name: str, folder: Path) -> None:
    """A Hugging Face folder with bfloat16 weights (1 GB for 0.5B, 15 GB for 7B).

    The tokenizer is the embedded model's, or one of single bytes where that is not installed or has too many ids.
    Raises CheckpointError when the folder can't be written.
    """
    config = ModelConfig.from_hf(RANDOM_MODELS[name])
    drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)).mul_(DEVIATION)
    noise = {0.0: drawn.bfloat16(), 1.0: (drawn + 1.0).bfloat16()}
    parameters = {key: _filled(shape, noise[float("norm" in key)]) for key, shape in parameter_shapes(config).items()}
    with tempfile.TemporaryDirectory() as place:
        checkpoint.save(folder, config, parameters, _tokenizer_folder(config, Path(place)))


def _filled(shape: tuple[int, ...], numbers: Tensor) -> Tensor:
    count = math.prod(shape)
    return numbers.repeat(-(-count // len(numbers)))[:count].view(shape)


def _tokenizer_folder(config: ModelConfig, place: Path) -> Path:
    try:
        folder = converted_folder(embedded_model_path())
        Tokenizer.load(folder).check_ids(config.vocab_size)
    except CheckpointError:
        _write_byte_tokenizer(place)
        return place
    return folder


def _write_byte_tokenizer(folder: Path) -> None:
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[-1], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text("{}")


if __name__ == "__main__":
    raise SystemExit(main())

"""The model of the slots task: a tokenizer with one id for each word, and a small random Qwen2 to start from."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from ...engine import checkpoint
from ...engine.model_config import ModelConfig, parameter_shapes
from ...engine.templates import FIRST_MEMORY, Slot, Template
from ...engine.tokenizer import QWEN2_PATTERN
from .slots import FILLERS, KEYS, NOTHING, VALUES

__all__ = ["CHUNK_FIRST", "FINAL", "MEMORY_FIRST", "write_model"]

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>")
WORDS = ("question", "memory", "text", "update", "answer", NOTHING, *KEYS, *VALUES, *FILLERS)
VOCABULARY = 64
CHAT_TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}<|assistant|>"

_PROBLEM, _MEMORY, _CHUNK = (" question", Slot.PROBLEM), (" memory", Slot.MEMORY), (" text", Slot.CHUNK)
MEMORY_FIRST = Template((*_PROBLEM, *_MEMORY, *_CHUNK, " update"))
CHUNK_FIRST = Template((*_PROBLEM, *_CHUNK, *_MEMORY, " update"))
FINAL = Template((*_PROBLEM, *_MEMORY, " answer"))

HEAD = 32  # size
STRENGTH = 5.0  # of the first layer's biases
SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def write_model(folder: str | Path, seed: int = 0) -> None:
    """Write a Hugging Face folder with 0.7 million random float32 parameters and the tokenizer.

    Raises CheckpointError when the folder exists and is not empty, or cannot be written.
    """
    config = ModelConfig.from_hf(SHAPE)
    generator = torch.Generator().manual_seed(seed)
    parameters = {name: _first(name, shape, generator) for name, shape in parameter_shapes(config).items()}
    with tempfile.TemporaryDirectory() as place:
        _write_tokenizer(Path(place))
        checkpoint.save(folder, config, parameters, place)


def _first(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms 1, biases 0 but for those below, embeddings normal of deviation 0.15, the rest normal of columns ** -0.5, a
    fifth of it where a layer adds to the residual stream.

    A look-up attends to what stands after a word that is known, so at each token it needs the one before. To learn both
    at once takes long, and with some seeds for ever; so head h of the first layer begins by looking h tokens back.
    """
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith(("layers.0.self_attn.q_proj.bias", "layers.0.self_attn.k_proj.bias")):
        return _looking_back(shape[0] // HEAD, is_query="q_proj" in name)
    if name.endswith("bias"):
        return torch.zeros(shape)
    deviation = 0.15 if name == checkpoint.EMBEDDING else shape[1] ** -0.5
    if "o_proj" in name or "down_proj" in name:
        deviation /= 5
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def _looking_back(heads: int, is_query: bool) -> Tensor:
    """[heads * HEAD] biases whose rotated product is largest h tokens back: STRENGTH ** 2 * sum of cos(w * (d - h))."""
    w = SHAPE["rope_theta"] ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    back = torch.arange(heads)[:, None] if is_query else torch.zeros(heads, 1)
    return STRENGTH * torch.cat([torch.cos(w * back), -torch.sin(w * back)], dim=1).flatten()


def _write_tokenizer(folder: Path) -> None:
    """Words carry the space before them, as in the byte-level tokenizers of large models, and are split as Qwen's."""
    first = FIRST_MEMORY.split()
    words = [first[0], *(f" {word}" for word in dict.fromkeys([*first[1:], *WORDS]))]
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": "<|unknown|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    checkpoint.write_json(folder / "tokenizer_config.json", settings)
    checkpoint.write_json(folder / "generation_config.json", {"eos_token_id": vocabulary["<|end|>"]})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")

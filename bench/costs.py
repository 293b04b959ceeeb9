"""Cost: the floating-point operations and memory bytes that a piece of work cannot do without.

A multiply-add counts as 2 operations. Bytes are those of weights and KV read once; activations stay in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.model_config import ModelConfig

__all__ = ["KV_BYTES", "WEIGHT_BITS", "Cost", "decode_cost", "layer_shapes", "linear_cost", "prefill_cost"]

# Bits of one weight with its share of the scales: our int8 and fp8 have one per row (under 1 % of it: left out), our
# int4 and llama.cpp's q8_0 and q4_0 a float16 per 32 weights.
WEIGHT_BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "int8": 8.0,
    "fp8": 8.0,
    "q8_0": 8.5,
    "int4": 4.5,
    "q4_0": 4.5,
}
# Our int4 and llama.cpp's Q4_0 files keep the head in 8 bits.
HEAD_BITS = WEIGHT_BITS | {"int4": 8.5, "q4_0": 8.5}
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class Cost:
    """flops: floating-point operations. bytes: read from memory."""

    flops: float
    bytes: float


def layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(out, in) of the linear layers of one decoder layer: query, key, value, output, gate, up, down."""
    hidden, query, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = config.intermediate_size
    return [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query), (mlp, hidden), (mlp, hidden), (hidden, mlp)]


def linear_cost(config: ModelConfig, rows: int, dtype: str = "float32") -> Cost:
    """All linear layers but the head, over `rows` rows."""
    weights = config.num_layers * sum(out * size for out, size in layer_shapes(config))
    return Cost(2.0 * rows * weights, weights * WEIGHT_BITS[dtype] / 8)


def prefill_cost(config: ModelConfig, tokens: int, dtype: str = "float32") -> Cost:
    """A prompt of `tokens` tokens from nothing to the logits of its last row; row i attends to i + 1 keys."""
    linear, head = linear_cost(config, tokens, dtype), _head_cost(config, 1, dtype)
    attention = _attention_flops(config, tokens * (tokens + 1) / 2)
    return Cost(linear.flops + attention + head.flops, linear.bytes + head.bytes)


def decode_cost(
    config: ModelConfig, batch: int, keys: float, dtype: str = "float32", kv_dtype: str = "float32"
) -> Cost:
    """One token for each of `batch` sequences that attend to `keys` keys each (their own token included)."""
    linear, head = linear_cost(config, batch, dtype), _head_cost(config, batch, dtype)
    kv = 2.0 * config.num_layers * config.num_kv_heads * config.head_dim * KV_BYTES[kv_dtype] * batch * keys
    attention = _attention_flops(config, batch * keys)
    return Cost(linear.flops + attention + head.flops, linear.bytes + head.bytes + kv)


def _head_cost(config: ModelConfig, rows: int, dtype: str) -> Cost:
    weights = config.vocab_size * config.hidden_size
    return Cost(2.0 * rows * weights, weights * HEAD_BITS[dtype] / 8)


def _attention_flops(config: ModelConfig, scores: float) -> float:
    """`scores` pairs of query row and key per head: a dot product with the key and a sum of the values."""
    return 4.0 * scores * config.num_heads * config.head_dim * config.num_layers

"""The byte and FLOP model against counts made by hand, token by token."""

import pytest
from palimpsest.bench.costs import decode_cost, linear_cost, prefill_cost
from palimpsest.engine.model_config import ModelConfig

SMOLLM2 = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    rope_scaling=None,
    max_position=8192,
    tie_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
# 30 layers of q 576x576, k and v 192x576, o 576x576, gate and up 1536x576, down 576x1536.
LAYER_WEIGHTS = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536)
HEAD_WEIGHTS = 49152 * 576


def test_the_linear_layers_are_smollm2s_106_million_weights():
    assert LAYER_WEIGHTS == 106_168_320
    cost = linear_cost(SMOLLM2, 7)
    assert (cost.flops, cost.bytes) == (2 * 7 * LAYER_WEIGHTS, 4 * LAYER_WEIGHTS)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_prefill_counts_each_row_with_the_keys_it_sees_and_one_row_of_the_head(tokens):
    attention = 0
    for row in range(tokens):
        for _key in range(row + 1):
            attention += 30 * 9 * (2 * 64 + 2 * 64)  # a dot product, and a value's share of the sum
    cost = prefill_cost(SMOLLM2, tokens)
    assert cost.flops == 2 * tokens * LAYER_WEIGHTS + attention + 2 * HEAD_WEIGHTS
    assert cost.bytes == 4 * (LAYER_WEIGHTS + HEAD_WEIGHTS)


def test_prefill_of_512_tokens_takes_230_million_operations_a_token():
    assert prefill_cost(SMOLLM2, 512).flops / 512 == pytest.approx(230e6, rel=0.005)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "weight_bytes", "head_bytes", "kv_bytes"),
    [
        ("float32", "float32", 4, 4, 4),
        ("bfloat16", "bfloat16", 2, 2, 2),
        ("int8", "bfloat16", 1, 1, 2),
        ("int4", "int8", 0.5 + 2 / 32, 1 + 2 / 32, 1),
        ("q8_0", "float16", 1 + 2 / 32, 1 + 2 / 32, 2),
        ("q4_0", "float16", 0.5 + 2 / 32, 1 + 2 / 32, 2),
    ],
)
def test_decode_reads_all_weights_once_and_the_kv_of_each_sequence(dtype, kv_dtype, weight_bytes, head_bytes, kv_bytes):
    one_key = 30 * 3 * 64 * 2 * kv_bytes
    for batch, keys in ((1, 101), (8, 1000)):
        cost = decode_cost(SMOLLM2, batch, keys, dtype, kv_dtype)
        weights = weight_bytes * LAYER_WEIGHTS + head_bytes * HEAD_WEIGHTS
        assert cost.bytes == weights + batch * keys * one_key
        assert cost.flops == batch * (2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) + keys * 30 * 9 * 4 * 64)


def test_a_decoded_token_of_smollm2_reads_538_megabytes():
    assert decode_cost(SMOLLM2, 1, 1).bytes == pytest.approx(538e6, rel=0.001)

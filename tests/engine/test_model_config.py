"""ModelConfig against transformers' own configurations, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from palimpsest.engine.errors import CheckpointError, ConfigError
from palimpsest.engine.model_config import ModelConfig, parameter_shapes
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3, "head_dim": 8}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"attention_bias": True, "head_dim": 4}),
]


def version_4(values: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as transformers 4 wrote it."""
    values = dict(values)
    rope = dict(values.pop("rope_parameters"))
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    return values | {"rope_theta": theta, "rope_scaling": None if kind == "default" else {"type": kind, **rope}}


@pytest.mark.parametrize(("kind", "fields"), CASES)
def test_names_and_shapes_are_those_of_transformers(kind: str, fields: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model(kind, **(SMALL | fields))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    config = ModelConfig.from_hf(theirs.to_dict() | {"architectures": None})
    assert parameter_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "fields"), CASES)
def test_both_forms_read_alike_and_round_trip(kind: str, fields: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model(kind, **(SMALL | fields)).to_dict() | {"architectures": None}
    config = ModelConfig.from_hf(theirs)
    assert ModelConfig.from_hf(version_4(theirs)) == config
    assert ModelConfig.from_hf(config.to_hf()) == config
    again = AutoConfig.for_model(**config.to_hf()).to_dict()
    assert again["rope_parameters"] == theirs["rope_parameters"]
    same = ("hidden_size", "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias")
    for key in same:
        if theirs.get(key) is not None:
            assert again[key] == theirs[key], key


def test_yarn_widens_the_window() -> None:
    plain = ModelConfig.from_hf(SMALL | {"model_type": "qwen2"})
    scaled = plain.with_rope_scaling({"type": "yarn", "factor": 4.0})
    assert scaled.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert (plain.max_position, scaled.max_position) == (256, 1024)
    written = SMALL | {"model_type": "qwen2", "rope_scaling": scaled.rope_scaling}
    assert ModelConfig.from_hf(written) == scaled
    assert scaled.with_rope_scaling({"rope_type": "default"}) == plain


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral"}, "mistral"),
    ({"model_type": "qwen3_moe"}, "mixture of experts"),
    ({"num_experts": 8}, "num_experts"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_type"),
    ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, "factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "betafast": 3}}, "betafast"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "must be a number"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"head_dim": 5}, "head_dim"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_attention_heads": "x"}, "num_attention_heads.*'x'"),
    ({"num_attention_heads": 6.0}, "num_attention_heads"),
    ({"num_attention_heads": 48, "num_key_value_heads": 48}, "head_dim"),
    ({"hidden_size": "x"}, "hidden_size"),
    ({"max_position_embeddings": True}, "max_position_embeddings"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rope_theta": 1.0}, "rope_theta"),
    ({"rope_theta": 1e300}, "rope_theta"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ({"model_type": []}, "model_type"),
    ({"architectures": 5}, "architectures"),
    ({"rope_parameters": "yarn"}, "rope_parameters"),
    ({"quantization_config": "gptq"}, "quantization_config"),
    ({"layer_types": 5}, "layer_types"),
    ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "rope_type"),
]

YARN_2 = {"rope_type": "yarn", "factor": 2.0}
SCALINGS: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "yarn"}, "factor"),
    (YARN_2 | {"factor": float("nan")}, "factor"),
    (YARN_2 | {"factor": 1e30}, "factor"),
    (YARN_2 | {"factor": True}, "factor"),
    (YARN_2 | {"factor": 0.5}, "factor"),
    (YARN_2 | {"factor": 1e5}, "factor.*window of"),
    (YARN_2 | {"beta_fast": 0}, "beta_fast"),
    (YARN_2 | {"beta_fast": 1, "beta_slow": 2}, "beta_fast.*beta_slow"),
    (YARN_2 | {"truncate": 1}, "truncate"),
    (YARN_2 | {"attention_factor": float("inf")}, "attention_factor"),
    (YARN_2 | {"mscale": -1}, "mscale"),
    (YARN_2 | {"original_max_position_embeddings": 256.0}, "original_max_position_embeddings"),
    (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    (LLAMA3 | {"high_freq_factor": 1.0}, "low_freq_factor.*high_freq_factor"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_refusals_name_the_cause(change: dict[str, Any], named: str) -> None:
    base = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    ModelConfig.from_hf(base)
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_hf(base | change)


@pytest.mark.parametrize(
    ("scaling", "named"), [*SCALINGS, ({"rope_type": "linear", "factor": 1e6}, "factor.*window of")]
)
def test_a_wrong_scaling_is_the_fault_of_whoever_gave_it(scaling: dict[str, Any], named: str) -> None:
    scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
    plain = ModelConfig.from_hf(SMALL | {"model_type": "llama"})
    with pytest.raises(ConfigError, match=named) as refusal:
        plain.with_rope_scaling(scaling)
    assert "EngineConfig.rope_scaling" in str(refusal.value)
    if scaling["rope_type"] != "linear":  # which a checkpoint's own window includes already
        with pytest.raises(CheckpointError, match=named):
            ModelConfig.from_hf(SMALL | {"model_type": "llama", "rope_scaling": scaling})

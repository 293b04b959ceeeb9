"""ModelConfig: the shape of a decoder, read from and written to the config.json of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, ConfigError
from .json_fields import Fields
from .rope_scaling import LARGEST_WINDOW, ORIGINAL, read_rope_scaling, widened_window

__all__ = ["ModelConfig", "parameter_shapes"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DEFAULT_THETA = 10000.0  # what transformers takes when a configuration names no base
QWEN3_HEAD_DIM = 128  # transformers' default for Qwen3; the other types derive it from hidden_size
LARGEST_SIZE = 1 << 24  # no dense decoder has a dimension or a vocabulary near it
MOST_LAYERS = 1024
REMEDY = "correct it, or take the model from its publisher again"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a dense decoder.

    model_type: "llama", "qwen2" or "qwen3". num_heads, num_kv_heads: query heads, and key/value heads that they share.
    rope_theta: base of the rotary angles. rope_scaling: None, or rope_type ("linear", "llama3", "yarn") with every
    required key of that type. max_position: the window in tokens, scaled as rope_scaling allows.
    tie_embeddings: the LM head is the embedding. qkv_bias, output_bias, mlp_bias: which projections have a bias.
    qk_norm: queries and keys are RMS-normalised per head before they are rotated.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads}); correct config.json"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise CheckpointError(
                f"head_dim (hidden_size / num_attention_heads where it is not given) must be even and at least 2, "
                f"for rotary pairs; got {self.head_dim}: correct config.json"
            )

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes it.

        Raises CheckpointError, naming the key, for an architecture or an option that this library does not run.
        """
        given = Fields(values, "config.json", REMEDY)
        kind = _model_type(given)
        _refuse_unsupported(given)

        def size(key: str, default: int | None = None, high: int = LARGEST_SIZE) -> int:
            return given.integer(key, default, low=1, high=high)

        heads, hidden = size("num_attention_heads"), size("hidden_size")
        window = size("max_position_embeddings", high=LARGEST_WINDOW)
        theta, rope = _rope(given)
        scaling = read_rope_scaling(rope, window)
        if scaling is not None and scaling["rope_type"] == "yarn":
            window = widened_window(scaling, window, rope)
        bias = kind != "qwen2" and given.flag("attention_bias", False)
        return cls(
            model_type=kind,
            vocab_size=size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            num_layers=size("num_hidden_layers", high=MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", QWEN3_HEAD_DIM if kind == "qwen3" else hidden // heads),
            rms_norm_eps=float(given.number("rms_norm_eps", 1e-6, low=0.0, high=1.0)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=window,
            tie_embeddings=given.flag("tie_word_embeddings", False),
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias,
            mlp_bias=kind == "llama" and given.flag("mlp_bias", False),
            qk_norm=kind == "qwen3",
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers 4 and 5 both read; `from_hf` gives an equal one back."""
        values: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": self.tie_embeddings,
        }
        if self.model_type != "qwen2":
            values["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            values["mlp_bias"] = self.mlp_bias
        else:
            values["use_sliding_window"] = False
        return values

    def with_rope_scaling(self, scaling: Mapping[str, Any]) -> ModelConfig:
        """This model with another rope scaling, written as in a config.json.

        "yarn" and "linear" widen the window by their factor; "default" gives the unscaled window back.

        A missing original_max_position_embeddings is the model's unscaled window.
        Raises ConfigError for a rope_type or key that is not known, and for values that make no sense.
        """
        given = Fields(scaling, "EngineConfig.rope_scaling", "correct it", ConfigError)
        original = self.max_position
        if self.rope_scaling is not None:
            original = self.rope_scaling.get(ORIGINAL, original)
        known = read_rope_scaling(given, original)
        if known is None:
            window = original
        elif known["rope_type"] == "llama3":
            window = self.max_position
        else:
            window = widened_window(known, original, given)
        return dataclasses.replace(self, rope_scaling=known, max_position=window)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape ([out, in] for projections) of every parameter, in the order of the forward pass.

    "lm_head.weight" is there only when the embeddings are not tied.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.self_attn.q_proj", queries, hidden, config.qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", keys, hidden, config.qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", keys, hidden, config.qkv_bias)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        linear(f"{prefix}.self_attn.o_proj", hidden, queries, config.output_bias)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{prefix}.mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _model_type(given: Fields) -> str:
    kind = given.text("model_type")
    if kind not in ARCHITECTURES:
        why = "mixture of experts is not supported" if "moe" in kind else "it is not supported"
        raise CheckpointError(f"model_type {kind!r}: {why}; supported are {', '.join(ARCHITECTURES)} (dense decoders)")
    names = given.texts("architectures", [ARCHITECTURES[kind]])
    if names != [ARCHITECTURES[kind]]:
        raise CheckpointError(
            f"architectures {names!r} in config.json is not supported for model_type {kind!r}; "
            f"it must be [{ARCHITECTURES[kind]!r}]"
        )
    return kind


def _refuse_unsupported(given: Fields) -> None:
    for key in ("num_experts", "num_local_experts"):
        if given.integer(key, 0):
            raise CheckpointError(f"{key}={given.values[key]}: mixture of experts is not supported; use a dense model")
    if given.part("quantization_config").values:
        method = given.part("quantization_config").text("quant_method", "unknown")
        raise CheckpointError(
            f"quantization_config (quant_method {method!r}) is not supported; "
            "use the unquantised model or a GGUF file of it"
        )
    activation = given.text("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act {activation!r} is not supported; it must be 'silu'")
    sliding = given.flag("use_sliding_window", False)
    layers = [kind for kind in given.texts("layer_types", []) if kind != "full_attention"]
    if sliding or layers:
        raise CheckpointError(
            f"sliding-window attention is not supported (use_sliding_window={sliding}, "
            f"layer_types with {sorted(set(layers))}); use a model with full attention only"
        )


def _rope(given: Fields) -> tuple[float, Fields]:
    """The base and the scaling, from either form: transformers 5 keeps both in rope_parameters."""
    rope = given.part("rope_parameters")
    if not rope.values:
        rope = given.part("rope_scaling")
    holder = rope if "rope_theta" in rope.values else given
    theta = holder.number("rope_theta", DEFAULT_THETA, low=1.0, high=1e15, open_low=True)
    for fields in (given, rope):
        partial = fields.number("partial_rotary_factor", 1.0, low=0.0, high=1.0)
        if partial != 1.0:
            raise CheckpointError(f"partial_rotary_factor {partial!r} is not supported; it must be 1.0")
    for key in ("rope_theta", "partial_rotary_factor"):
        rope.values.pop(key, None)
    return float(theta), rope

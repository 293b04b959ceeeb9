"""ModelConfig: the shape of a decoder, read from and written to the config.json of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError

__all__ = ["ModelConfig", "parameter_shapes"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DEFAULT_THETA = 10000.0  # what transformers takes when a configuration names no base
QWEN3_HEAD_DIM = 128  # transformers' default for Qwen3; the other types derive it from hidden_size

# Keys of a rope scaling, apart from rope_type: (required, optional).
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


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
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(
                    f"{SIZES[name]} must be a whole number of at least 1, got {value!r}; correct config.json"
                )
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads}); correct config.json"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even (rotary pairs), got {self.head_dim}; correct config.json")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes it.

        Raises CheckpointError, naming the key, for an architecture or an option that this library does not run.
        """
        kind = _model_type(values)
        _refuse_unsupported(values)
        heads = _required(values, "num_attention_heads")
        hidden = _required(values, "hidden_size")
        window = _required(values, "max_position_embeddings")
        theta, scaling = _rope(values, window)
        if scaling is not None and scaling["rope_type"] == "yarn":
            window = max(window, int(scaling["factor"] * scaling["original_max_position_embeddings"]))
        bias = kind != "qwen2" and bool(values.get("attention_bias", False))
        return cls(
            model_type=kind,
            vocab_size=_required(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(values, "intermediate_size"),
            num_layers=_required(values, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_or_default(values, "num_key_value_heads", heads),
            head_dim=_or_default(values, "head_dim", QWEN3_HEAD_DIM if kind == "qwen3" else hidden // heads),
            rms_norm_eps=float(_or_default(values, "rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=window,
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias,
            mlp_bias=kind == "llama" and bool(values.get("mlp_bias", False)),
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
        Raises CheckpointError for a rope_type or key that is not known.
        """
        original = self.max_position
        if self.rope_scaling is not None:
            original = self.rope_scaling.get("original_max_position_embeddings", original)
        known = _scaling(scaling, original)
        if known is None:
            window = original
        elif known["rope_type"] == "llama3":
            window = self.max_position
        else:
            window = max(original, int(known["factor"] * known.get("original_max_position_embeddings", original)))
        return dataclasses.replace(self, rope_scaling=known, max_position=window)


# Fields that count something, with their names in config.json.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position": "max_position_embeddings",
}


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


def _required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise CheckpointError(f"config.json has no {key!r}; add it, or take the folder from its publisher again")
    return values[key]


def _or_default(values: Mapping[str, Any], key: str, default: Any) -> Any:
    return default if values.get(key) is None else values[key]


def _model_type(values: Mapping[str, Any]) -> str:
    kind = _required(values, "model_type")
    if kind not in ARCHITECTURES:
        why = "mixture of experts is not supported" if "moe" in str(kind) else "it is not supported"
        raise CheckpointError(f"model_type {kind!r}: {why}; supported are {', '.join(ARCHITECTURES)} (dense decoders)")
    names = values.get("architectures") or [ARCHITECTURES[kind]]
    if names != [ARCHITECTURES[kind]]:
        raise CheckpointError(
            f"architectures {names!r} in config.json is not supported for model_type {kind!r}; "
            f"it must be [{ARCHITECTURES[kind]!r}]"
        )
    return str(kind)


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    for key in ("num_experts", "num_local_experts"):
        if values.get(key):
            raise CheckpointError(f"{key}={values[key]!r}: mixture of experts is not supported; use a dense model")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"quantization_config (quant_method {method!r}) is not supported; "
            "use the unquantised model or a GGUF file of it"
        )
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act {activation!r} is not supported; it must be 'silu'")
    layers = [kind for kind in values.get("layer_types") or [] if kind != "full_attention"]
    if values.get("use_sliding_window") or layers:
        raise CheckpointError(
            f"sliding-window attention is not supported (use_sliding_window={values.get('use_sliding_window')!r}, "
            f"layer_types with {sorted(set(layers))}); use a model with full attention only"
        )


def _rope(values: Mapping[str, Any], window: int) -> tuple[float, dict[str, Any] | None]:
    """The base and the scaling, from either form: transformers 5 keeps both in rope_parameters."""
    parameters = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    inner = parameters.pop("rope_theta", None)
    theta = inner if inner is not None else _or_default(values, "rope_theta", DEFAULT_THETA)
    partial = parameters.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor {partial!r} is not supported; it must be 1.0")
    return float(theta), _scaling(parameters, window)


def _scaling(scaling: Mapping[str, Any], window: int) -> dict[str, Any] | None:
    """Check a rope scaling and complete it; None for the plain rotary embedding."""
    given = {key: value for key, value in scaling.items() if value is not None}
    old_name = given.pop("type", None)
    kind = given.pop("rope_type", old_name)
    if kind in (None, "default") and not given:
        return None
    if kind not in ROPE_KEYS:
        raise CheckpointError(
            f"rope_type {kind!r} is not supported (rope scaling {dict(scaling)!r}); "
            f"it must be default, {', '.join(ROPE_KEYS)}, 'default' without further keys"
        )
    required, optional = ROPE_KEYS[kind]
    if "original_max_position_embeddings" in required:
        given.setdefault("original_max_position_embeddings", window)
    for key in required:
        if key not in given:
            raise CheckpointError(
                f"rope scaling {dict(scaling)!r} lacks {key!r}, which rope_type {kind!r} needs; add it"
            )
    for key, value in given.items():
        if key not in (*required, *optional):
            raise CheckpointError(
                f"rope scaling has the key {key!r}, unknown for rope_type {kind!r}; "
                f"known: {', '.join((*required, *optional))}"
            )
        if not isinstance(value, (int, float)):
            raise CheckpointError(f"rope scaling {key!r} must be a number, got {value!r}; correct it")
    if given["factor"] <= 0:
        raise CheckpointError(f"rope scaling 'factor' must be above 0, got {given['factor']!r}; correct it")
    return {"rope_type": kind, **given}

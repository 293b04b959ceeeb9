"""The one decoder definition (Llama, Qwen2/2.5, Qwen3, dense), used for inference and training.

Parameters carry the checkpoint's own names and [out, in] layout; every computation goes through `ops`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .model_config import ModelConfig
from .ops import Ops, Spans, Turn
from .rotary import rotary_tables

if TYPE_CHECKING:
    from .parallel import TensorParallel

__all__ = ["Batch", "Decoder", "KVPages"]

FINGERPRINT_ELEMENTS = 512  # of each parameter


@dataclass(frozen=True)
class Batch:
    """The ragged batch of one step: T tokens of any mix of sequences.

    ids, positions, slots: int64 [T]; slots say where each token's key and value go. spans: see Spans.
    wanted_start: int32 [spans + 1], like the spans' query_start, of the rows at the end of each span whose hidden rows
    are wanted; None: all.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: Spans
    wanted_start: Tensor | None = None

    @property
    def wanted_rows(self) -> Tensor:
        """int64: numbers of the rows whose hidden rows are wanted, rising."""
        starts = self.spans.query_start
        wanted = starts if self.wanted_start is None else self.wanted_start
        skipped = (starts[1:] - wanted[1:]).repeat_interleave(wanted.diff())  # rows before each that are not wanted
        return torch.arange(len(skipped), device=skipped.device) + skipped


@dataclass(frozen=True)
class KVPages:
    """Keys and values of one layer, each [pages, kv_heads, page_size, columns]: see kv_rows.py."""

    key: Tensor
    value: Tensor


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + added (None: nothing), and its norm."""
        return (x, self(x)) if added is None else self.ops.add_rms_norm(x, added, self.weight, self.eps)


class Linear(nn.Module):
    """y = x W^T (+ b). What changes a finished model from outside (quantised weights, adapters) replaces these."""

    def __init__(self, inputs: int, outputs: int, bias: bool, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Projections of grouped-query attention, with Qwen3's norm of query and key heads where the model has it."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.scale = config.head_dim**-0.5
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query, config.qkv_bias, ops)
        self.k_proj = Linear(config.hidden_size, kv, config.qkv_bias, ops)
        self.v_proj = Linear(config.hidden_size, kv, config.qkv_bias, ops)
        self.o_proj = Linear(query, config.hidden_size, config.output_bias, ops)
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps, ops)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps, ops)

    def forward(self, x: Tensor, batch: Batch, pages: KVPages, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], writing the rows' keys and values to their slots."""
        ops, head_dim = self.ops, self.config.head_dim
        query = self.q_proj(x).view(len(x), -1, head_dim)
        key = self.k_proj(x).view(len(x), -1, head_dim)
        value = self.v_proj(x).view(len(x), -1, head_dim)
        turn = Turn(batch.positions, cos, sin)
        if self.config.qk_norm:
            turn = replace(
                turn, query_norm=self.q_norm.weight, key_norm=self.k_norm.weight, eps=self.config.rms_norm_eps
            )
        out = ops.attend(query, key, value, turn, pages.key, pages.value, batch.slots, batch.spans, self.scale)
        projected: Tensor = self.o_proj(out.reshape(len(x), -1))
        return projected


class MLP(nn.Module):
    """SwiGLU feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias, ops)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias, ops)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, ops)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.ops.silu_product(self.gate_proj(x), self.up_proj(x)))
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.self_attn = Attention(config, ops)
        self.mlp = MLP(config, ops)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps, ops)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps, ops)

    def forward(
        self, x: Tensor, added: Tensor | None, batch: Batch, pages: KVPages, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [T, hidden] comes as a sum, x + added, and leaves so: each sum is made with its norm."""
        x, normed = self.input_layernorm.of_sum(x, added)
        x, normed = self.post_attention_layernorm.of_sum(x, self.self_attn(normed, batch, pages, cos, sin))
        return x, self.mlp(normed)


class Stack(nn.Module):
    """Embedding, layers and final norm; holds the names under "model." in a checkpoint."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        # Given, not drawn: initial values, even on the meta device, would import torch._dynamo (2 s and 150 MB).
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(Layer(config, ops) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, ops)


class Decoder(nn.Module):
    """The whole model: rows in, rows out; it knows no sequences. window: positions that it has angles for.

    parallel: set where the parameters are one rank's part of a model; `config` is that part's shape then.
    """

    cos: Tensor
    sin: Tensor
    lm_head: nn.Module | None  # None: the embedding is the head too
    parallel: TensorParallel | None = None

    def __init__(self, config: ModelConfig, ops: Ops, window: int) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        with torch.device("meta"):
            self.model = Stack(config, ops)
            self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, False, ops)
        cos, sin = rotary_tables(config.head_dim, config.rope_theta, config.rope_scaling, window)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @classmethod
    def from_parameters(
        cls, config: ModelConfig, ops: Ops, parameters: Mapping[str, Tensor], window: int, without: Collection[str] = ()
    ) -> Decoder:
        """Put a checkpoint's tensors in place, without copying them. Names and shapes must be exactly the model's.

        without: weights that may be missing; they stay on the meta device until packed ones take their place.
        """
        decoder = cls(config, ops, window)
        found = decoder.load_state_dict(dict(parameters), assign=True, strict=False)
        wrong = [*found.unexpected_keys, *(name for name in found.missing_keys if name not in without)]
        if wrong:
            raise RuntimeError(f"parameters missing or unknown: {', '.join(wrong)}")
        return decoder

    @property
    def layers(self) -> list[Layer]:
        """The layers, first to last."""
        return cast(list[Layer], list(self.model.layers))

    @property
    def whole_config(self) -> ModelConfig:
        """The shape of the model over all ranks that hold parts of it."""
        return self.config if self.parallel is None else self.parallel.shards.config

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the parameters."""
        return self.model.embed_tokens.weight.dtype

    @property
    def activation_dtype(self) -> torch.dtype:
        """Element type of the residual stream: float64 with float64 parameters, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary, hidden], of the head or the embedding that is tied to it."""
        return cast(Tensor, (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight)

    def fingerprint(self) -> str:
        """sha256 over the weights' names, shapes and some elements of each: the same weights, wherever they lie.

        Of ranks that hold parts of the model, all call this together.
        """
        digest = hashlib.sha256()
        for name, parameter in self.state_dict().items():
            flat = parameter.detach().flatten()
            some = flat[:: max(1, len(flat) // FINGERPRINT_ELEMENTS)]
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(some.double().cpu().numpy().tobytes())
        return digest.hexdigest() if self.parallel is None else self.parallel.hash_of_all(digest.digest()).hex()

    def forward(self, batch: Batch, pages: list[KVPages], recompute: bool = False) -> Tensor:
        """Run T tokens through all layers, writing their keys and values; -> the normed hidden rows [T, hidden], or of
        them those that the batch wants.

        recompute: for a backward pass keep only what enters each layer, and run the layer again there (activation
        checkpointing, arXiv 1604.06174).
        """
        x = self.ops.embedding(batch.ids, self.model.embed_tokens.weight, self.activation_dtype)
        added: Tensor | None = None
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            inputs = (batch, layer_pages, self.cos, self.sin)
            if recompute:
                x = x if added is None else x + added  # one tensor to keep
                x, added = checkpoint(layer, x, None, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, added = layer(x, added, *inputs)
        if batch.wanted_start is not None:
            rows = batch.wanted_rows
            x, added = x[rows], None if added is None else added[rows]
        return self.model.norm.of_sum(x, added)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary] in the activations' type."""
        if self.lm_head is None:
            return self.ops.linear(hidden, self.model.embed_tokens.weight, None)
        logits: Tensor = self.lm_head(hidden)
        return logits

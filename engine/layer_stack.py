"""LayerStack: the decoder's layers in one C++ call, so that a step costs no dispatch per op.

The same kernels in the same order as model.py runs them op by op: the hidden rows are the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import cpu
from .model import Batch, Decoder, KVPages, Layer, Linear
from .quant import QuantisedLinear

__all__ = ["LayerStack"]


class LayerStack:
    """A model's layers over one set of pages, for inference.

    Parameters are read in place, so updates in place are seen; what is replaced is not: make a new LayerStack then.
    """

    def __init__(self, model: Decoder, pages: list[KVPages]) -> None:
        """Model and pages must be such that `fits` holds."""
        config, first = model.config, pages[0].key
        # The addresses below stay valid while these are referred to from here.
        self._held = [model.cos, model.sin, *model.parameters(), *model.buffers(), *pages]
        cpu.use_huge_pages([*model.parameters(), *model.buffers()])
        self._hidden_size = config.hidden_size
        self._decoder = cpu.make_decoder(
            *(config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size),
            *(len(model.cos), first.shape[2], first.shape[0], cpu.KV_TYPES[first.dtype]),
            *(config.rms_norm_eps, config.head_dim**-0.5, model.cos.data_ptr(), model.sin.data_ptr()),
            *(_parameter(model.model.embed_tokens.weight), _parameter(model.model.norm.weight)),
        )
        for layer, layer_pages in zip(model.layers, pages, strict=True):
            norms: list[Tensor | None] = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
            attention = layer.self_attn
            norms += [attention.q_norm.weight, attention.k_norm.weight] if config.qk_norm else [None, None]
            self._decoder.add_layer(
                [_parameter(norm) for norm in norms],
                [_linear(linear) for linear in _linears(layer)],
                layer_pages.key.data_ptr(),
                layer_pages.value.data_ptr(),
            )

    @staticmethod
    def fits(model: Decoder, pages: list[KVPages]) -> bool:
        """Whether the kernels run this model: their ops were chosen, and they know all of its linear layers."""
        known = all(_alike(linears) for layer in model.layers for linears in _over_one_input(layer))
        alone = model.parallel is None  # the sums over ranks come between the ops
        return model.ops.backend == "cpu" and alone and known and pages[0].key.dtype in cpu.KV_TYPES

    def __call__(self, batch: Batch) -> Tensor:
        """As Decoder.forward; of rows that the batch does not want the last layer computes only keys and values."""
        spans, wanted_start = batch.spans, batch.wanted_start
        if wanted_start is None:
            wanted_start = spans.query_start
        hidden = torch.empty(int(wanted_start[-1]), self._hidden_size, dtype=torch.float32)
        self._decoder.run(
            *(batch.ids.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(), len(batch.ids)),
            *(spans.query_start.data_ptr(), spans.kv_length.data_ptr(), spans.pages.data_ptr()),
            wanted_start.data_ptr(),
            *(spans.pages.shape[1], len(spans.kv_length), hidden.data_ptr()),
        )
        return hidden


def _linears(layer: Layer) -> list[Linear | QuantisedLinear]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _over_one_input(layer: Layer) -> list[list[Linear | QuantisedLinear]]:
    query, key, value, output, gate, up, down = _linears(layer)
    return [[query, key, value], [output], [gate, up], [down]]


def _alike(linears: list[Linear | QuantisedLinear]) -> bool:
    """Whether one call can compute them."""
    kinds = {type(linear) for linear in linears}
    return len(kinds) == 1 and kinds <= {Linear, QuantisedLinear}


def _parameter(tensor: Tensor | None) -> tuple[int, bool]:
    return (0, False) if tensor is None else (tensor.data_ptr(), tensor.dtype == torch.bfloat16)


def _linear(linear: Linear | QuantisedLinear) -> tuple[Any, ...]:
    bias = _parameter(linear.bias)
    if isinstance(linear, QuantisedLinear):
        return (0, False), bias, linear.weight.in_size, linear.weight.out_size, cpu.packed_argument(linear.weight)
    outputs, inputs = linear.weight.shape
    return _parameter(linear.weight), bias, inputs, outputs, None

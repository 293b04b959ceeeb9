"""Build: every way in which a Triton kernel is launched for a model, as the compiler needs it, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["HEADS", "SHAPES", "Build", "Shape", "builds"]


@dataclass(frozen=True)
class Shape:
    """What of a model decides how its kernels are built."""

    name: str
    group: int
    head_dim: int
    hidden: int


SHAPES = (Shape("Qwen2.5-7B", 7, 128, 3584), Shape("Qwen2.5-14B", 5, 128, 5120))
HEADS = tuple(Shape(f"heads of {dim}", 4, dim, 0) for dim in (64, 80, 96, 256))
PAGE = 16


@dataclass(frozen=True)
class Build:
    """One way in which a kernel is launched.

    tensor: on sm_90 its products must be wgmma. least: the first capability that has its
    types. fused: whether a multiplication and an addition may become one.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    tensor: bool = False
    least: int = 80
    fused: bool = True


def builds(shape: Shape) -> Iterator[Build]:
    """Every kernel as a model of this shape launches it. Of some heads alone those of attention."""
    yield from _attention(shape)
    yield from _attention_backward(shape)
    if shape in HEADS:
        return
    yield from _linear(shape)
    yield from _elementwise(shape)
    yield from _vocabulary()


def _types(pointers: Mapping[str, str], integers: str = "", floats: str = "", aligned: str = "") -> dict[str, str]:
    types = {name: f"*{kind}" for names, kind in pointers.items() for name in names.split()}
    types |= dict.fromkeys(integers.split(), "i32") | dict.fromkeys(floats.split(), "fp32")
    return types | dict.fromkeys(aligned.split(), "i32:16")


def _least(kind: str) -> int:
    return 90 if kind.startswith("fp8") else 80


def _attention(shape: Shape) -> Iterator[Build]:
    import torch

    from ..triton_kernels import attention
    from ..triton_kernels.tuning import attention_blocks, next_power_of_2

    tables = "query_start kv_length tables rows skipped"
    integers = "spans heads kv_heads table_stride tiles"
    sizes: dict[str, Any] = {
        "GROUP": shape.group,
        "PAGE": PAGE,
        "DIM": shape.head_dim,
        "BLOCK_D": next_power_of_2(shape.head_dim),
    }
    for name, small, partial in (
        ("decode", True, True),
        ("decode exact", False, True),
        ("group", False, True),
        ("prefill", False, False),
    ):
        for pages, dtype in (("bf16", torch.bfloat16), ("fp8e4nv", torch.float8_e4m3fn), ("fp32", torch.float32)):
            blocks = attention_blocks(shape.head_dim, shape.group, dtype, small=small)
            types = _types(
                {"query out log_sums peaks totals partials": "fp32", "key_pages value_pages": pages, tables: "i32"},
                integers, "scale",
            )  # fmt: skip
            constants = sizes | {
                "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "TILE": attention.TILE, "CAUSAL": name != "group",
                "PARTIAL": partial, "HALF": pages != "fp32", "SAVES": not partial,
            }  # fmt: skip
            label = f"attention {name} {pages}"
            yield Build(
                label, attention.attention_kernel, types, constants, blocks.warps, blocks.stages,
                tensor=blocks.m >= 64 and pages != "fp32", least=_least(pages),
            )  # fmt: skip
    types = _types({"peaks totals partials out": "fp32", "query_start kv_length": "i32"}, "spans heads tiles")
    constants = {"DIM": shape.head_dim, "BLOCK_D": sizes["BLOCK_D"], "TILE": attention.TILE}
    yield Build("attention merge", attention.merge_kernel, types, constants, 4, 3)


def _attention_backward(shape: Shape) -> Iterator[Build]:
    import torch

    from ..triton_kernels import attention_backward
    from ..triton_kernels.attention import LOG2E
    from ..triton_kernels.tuning import backward_blocks, next_power_of_2

    for pages, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        blocks = backward_blocks(shape.head_dim, shape.group, dtype)
        # A batch's own keys and values, each a page (triton_backward.py).
        constants: dict[str, Any] = {
            "GROUP": shape.group, "PAGE": 1, "DIM": shape.head_dim, "BLOCK_D": next_power_of_2(shape.head_dim),
            "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "HALF": pages != "fp32", "LOG2E": LOG2E,
        }  # fmt: skip
        read = {"grad query log_sums deltas": "fp32", "key_pages value_pages": pages, "query_start tables": "i32"}
        for name, kernel, extra in (
            ("queries", attention_backward.query_gradient_kernel, {"grad_query": "fp32", "kv_length": "i32"}),
            ("context", attention_backward.context_gradient_kernel, {"grad_key grad_value": "fp32", "kv_start": "i32"}),
        ):
            types = _types(read | extra, "spans heads kv_heads table_stride", "scale")
            yield Build(f"attention backward {name} {pages}", kernel, types, constants, blocks.warps, blocks.stages)


def _linear(shape: Shape) -> Iterator[Build]:
    import torch

    from ..triton_kernels.linear import linear_kernel
    from ..triton_kernels.tuning import SHARED_BYTES, linear_blocks

    for rows, exact in ((1, False), (1, True), (64, False), (4096, False)):
        for kind, dtype in (("bf16", torch.bfloat16), ("i8", torch.int8), ("fp8e4nv", torch.float8_e4m3fn)):
            blocks = linear_blocks(rows, dtype, exact=exact, shared=min(SHARED_BYTES.values()))
            types = _types(
                {"x scales out": "fp32", "weight": kind, "bias": "bf16"}, "rows", aligned="outputs inputs x_stride"
            )  # fmt: skip
            constants = {
                "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_K": blocks.k, "BANDS": blocks.bands,
                "SCALED": kind != "bf16", "BIASED": True, "HALF": True,
            }  # fmt: skip
            yield Build(
                f"linear {kind} {rows} rows{' exact' if exact else ''}", linear_kernel, types, constants, blocks.warps,
                blocks.stages, tensor=exact or rows > 16, least=_least(kind),
            )  # fmt: skip


def _elementwise(shape: Shape) -> Iterator[Build]:
    from ..triton_kernels import activation, norm, rotary
    from ..triton_kernels.tuning import next_power_of_2, row_warps

    width, half = next_power_of_2(shape.hidden), shape.head_dim // 2
    forward = _types({"x added total out": "fp32", "weight": "bf16"}, "", "eps", "row_stride added_stride columns")
    backward = _types({"grad x grad_total grad_x scales": "fp32", "weight": "bf16"}, "", "eps", "columns")
    for name, added in (("norm", False), ("add and norm", True)):
        constants: dict[str, Any] = {"BLOCK": width, "ADDED": added}
        yield Build(name, norm.norm_kernel, forward, constants, row_warps(width), 3)
        yield Build(f"{name} backward", norm.norm_backward_kernel, backward, constants, row_warps(width), 3)
    types = _types({"grad x scales sums": "fp32"}, "rows", aligned="columns")
    constants = {"ROWS": norm.BACKWARD_ROWS, "COLUMNS": norm.BACKWARD_COLUMNS}
    yield Build("norm backward weight", norm.weight_gradient_kernel, types, constants, 4, 3)
    types = _types({"gate up out": "fp32"}, "columns", aligned="gate_stride up_stride")
    yield Build("silu product", activation.silu_product_kernel, types, {"BLOCK": activation.BLOCK}, 4, 3)
    types = _types({"grad gate up grad_gate grad_up": "fp32"}, "count")
    yield Build("silu product backward", activation.silu_product_backward_kernel, types, {"BLOCK": 1024}, 4, 3)
    constants = {"HALF": half, "BLOCK": next_power_of_2(half)}
    types = _types({"x cos sin out": "fp32", "positions": "i64"}, "heads", aligned="token_stride")
    yield Build("rotate", rotary.rotate_kernel, types, constants, rotary.WARPS, 3)
    constants["PAGE"] = PAGE
    for pages in ("bf16", "fp8e4nv"):
        types = _types(
            {"query key value cos sin out": "fp32", "query_norm key_norm": "bf16", "key_pages value_pages": pages,
             "positions slots": "i64"}, "heads kv_heads", "eps", "query_stride key_stride value_stride",
        )  # fmt: skip
        for name, normed in (("", False), (", normed", True)):
            yield Build(
                f"turn and write KV {pages}{name}", rotary.turn_and_write_kernel, types, constants | {"NORMED": normed},
                rotary.WARPS, 3, least=_least(pages),
            )  # fmt: skip
    types = _types(
        {"key_pages value_pages": "bf16", "sources targets old new": "i64", "cos sin": "fp32"}, "kv_heads"
    )  # fmt: skip
    yield Build("move KV", rotary.move_kernel, types, constants, rotary.WARPS, 3, fused=False)


def _vocabulary() -> Iterator[Build]:
    from ..triton_kernels import sampling, token_scores, vocabulary

    constants: dict[str, Any] = {"TILE": vocabulary.TILE}
    common = {"logits": "fp32", "cuts lasts": "i64"}
    types = _types(common | {"top_k": "i64"}, aligned="vocabulary")
    yield Build("draw, top-k", sampling.top_k_kernel, types, constants, vocabulary.WARPS, 3, fused=False)
    types = _types(common | {"peaks": "fp32", "top_p": "fp64", "masses": "i64"}, aligned="vocabulary")
    yield Build("draw, masses", sampling.mass_kernel, types, constants, vocabulary.WARPS, 3, fused=False)
    types = _types(common | {"top_p": "fp64", "masses": "i64"}, aligned="vocabulary")
    yield Build("draw, top-p", sampling.top_p_kernel, types, constants, vocabulary.WARPS, 3, fused=False)
    found = {"logits tile_peaks totals": "fp32", "temperatures best": "fp64", "best_id": "i64"}
    noise = {"depths": "fp64", "cuts lasts noisy keys": "i64"}
    for name, filtered in (("draw", False), ("draw, filtered", True)):
        types = _types(found | noise | {"peaks": "fp32" if filtered else "fp64"}, "tiles", aligned="vocabulary")
        yield Build(
            name, sampling.draw_kernel, types, constants | {"FILTERED": filtered}, vocabulary.WARPS, 3, fused=False
        )
    types = _types(
        {"logits peaks totals": "fp32", "temperatures best out": "fp64", "best_id": "i64"}, "rows tiles",
        aligned="vocabulary",
    )  # fmt: skip
    yield Build("draw, pick", sampling.pick_kernel, types, {}, 4, 3, fused=False)
    types = _types({"logits peaks totals": "fp32"}, "tiles", aligned="row_stride vocabulary")
    yield Build("log-sum-exp", vocabulary.tile_kernel, types, constants, vocabulary.WARPS, 3, fused=False)
    types = _types({"peaks totals out": "fp32"}, "tiles")
    yield Build("log-sum-exp merge", vocabulary.fold_kernel, types, {}, 4, 3, fused=False)
    types = _types({"logits log_sums sums": "fp32"}, "tiles", aligned="vocabulary")
    yield Build("token scores", token_scores.entropy_kernel, types, constants, vocabulary.WARPS, 3)
    types = _types(
        {"logits entropies log_sums logprob_grads entropy_grads": "fp32", "targets": "i64"},
        "",
        "temperature",
        "vocabulary",
    )
    yield Build("token scores backward", token_scores.gradient_kernel, types, constants, vocabulary.WARPS, 3)

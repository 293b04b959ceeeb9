"""Case: one kernel on inputs of a model's shape, with what torch does instead and what it cannot do without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine import cuda, kv_rows
from ..engine.errors import ConfigError
from ..engine.flashinfer import FlashInfer
from ..engine.ops import FLOAT8_CAPABILITY, Spans
from ..triton_kernels import (
    activation,
    attention,
    attention_backward,
    linear,
    norm,
    rotary,
    sampling,
    token_scores,
    vocabulary,
)
from .costs import Cost
from .kernel_costs import (
    Heads,
    attention_backward_cost,
    attention_cost,
    group_cost,
    move_kv_cost,
    moved,
    product_cost,
    turn_and_write_cost,
)

__all__ = ["SIZES", "Case", "Sizes", "cases"]

PAGE = 16
EPS = 1e-6
HALF = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """A model's shape and how much of it is run.

    rows: of a prefill's products. few: rows of a decode step's products, and sequences of one. context: tokens that
    they attend to. prompt: tokens of a prefill's attention. scored: rows of logits.
    """

    heads: Heads
    hidden: int
    mlp: int
    vocabulary: int
    rows: int
    few: tuple[int, ...]
    context: int
    prompt: int
    scored: int


SIZES = {
    # Qwen2.5-7B
    "full": Sizes(Heads(28, 4, 128), 3584, 18944, 152064, 4096, (1, 8, 32, 128), 6144, 6144, 256),
    "tiny": Sizes(Heads(4, 2, 16), 64, 128, 300, 20, (1, 2), 40, 40, 3),
}


@dataclass(frozen=True)
class Case:
    """kernel, rows, context: what it is called. ours: calls the kernel as the engine does. torch: None where torch has
    nothing alike. cost: see kernel_costs.py. dtype: of weights or KV where there are any. engine: what runs it.
    """

    kernel: str
    rows: int
    context: int
    ours: Callable[[], object]
    torch: Callable[[], object] | None
    cost: Cost
    dtype: str = "bfloat16"
    engine: str = "triton"


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One after the other, so that the inputs of one are gone before the next one's are made."""
    torch.manual_seed(1)
    yield from _products(sizes, device)
    yield from _sums(sizes, device)
    yield from _attention(sizes, device)
    yield from _elementwise(sizes, device)
    yield from _vocabulary(sizes, device)


def _products(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    inputs, outputs = sizes.hidden, sizes.mlp
    by_cuda = _has_cuda_kernels(device)
    weight = torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5).to(HALF)
    for rows in (*sizes.few, sizes.rows):
        x = torch.randn(rows, inputs, device=device)
        narrow = x.to(HALF)  # torch is spared the rounding

        def theirs(narrow: Tensor = narrow) -> Tensor:
            return F.linear(narrow, weight)

        cost = product_cost(rows, inputs, outputs, HALF.itemsize)
        for name, exact in (("linear", False), ("linear exact", True)):
            run = partial(linear.linear, x, weight, None, exact=exact)
            yield Case(name, rows, 0, run, theirs, cost)
        if by_cuda and cuda.fits_gemv(x, weight):
            yield Case("gemv", rows, 0, partial(cuda.gemv, x, weight, None, None), theirs, cost, engine="cuda")
    scales = torch.rand(outputs, device=device)
    for name, dtype in (("int8", torch.int8), *((("fp8", torch.float8_e4m3fn),) if _has_float8(device) else ())):
        codes = torch.randint(-127, 128, weight.shape, device=device).to(dtype)
        for rows in (*sizes.few, sizes.rows):
            x = torch.randn(rows, inputs, device=device)
            cost = product_cost(rows, inputs, outputs, codes.element_size())
            yield Case("linear", rows, 0, partial(linear.scaled_linear, x, codes, scales, None), None, cost, name)
            if by_cuda and cuda.fits_gemv(x, codes):
                run = partial(cuda.gemv, x, codes, scales, None)
                yield Case("gemv", rows, 0, run, None, cost, name, engine="cuda")


def _sums(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Two ranks on one GPU, each on a stream of its own: what a sum takes beside the way between GPUs."""
    if not _has_cuda_kernels(device):
        return
    capacity, side = max(sizes.few[-1], sizes.rows) * sizes.hidden, torch.cuda.Stream()  # type: ignore[no-untyped-call]
    regions = [cuda.peer_region(capacity)[0] for _ in range(2)]
    for rows in (*sizes.few, sizes.rows):
        parts = torch.randn(2, rows, sizes.hidden, device=device)
        out = torch.empty_like(parts)

        def run(parts: Tensor = parts, out: Tensor = out) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                cuda.all_reduce(parts[1], out[1], capacity, regions, 1, two_shot=False)
            cuda.all_reduce(parts[0], out[0], capacity, regions, 0, two_shot=False)
            torch.cuda.current_stream().wait_stream(side)

        theirs = partial(torch.add, parts[0], parts[1])
        yield Case("all_reduce", rows, 0, run, theirs, moved(parts.numel(), 2), "float32", engine="cuda")


class _Pages:
    """Sequences of `length` tokens each in pages of their own, the last `rows` of them asked; and the same, dense."""

    def __init__(self, sizes: Sizes, sequences: int, rows: int, length: int, device: torch.device) -> None:
        heads, each = sizes.heads, -(-length // PAGE)
        shape = (sequences * each, heads.kv, PAGE, heads.dim)
        self.key, self.value = (torch.randn(shape, device=device, dtype=HALF) for _ in range(2))
        numbers = torch.randperm(sequences * each, device=device).view(sequences, each)
        self.tables = numbers.int()
        self.starts = torch.arange(sequences + 1, device=device, dtype=torch.int32) * rows
        self.lengths = torch.full((sequences,), length, device=device, dtype=torch.int32)
        self.query = torch.randn(sequences * rows, heads.query, heads.dim, device=device)
        self.spans = Spans(self.starts, self.lengths, self.tables)
        self.scale = heads.dim**-0.5
        self.dense_query = self.query.to(HALF).view(sequences, rows, heads.query, heads.dim).transpose(1, 2)
        self.dense_key, self.dense_value = (
            pages[numbers].transpose(2, 3).flatten(1, 2)[:, :length].transpose(1, 2) for pages in (self.key, self.value)
        )

    def ours(self, *, few_rows: bool, exact: bool = False, log_sums: Tensor | None = None) -> Tensor:
        return attention.paged_attention(
            self.query, self.key, self.value, self.starts, self.lengths, self.tables, self.scale, few_rows=few_rows,
            exact=exact, log_sums=log_sums,
        )  # fmt: skip

    def of_group(self) -> Callable[[], Tensor]:
        """Sequences that begin with the pages of the first, all but its last tile; a step finds that for all layers."""
        own = -(-attention.TILE // PAGE)
        tables = self.tables.clone()
        tables[1:, : max(tables.shape[1] - own, 0)] = tables[0, : max(tables.shape[1] - own, 0)]
        arrays = self.starts, self.lengths, tables
        shared = attention.SharedPrefix.find(len(self.query), *arrays, PAGE)
        return lambda: attention.paged_attention(
            self.query, self.key, self.value, *arrays, self.scale, few_rows=True, shared=shared
        )  # fmt: skip

    def in_float8(self) -> None:
        self.key, self.value = (kv_rows.pack(pages, torch.float8_e4m3fn) for pages in (self.key, self.value))

    def by_cuda(self) -> Tensor:
        """One row per sequence."""
        peaks, totals, partials, tile = cuda.paged_decode_partials(
            self.query, self.key, self.value, self.lengths, self.tables, self.scale * attention.LOG2E
        )
        return attention.merge_tiles(peaks, totals, partials, self.starts, self.lengths, tile)

    def by_flashinfer(self, attend: FlashInfer) -> Tensor:
        """The first call plans, as a step does; the others are what its further layers take."""
        return attend(self.query, self.key, self.value, self.spans, self.scale)

    def torch(self) -> Tensor:
        causal = self.dense_query.shape[2] > 1
        return F.scaled_dot_product_attention(
            self.dense_query, self.dense_key, self.dense_value, is_causal=causal, enable_gqa=True
        )


def _has_cuda_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and cuda.unavailable() is None


def _has_float8(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def _flashinfer(head_dim: int, device: torch.device) -> FlashInfer | None:
    """None where it is not installed, or doesn't know such heads."""
    try:
        return FlashInfer(HALF, head_dim, device)
    except ConfigError:
        return None


def _attention(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    heads, context, prompt = sizes.heads, sizes.context, sizes.prompt
    by_cuda, flash = _has_cuda_kernels(device), _flashinfer(heads.dim, device)
    for batch in sizes.few:
        step = _Pages(sizes, batch, 1, context, device)
        cost = attention_cost([(1, context)] * batch, heads, HALF.itemsize)
        for name, exact in (("decode", False), ("decode exact", True)):
            run = lambda step=step, exact=exact: step.ours(few_rows=True, exact=exact)  # noqa: E731
            yield Case(f"attention {name}", batch, context, run, step.torch, cost)
        if by_cuda and cuda.fits_decode(step.query, step.key, batch):
            yield Case("paged_decode", batch, context, step.by_cuda, step.torch, cost, engine="cuda")
        if flash is not None:
            theirs = partial(step.by_flashinfer, flash)
            yield Case("attention decode", batch, context, theirs, step.torch, cost, engine="flashinfer")
        if batch > 1:
            own = min(context, attention.TILE)
            cost = group_cost(batch, context, context - own, heads, HALF.itemsize)
            yield Case("attention group", batch, context, step.of_group(), step.torch, cost)
        if _has_float8(device):
            step.in_float8()
            cost = attention_cost([(1, context)] * batch, heads, 1)
            yield Case("attention decode", batch, context, partial(step.ours, few_rows=True), None, cost, "fp8")
    whole = _Pages(sizes, 1, prompt, prompt, device)
    cost = attention_cost([(prompt, prompt)], heads, HALF.itemsize)
    yield Case("attention prefill", prompt, prompt, lambda: whole.ours(few_rows=False), whole.torch, cost)
    if flash is not None:
        theirs = partial(whole.by_flashinfer, flash)
        yield Case("attention prefill", prompt, prompt, theirs, whole.torch, cost, engine="flashinfer")
    log_sums = torch.empty(prompt, heads.query, device=device)
    out = whole.ours(few_rows=False, log_sums=log_sums)
    grad = torch.randn_like(out)
    dense = whole.dense_query, whole.dense_key, whole.dense_value
    key, value = (x[0].transpose(0, 1).unsqueeze(2).contiguous() for x in dense[1:])
    rows = torch.arange(prompt, device=device, dtype=torch.int32).unsqueeze(0)  # pages of one token, as in training

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        return attention_backward.paged_attention_backward(
            grad, whole.query, out, log_sums, key, value, whole.starts, whole.lengths, rows, whole.scale
        )

    inputs = [x.detach().requires_grad_() for x in dense]
    result = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True, enable_gqa=True)

    def by_torch() -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, inputs, torch.ones_like(result), retain_graph=True)

    cost = attention_backward_cost([(prompt, prompt)], heads, HALF.itemsize)
    yield Case("attention backward", prompt, prompt, backward, by_torch, cost)


def _elementwise(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    rows, hidden, heads = sizes.rows, sizes.hidden, sizes.heads
    x, grad = (torch.randn(rows, hidden, device=device) for _ in range(2))
    weight = torch.rand(hidden, device=device).to(HALF)
    full = weight.float()
    run: Callable[[], object] = lambda: norm.rms_norm(x, weight, EPS)  # noqa: E731
    yield Case("norm", rows, 0, run, lambda: F.rms_norm(x, (hidden,), full, EPS), moved(x.numel(), 2), "float32")
    run = lambda: norm.add_rms_norm(x, grad, weight, EPS)  # noqa: E731
    apart = lambda: F.rms_norm(x + grad, (hidden,), full, EPS)  # noqa: E731
    yield Case("add and norm", rows, 0, run, apart, moved(x.numel(), 4), "float32")
    run = lambda: norm.rms_norm_backward(grad, x, weight, EPS)  # noqa: E731
    yield Case("norm backward", rows, 0, run, None, moved(x.numel(), 3), "float32")
    run = lambda: norm.rms_norm_backward(grad, x, weight, EPS, x)  # noqa: E731
    yield Case("add and norm backward", rows, 0, run, None, moved(x.numel(), 4), "float32")
    gate, up, grad = (torch.randn(rows, sizes.mlp, device=device) for _ in range(3))
    run = lambda: activation.silu_product(gate, up)  # noqa: E731
    yield Case("silu product", rows, 0, run, lambda: F.silu(gate) * up, moved(gate.numel(), 3), "float32")
    run = lambda: activation.silu_product_backward(grad, gate, up)  # noqa: E731
    yield Case("silu product backward", rows, 0, run, None, moved(gate.numel(), 5), "float32")
    query = torch.randn(rows, heads.query, heads.dim, device=device)
    cos, sin = (torch.randn(rows, heads.dim // 2, device=device) for _ in range(2))
    positions = torch.arange(rows, device=device)
    run = lambda: rotary.rotate(query, positions, cos, sin)  # noqa: E731
    yield Case("rotate", rows, 0, run, None, moved(query.numel(), 2), "float32")
    key, value = torch.randn(2, rows, heads.kv, heads.dim, device=device)
    shape = (-(-rows // PAGE), heads.kv, PAGE, heads.dim)
    key_pages, value_pages = (torch.empty(shape, device=device, dtype=HALF) for _ in range(2))
    each = torch.rand(heads.dim, device=device).to(HALF)
    cost = turn_and_write_cost(rows, heads, HALF.itemsize)
    for name, of_heads in (("turn and write KV", None), ("turn and write KV, normed", each)):
        norms, arrays = (of_heads, of_heads, EPS), (positions, cos, sin, key_pages, value_pages, positions)
        yield Case(name, rows, 0, partial(rotary.turn_and_write, query, key, value, *norms, *arrays), None, cost)
    half = rows // 2
    sources, targets = positions[:half], positions[half : 2 * half]
    run = lambda: rotary.move_kv(key_pages, value_pages, sources, targets, sources, targets, cos, sin)  # noqa: E731
    yield Case("move KV", half, 0, run, None, move_kv_cost(half, heads, HALF.itemsize))


def _vocabulary(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    rows = sizes.scored
    logits = torch.randn(rows, sizes.vocabulary, device=device)
    ones = torch.ones(rows, device=device)
    targets = torch.zeros(rows, dtype=torch.int64, device=device)

    def theirs() -> Tensor:
        return logits.logsumexp(dim=1)

    yield Case(
        "log-sum-exp", rows, 0, lambda: vocabulary.log_sum_exp(logits), theirs, moved(logits.numel(), 1), "float32"
    )

    keys, on, off = torch.arange(rows, device=device), torch.ones_like(targets), torch.zeros_like(targets)
    depths = torch.full((rows,), -math.inf, dtype=torch.float64, device=device)

    def draw(top_p: float) -> Tensor:
        p, temperatures, cut = torch.full_like(depths, top_p), torch.full_like(depths, 0.7), top_p < 1.0
        return sampling.draw(logits, keys, on, off, p, depths, temperatures, cut=cut, filtered=cut)

    for name, top_p in (("draw", 1.0), ("draw top-p", 0.95)):
        yield Case(name, rows, 0, lambda p=top_p: draw(p), None, moved(logits.numel(), 1), "float32")  # type: ignore[misc]
    run: Callable[[], object] = lambda: token_scores.token_scores(logits, targets, 1.0)  # noqa: E731
    yield Case("token scores", rows, 0, run, lambda: logits.log_softmax(dim=1), moved(logits.numel(), 1), "float32")
    _, entropies, log_sums = token_scores.token_scores(logits, targets, 1.0)
    run = lambda: token_scores.token_scores_grad(  # noqa: E731
        logits, targets, 1.0, entropies, log_sums, ones, ones
    )
    yield Case("token scores backward", rows, 0, run, None, moved(logits.numel(), 2), "float32")

"""The gradients of linear, attention and the rest: accuracy against float64, and one order of every sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from palimpsest.engine import cpu, cpu_backward, reference
from palimpsest.engine.autograd import Differentiable
from palimpsest.engine.ops import Spans, Turn
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from torch import Tensor

Op = Callable[..., Tensor]
OnEachIsa = Callable[[Callable[[], Tensor]], list[Tensor]]
KERNELS = Differentiable(cpu, cpu_backward)
WEIGHTS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# rows, in, out: below, at and above a block of the sum, a vector, a tile and a task
SHAPES = [(1, 1, 1), (3, 33, 255), (13, 96, 31), (47, 97, 513), (256, 48, 17), (300, 31, 70), (530, 200, 65)]


def gradients(op: Op, inputs: Sequence[Tensor], towards: Tensor, *rest: object) -> list[Tensor]:
    """Those of sum(op(*inputs, *rest) * towards)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = op(*leaves, *rest)
    return list(torch.autograd.grad(result, leaves, towards.to(result.dtype)))


def assert_exact(kernel: Op, plain: Op, inputs: Sequence[Tensor], towards: Tensor, *rest: object) -> None:
    exact = gradients(plain, [x.double() for x in inputs], towards, *rest)
    for ours, theirs, truth in zip(
        gradients(kernel, inputs, towards, *rest), gradients(plain, inputs, towards, *rest), exact, strict=True
    ):
        assert_as_exact_as_torch(ours, theirs, truth)


# ---- linear ----


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "size", "out"), SHAPES)
def test_linear(isa: str, rows: int, size: int, out: int, bias: bool) -> None:
    inputs = [torch.randn(rows, size), torch.randn(out, size), torch.randn(out)]
    rest = [] if bias else [None]
    assert_exact(KERNELS.linear, reference.linear, inputs[: 2 + bias], torch.randn(rows, out), *rest)


def test_linear_in_bfloat16_is_that_in_float32_rounded_once(isa: str) -> None:
    x, weight, bias, towards = torch.randn(70, 90), torch.randn(50, 90), torch.randn(50), torch.randn(70, 50)
    narrow = [weight.bfloat16(), bias.bfloat16()]
    ours = gradients(KERNELS.linear, [x, *narrow], towards)
    wide = gradients(KERNELS.linear, [x, *(w.float() for w in narrow)], towards)
    assert_same_bits([ours[0], wide[0]])
    for a, b in zip(ours[1:], wide[1:], strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16())


def linear_grads(grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    parts = (cpu_backward.linear_input_grad(grad, weight), cpu_backward.linear_weight_grad(grad, x))
    return torch.cat([p.flatten() for p in (*parts, cpu_backward.column_sums(grad))])


@WEIGHTS
@pytest.mark.parametrize(("rows", "size", "out"), [(20, 40, 300), (600, 500, 350)])
def test_linear_has_one_order(on_each_isa: OnEachIsa, rows: int, size: int, out: int, dtype: torch.dtype) -> None:
    grad, weight, x = torch.randn(rows, out), torch.randn(out, size).to(dtype), torch.randn(rows, size + 3)[:, 2:-1]
    torch.set_num_threads(1)
    results = on_each_isa(lambda: linear_grads(grad, weight, x))
    torch.set_num_threads(2)
    assert_same_bits([*results, linear_grads(grad, weight, x)])
    assert_same_bits(
        [cpu_backward.linear_input_grad(grad, weight)[7:9], cpu_backward.linear_input_grad(grad[7:9].clone(), weight)]
    )


def chain(left: Tensor, right: Tensor) -> Tensor:
    """left^T right as one FMA chain per block of 256 rows, spelled out.

    (A float64 sum of a float32 and an exact product rounds like an FMA, but once in 2^29.)
    """
    blocks = []
    for some, other in zip(left.double().split(256), right.double().split(256), strict=True):
        total = torch.zeros(left.shape[1], right.shape[1])
        for a, b in zip(some, other, strict=True):
            total = (total.double() + a[:, None] * b).float()
        blocks.append(total)
    result = blocks[0]
    for block in blocks[1:]:
        result = result + block
    return result


def test_linear_sums_up_in_blocks_of_256(isa: str) -> None:
    grad, x, weight = torch.randn(600, 20), torch.randn(600, 35), torch.randn(20, 35)
    assert_same_bits([cpu_backward.linear_weight_grad(grad, x), chain(grad, x)])
    assert_same_bits([cpu_backward.column_sums(x), chain(torch.ones(600, 1), x)[0]])
    assert_same_bits([cpu_backward.linear_input_grad(grad[:9].clone(), weight), chain(grad[:9].t(), weight)])


def test_linear_without_rows(isa: str) -> None:
    x, weight, bias = gradients(
        KERNELS.linear, [torch.empty(0, 4), torch.randn(3, 4), torch.randn(3)], torch.empty(0, 3)
    )
    assert x.shape == (0, 4) and weight.eq(0).all() and weight.shape == (3, 4) and bias.eq(0).all()


# ---- passes over activations ----


@pytest.mark.parametrize("n", [1, 16, 100, 577])
def test_silu_product(isa: str, n: int) -> None:
    inputs = [torch.randn(70, n) * 4, torch.randn(70, n)]
    assert_exact(KERNELS.silu_product, reference.silu_product, inputs, torch.randn(70, n))


@pytest.mark.parametrize("n", [1, 15, 300, 5000])
def test_log_sum_exp(isa: str, n: int) -> None:
    assert_exact(KERNELS.log_sum_exp, reference.log_sum_exp, [torch.randn(9, n) * 5], torch.randn(9))


def test_passes_have_one_order(on_each_isa: OnEachIsa) -> None:
    """The sizes give each of two threads a share that does not end with a whole vector."""
    gate, up, towards, logits = (torch.randn(333, 333) for _ in range(4))

    def compute() -> Tensor:
        found = gradients(KERNELS.silu_product, [gate, up], towards)
        found += gradients(KERNELS.log_sum_exp, [logits], towards[0])
        found += gradients(KERNELS.rms_norm, [gate, up[0]], towards, 1e-5)
        return torch.cat([x.flatten() for x in found])

    torch.set_num_threads(1)
    results = on_each_isa(compute)
    torch.set_num_threads(2)
    # The norm's own kernel is not part of its gradient.
    assert_same_bits([*results, compute()])


# ---- attention ----


class Case:
    """Query, key and value of a batch of spans, with pages in a random order; slots that nobody wrote hold NaN.

    lengths: one span each. shared: the first span is a prefix of this many tokens (whole pages) that all others go on
    from. cuts: the spans' lengths if one sequence is computed in several spans.
    """

    def __init__(
        self, lengths: Sequence[int], *, heads: int = 6, kv_heads: int = 2, head_dim: int = 64, page_size: int = 16,
        shared: int = 0, cuts: Sequence[int] = (), seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        spans = [(n, n) for n in lengths]  # tokens computed, tokens seen
        if shared:
            assert shared % page_size == 0
            spans = [(shared, shared), *((n, shared + n) for n in lengths)]
        if cuts:
            spans = [(n, sum(cuts[: i + 1])) for i, n in enumerate(cuts)]
        owned = [-(-seen // page_size) for _, seen in spans]
        order = torch.randperm(sum(owned) + 2, generator=generator).int()
        table = torch.zeros(len(spans), max(owned, default=0) + 1, dtype=torch.int32)
        slots = []
        for i, (tokens, seen) in enumerate(spans):
            table[i, : owned[i]] = order[sum(owned[:i]) : sum(owned[: i + 1])]
            if cuts:
                table[i, : owned[i]] = order[: owned[i]]
            elif shared:
                table[i, : shared // page_size] = order[: shared // page_size]
            slots += [int(table[i, p // page_size]) * page_size + p % page_size for p in range(seen - tokens, seen)]
        self.slots = torch.tensor(slots, dtype=torch.int64)
        starts = torch.tensor([0, *(tokens for tokens, _ in spans)]).cumsum(0).int()
        self.spans = Spans(starts, torch.tensor([seen for _, seen in spans], dtype=torch.int32), table)
        self.page_shape = (len(order), kv_heads, page_size, head_dim)
        total = len(slots)
        self.inputs = [torch.randn(total, n, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads)]
        self.towards = torch.randn(total, heads, head_dim, generator=generator)

    def run(self, op: Op, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None) -> list[Tensor]:
        pages = [torch.full(self.page_shape, math.nan, dtype=kv_dtype or dtype) for _ in range(2)]
        inputs = [x.to(dtype) for x in self.inputs]
        half = inputs[0].shape[2] // 2
        unturned = Turn(torch.zeros_like(self.slots), torch.ones(1, half), torch.zeros(1, half))
        return gradients(op, inputs, self.towards, unturned, *pages, self.slots, self.spans, 0.17)

    def flat(self) -> Tensor:
        return torch.cat([x.flatten() for x in self.run(KERNELS.attend)])

    def assert_exact(self) -> None:
        exact = self.run(reference.attend, torch.float64)
        for ours, plain, truth in zip(self.run(KERNELS.attend), self.run(reference.attend), exact, strict=True):
            assert_as_exact_as_torch(ours, plain, truth)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(9, 3, 64, 16), (4, 4, 16, 16), (14, 2, 64, 8), (7, 1, 12, 5), (2, 1, 80, 32), (3, 1, 128, 128), (96, 1, 6, 3)],
)
def test_attention(isa: str, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    lengths = [1, 129, 70, 200]
    Case(lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size).assert_exact()


def test_attention_over_a_shared_prefix(isa: str) -> None:
    """Every span's part of the gradient reaches the keys that were computed once."""
    Case([40, 1, 150], shared=145, page_size=5).assert_exact()


def test_attention_of_a_long_sequence(isa: str) -> None:
    Case([1100], heads=2, kv_heads=1, head_dim=32).assert_exact()


def test_attention_with_large_scores(isa: str) -> None:
    case = Case([150, 60])
    case.inputs[0] *= 30
    case.assert_exact()


def test_attention_over_bfloat16_pages(isa: str) -> None:
    """The gradient is that at the rounded keys and values, to the bit."""
    case = Case([100, 140])
    narrow = case.run(KERNELS.attend, kv_dtype=torch.bfloat16)
    case.inputs[1:] = [x.bfloat16().float() for x in case.inputs[1:]]
    assert_same_bits([torch.cat([x.flatten() for x in grads]) for grads in (narrow, case.run(KERNELS.attend))])


def test_attention_has_one_order(on_each_isa: OnEachIsa) -> None:
    case = Case([150, 33, 1], head_dim=48, shared=160, page_size=8)
    torch.set_num_threads(1)
    results = on_each_isa(case.flat)
    torch.set_num_threads(2)
    assert_same_bits([*results, case.flat()])


def test_attention_does_not_depend_on_company_or_pages(isa: str) -> None:
    case = Case([170, 90], page_size=16)
    alone = Case([90], page_size=7, seed=3)
    alone.inputs, alone.towards = [x[170:].clone() for x in case.inputs], case.towards[170:].clone()
    for together, by_itself in zip(case.run(KERNELS.attend), alone.run(KERNELS.attend), strict=True):
        assert_same_bits([together[170:], by_itself])


def test_where_a_sequence_is_cut_into_spans(isa: str) -> None:
    """Queries never feel it; keys and values do not when it is between two blocks (of 32 tokens: 3 heads a group)."""
    whole = Case([300])

    def cut(*cuts: int) -> list[Tensor]:
        case = Case([], cuts=cuts)
        case.inputs, case.towards = whole.inputs, whole.towards
        return case.run(KERNELS.attend)

    for ours, same in zip(whole.run(KERNELS.attend), cut(64, 96, 140), strict=True):
        assert_same_bits([ours, same])
    anywhere = cut(50, 250)
    for ours, same in zip(anywhere, cut(50, 78, 172), strict=True):
        assert_same_bits([ours, same])
    assert_same_bits([whole.run(KERNELS.attend)[0], anywhere[0]])


def test_attention_of_nothing(isa: str) -> None:
    assert [x.shape[0] for x in Case([]).run(KERNELS.attend)] == [0, 0, 0]
    case = Case([3, 0, 2])
    assert all(x.isfinite().all() for x in case.run(KERNELS.attend))


def test_a_row_seen_at_two_positions_is_refused(isa: str) -> None:
    """Two threads would add to its gradient in any order."""
    case = Case([32, 16], page_size=16)
    first, second = case.spans.pages
    second[:2] = torch.stack([first[1], second[0]])  # goes on from the second page of the other span
    case.spans.kv_length[1] = 32
    with pytest.raises(ValueError, match="row 16 is seen at position 16 and at 0"):
        case.run(KERNELS.attend)


def test_other_layouts_are_refused(isa: str) -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    for call in (
        lambda: cpu_backward.linear_input_grad(x, weight),
        lambda: cpu_backward.linear_weight_grad(x.t(), torch.randn(8, 3)),
        lambda: cpu_backward.linear_weight_grad(x, weight),
        lambda: cpu_backward.column_sums(x.double()),
        lambda: cpu_backward.silu_product_grads(x, x, weight),
        lambda: cpu_backward.log_sum_exp_grad(x, x[0], x[:, 0]),
        lambda: cpu.paged_attention(*_attention_arguments(torch.empty(3, 6, 1))),
    ):
        with pytest.raises(ValueError, match=r"cpu\.\w+ does not take"):
            call()


def _attention_arguments(stats: Tensor) -> tuple[object, ...]:
    case = Case([3])
    pages = [torch.zeros(case.page_shape) for _ in range(2)]
    return case.inputs[0], *pages, case.spans, 0.1, stats

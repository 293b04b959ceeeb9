"""Linear layers and paged attention against their twins, and rows that depend on nothing but themselves."""

from __future__ import annotations

import pytest
import torch
from palimpsest.engine import reference
from palimpsest.engine.ops import Spans
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch
from torch import Tensor


def judge(kernel: Tensor, twin: Tensor, exact: Tensor) -> None:
    assert_as_exact_as_torch(kernel.cpu(), twin.cpu(), exact.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 8, 8), (1, 200, 33), (17, 65, 130), (70, 64, 64)])
def test_linear(device: torch.device, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    from palimpsest.triton_kernels.linear import linear

    x = torch.randn(rows, inputs + 8, device=device)[:, :inputs]
    weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((outputs, inputs), (outputs,)))
    rounded = x.to(dtype).float()  # bfloat16 weights: so is x
    exact = reference.linear(rounded.double(), weight, bias)
    judge(linear(x, weight, bias), reference.linear(rounded, weight, bias), exact)
    judge(linear(x, weight, None), reference.linear(rounded, weight, None), exact - bias.double())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [3, 70])
def test_scaled_linear(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    from palimpsest.triton_kernels.linear import scaled_linear

    _require_float8(device, dtype)
    x, scales, bias = (torch.rand(*shape, device=device) - 0.5 for shape in ((rows, 100), (37,), (37,)))
    codes = torch.randint(-127, 128, (37, 100), device=device).to(dtype)
    codes[0, :4] = torch.tensor([0, 2**-9, -(2**-9), 7 * 2**-9], device=device).to(dtype)  # e4m3: subnormal
    exact = reference.scaled_linear(x.double(), codes, scales, bias)
    ours = scaled_linear(x, codes, scales, bias)
    judge(ours, reference.scaled_linear(x, codes, scales, bias), exact)
    if device.type == "cuda":  # the interpreter multiplies by numpy, whose bits depend on the shape of a block
        assert torch.equal(ours[-1:], scaled_linear(x[-1:], codes, scales, bias))


def test_an_output_is_summed_alike_for_every_number_of_rows() -> None:
    from palimpsest.triton_kernels.tuning import linear_blocks

    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        assert len({linear_blocks(rows, dtype).k for rows in range(1, 400)}) == 1


def _require_float8(device: torch.device, dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3")


class Case:
    """Sequences of `lengths` tokens, the last `counts` asked, in pages dealt out at random; NaN where unwritten."""

    def __init__(
        self, device: torch.device, counts: list[int], lengths: list[int], heads: int, kv_heads: int, dim: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        page_size = 8
        needed = [-(-n // page_size) for n in lengths]
        order = torch.randperm(sum(needed) + 2)
        table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
        pools = [torch.full((len(order), kv_heads, page_size, dim), torch.nan).to(dtype) for _ in range(2)]
        for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            table[i, :count] = order[sum(needed[:i]) : sum(needed[:i]) + count]
            tokens = torch.arange(length)
            slots = table[i].long()[tokens // page_size] * page_size + tokens % page_size
            reference.write_kv(*torch.randn(2, length, kv_heads, dim), *pools, slots)
        self.query = torch.randn(sum(counts), heads, dim, device=device)
        self.key, self.value = (pool.to(device) for pool in pools)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        self.spans = Spans(*(t.to(device) for t in (starts, torch.tensor(lengths).int(), table)))
        self.scale = dim**-0.5

    def run(self, **options: object) -> Tensor:
        from palimpsest.triton_kernels.attention import paged_attention

        spans = self.spans
        arrays = spans.query_start, spans.kv_length, spans.pages
        return paged_attention(self.query, self.key, self.value, *arrays, self.scale, **options)  # type: ignore[arg-type]

    def twin(self, dtype: torch.dtype) -> Tensor:
        query = self.query if self.key.dtype == torch.float32 else self.query.bfloat16()
        return reference.paged_attention(query.to(dtype), self.key, self.value, self.spans, self.scale)


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palimpsest.triton_kernels.attention.TILE", 64)


@pytest.mark.parametrize("few_rows", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (6, 2, 64, torch.float32),
        (7, 1, 80, torch.bfloat16),
        (2, 2, 16, torch.float32),
        (2, 1, 32, torch.float8_e4m3fn),
    ],
)
def test_attention(
    device: torch.device, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, few_rows: bool
) -> None:
    _require_float8(device, dtype)
    case = Case(device, [1, 5, 21], [130, 5, 70], heads, kv_heads, dim, dtype)
    result, exact = case.run(few_rows=few_rows), case.twin(torch.float64)
    if dtype == torch.float32:
        judge(result, case.twin(torch.float32), exact)
    else:  # weights are rounded to 8 bits before they meet the values: 2^-9 each, at random
        assert (result.double() - exact).abs().max() < 2**-8 * case.value.float().nan_to_num().abs().max()


def test_attention_over_nothing(device: torch.device) -> None:
    case = Case(device, [1], [3], 2, 1, 16, torch.float32)
    case.query = case.query[:0]
    assert case.run(few_rows=True).shape == (0, 2, 16)


def test_a_shared_prefix_read_once_gives_the_same_bits(device: torch.device) -> None:
    """Three sequences begin with the pages of the first: two tiles of 64 tokens."""
    from palimpsest.triton_kernels.attention import SharedPrefix

    case = Case(device, [1, 1, 1], [140, 150, 131], 4, 2, 16, torch.float32)
    case.spans.pages[1:, :16] = case.spans.pages[0, :16]
    numbers = [[0, 3], [128]]
    starts, shared = (torch.tensor(n, dtype=torch.int32, device=device) for n in numbers)
    skipped = torch.full((3,), 2, dtype=torch.int32, device=device)
    prefix = SharedPrefix(starts, shared, case.spans.pages[:1, :16].contiguous(), skipped)
    assert torch.equal(case.run(few_rows=True, exact=True, shared=prefix), case.run(few_rows=True, exact=True))

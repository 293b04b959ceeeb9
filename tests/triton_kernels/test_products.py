"""Linear layers and paged attention against their twins, and rows that depend on nothing but themselves."""

from __future__ import annotations

import pytest
import torch
from palimpsest.engine import reference
from palimpsest.engine.ops import Spans
from palimpsest.tests.triton_kernels.test_elementwise import assert_like_twin
from palimpsest.triton_kernels.tuning import (
    SHARED_BYTES,
    SHARED_BYTES_OF_OTHERS,
    attention_blocks,
    linear_blocks,
    shared_bytes,
)
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 8, 8), (1, 200, 33), (17, 65, 130), (70, 64, 64)])
def test_linear(device: torch.device, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    from palimpsest.triton_kernels.linear import linear

    x = torch.randn(rows, inputs + 8, device=device)[:, :inputs]
    weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((outputs, inputs), (outputs,)))
    rounded = x.to(dtype).float()  # bfloat16 weights: so is x
    exact = reference.linear(rounded.double(), weight, bias)
    assert_like_twin(linear(x, weight, bias), reference.linear(rounded, weight, bias), exact)
    assert_like_twin(linear(x, weight, bias, exact=True), reference.linear(rounded, weight, bias), exact)
    if device.type == "cuda" and rows:  # see test_scaled_linear
        assert torch.equal(linear(x, weight, bias, exact=True)[-1:], linear(x[-1:], weight, bias, exact=True))
    assert_like_twin(linear(x, weight, None), reference.linear(rounded, weight, None), exact - bias.double())


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
    assert_like_twin(ours, reference.scaled_linear(x, codes, scales, bias), exact)
    if device.type == "cuda":  # the interpreter multiplies by numpy, whose bits depend on the shape of a block
        whole, alone = (scaled_linear(part, codes, scales, bias, exact=True) for part in (x, x[-1:]))
        assert torch.equal(whole[-1:], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shared", sorted({*SHARED_BYTES.values(), SHARED_BYTES_OF_OTHERS}))
def test_blocks_of_a_product(dtype: torch.dtype, shared: int) -> None:
    """Sums do not depend on the number of rows; what is loaded ahead fits every GPU."""
    chosen = [
        [linear_blocks(rows, dtype, exact=exact, shared=shared) for rows in range(1, 400)] for exact in (False, True)
    ]
    assert len({blocks.k for blocks in (*chosen[0], *chosen[1])}) == 1
    assert dtype == torch.float32 or all(blocks.m >= 64 for blocks in chosen[1])  # of wgmma, on a Hopper GPU
    for blocks in (*chosen[0], *chosen[1]):
        assert (blocks.m * 4 + blocks.n * dtype.itemsize) * blocks.k * (blocks.stages - 1) < shared


def test_blocks_of_attention_sum_few_rows_like_many() -> None:
    for dim, dtype in ((64, torch.float32), (128, torch.float32), (256, torch.bfloat16), (128, torch.float8_e4m3fn)):
        few, many = (attention_blocks(dim, 7, dtype, small=small) for small in (True, False))
        assert few.n == many.n and few.m < many.m


def test_shared_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for index, (capability, size) in enumerate((((8, 0), 163), ((9, 0), 227), ((8, 9), 99), ((12, 0), 99))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert shared_bytes(torch.device("cuda", 100 + index)) == size * 1024


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
        assert_like_twin(result, case.twin(torch.float32), exact)
    else:  # weights are rounded to 8 bits before they meet the values: 2^-9 each, at random
        assert (result.double() - exact).abs().max() < 2**-8 * case.value.float().nan_to_num().abs().max()


def test_attention_over_nothing(device: torch.device) -> None:
    case = Case(device, [1], [3], 2, 1, 16, torch.float32)
    case.query = case.query[:0]
    assert case.run(few_rows=True).shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_groups_share_is_read_once_with_the_same_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Spans 0 and 3 begin with the same two tiles of 64 tokens, 1 and 4 with one, 2 with that of nobody."""
    from palimpsest.triton_kernels.attention import SharedPrefix

    case = Case(device, [1, 3, 1, 1, 1], [140, 150, 131, 135, 70], 4, 2, 16, dtype)
    pages = case.spans.pages
    pages[3, :16], pages[4, :8] = pages[0, :16], pages[1, :8]
    shared = SharedPrefix.find(7, case.spans.query_start, case.spans.kv_length, pages, page_size=8)
    assert shared is not None
    assert shared.skipped.tolist() == [2, 1, 0, 2, 1]
    groups = [
        (shared.rows[shared.query_start[i] : shared.query_start[i + 1]].tolist(), int(shared.kv_length[i]))
        for i in range(5)
    ]
    assert sorted(groups) == [([], 0), ([], 0), ([0, 5], 128), ([1, 2, 3, 6], 64), ([4], 0)]
    plain = case.run(few_rows=True, exact=True)
    assert torch.equal(case.run(few_rows=True, exact=True, shared=shared), plain)
    # Of the followers the pages that they share are not read any more.
    read = torch.full_like(pages, len(case.key) - 1)
    for span, first in enumerate((0, 0, 0, 16, 8)):
        read[span, first:] = pages[span, first:]
    case.spans = Spans(case.spans.query_start, case.spans.kv_length, read)
    assert torch.equal(case.run(few_rows=True, exact=True, shared=shared), plain)


def test_nothing_is_looked_for_in_one_span_or_less_than_a_tile(device: torch.device) -> None:
    from palimpsest.triton_kernels.attention import SharedPrefix

    for counts, lengths in (([1], [200]), ([1, 1], [30, 30])):
        spans = Case(device, counts, lengths, 2, 2, 16, torch.float32).spans
        assert SharedPrefix.find(len(counts), spans.query_start, spans.kv_length, spans.pages, page_size=8) is None

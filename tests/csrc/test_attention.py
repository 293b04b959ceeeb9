"""paged_attention: accuracy against float64, and bits that do not depend on pages, span cuts, company or threads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from palimpsest.engine import cpu, kv_rows, reference
from palimpsest.engine.ops import Spans
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from torch import Tensor

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])


@dataclass
class Text:
    """The queries, keys and values of one sequence, [length, heads, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor


def text(length: int, heads: int = 6, kv_heads: int = 2, head_dim: int = 64) -> Text:
    return Text(*(torch.randn(length, n, head_dim) for n in (heads, kv_heads, kv_heads)))


def unwritten(page_count: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Pages full of NaN; of int8 the scales are."""
    shape = (page_count, kv_heads, page_size, kv_rows.columns(head_dim, dtype))
    return torch.full(shape, -1 if dtype == torch.int8 else math.nan, dtype=dtype)


def attend(
    texts: list[Text], counts: list[int], dtype: torch.dtype = torch.float32, page_size: int = 16, seed: int = 0,
    lengths: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Spans]:  # fmt: skip
    """Arguments of paged_attention for the last counts[i] tokens of the first lengths[i] of each text.

    Pages are dealt out in an order drawn from `seed`; slots that nobody wrote hold NaN.
    """
    lengths = lengths or [len(t.query) for t in texts]
    needed = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).int()
    _, kv_heads, head_dim = texts[0].key.shape
    pools = [unwritten(len(order), kv_heads, page_size, head_dim, dtype) for _ in range(2)]
    table = torch.zeros(len(texts), max(needed) + 1, dtype=torch.int32)
    for i, t in enumerate(texts):
        table[i, : needed[i]] = order[sum(needed[:i]) : sum(needed[: i + 1])]
        slots = [int(table[i, n // page_size]) * page_size + n % page_size for n in range(lengths[i])]
        reference.write_kv(t.key[: lengths[i]], t.value[: lengths[i]], *pools, torch.tensor(slots))
    query = torch.cat([t.query[n - c : n] for t, c, n in zip(texts, counts, lengths, strict=True)])
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return query, *pools, Spans(starts, torch.tensor(lengths, dtype=torch.int32), table)  # type: ignore[return-value]


def compute(*args: object, **options: object) -> Tensor:
    return cpu.paged_attention(*attend(*args, **options), 0.125)  # type: ignore[arg-type]


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(9, 3, 64, 16), (4, 4, 16, 16), (14, 2, 64, 8), (7, 1, 12, 5), (2, 1, 80, 32), (3, 1, 128, 128), (2, 2, 40, 3)],
)
def test_accuracy(isa: str, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> None:
    texts = [text(n, heads, kv_heads, head_dim) for n in (1, 129, 300, 70)]
    query, key, value, spans = attend(texts, [1, 1, 40, 70], dtype, page_size)
    result = cpu.paged_attention(query, key, value, spans, 0.3)
    exact = reference.paged_attention(query.double(), key, value, spans, 0.3)
    assert_as_exact_as_torch(result, reference.paged_attention(query, key, value, spans, 0.3), exact)


@DTYPES
def test_where_pages_lie_does_not_matter(isa: str, dtype: torch.dtype) -> None:
    texts = [text(290), text(33)]
    results = [compute(texts, [50, 1], dtype, size, seed) for size, seed in ((16, 0), (16, 1), (64, 2), (7, 3), (1, 4))]
    assert_same_bits(results)


@DTYPES
def test_cuts_company_and_threads_do_not_matter(isa: str, dtype: torch.dtype) -> None:
    one, other = text(400), text(150)
    torch.set_num_threads(1)
    whole = compute([one], [400], dtype)
    for start, end in (
        (0, 1),
        (0, 7),
        (37, 77),
        (126, 131),
        (128, 129),
        (130, 400),
        (255, 257),
        (399, 400),
        (383, 400),
    ):
        torch.set_num_threads(1 + start % 2)
        piece = compute([other, one], [150, end - start], dtype, lengths=[150, end])
        assert_same_bits([piece[150:], whole[start:end]])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_context_is_dealt_out_without_a_trace(isa: str, threads: int) -> None:
    """One token over many tiles is cut into pieces for two threads, eight sequences are not."""
    texts = [text(1500, 3, 1) for _ in range(8)]
    torch.set_num_threads(threads)
    together = compute(texts, [1] * 8)
    torch.set_num_threads(2)
    assert_same_bits([torch.cat([compute([t], [1]) for t in texts]), together])


@DTYPES
def test_instruction_sets_agree(
    on_each_isa: Callable[[Callable[[], Tensor]], list[Tensor]], dtype: torch.dtype
) -> None:
    texts = [text(200, head_dim=48), text(140, head_dim=48)]
    arguments = attend(texts, [30, 1], dtype)
    assert_same_bits(on_each_isa(lambda: cpu.paged_attention(*arguments, 0.125)))


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 6, 37])
def test_what_is_written_is_what_the_twin_writes(isa: str, head_dim: int, dtype: torch.dtype) -> None:
    """To the bit, wherever it goes: ties, zeros, tiny and huge numbers, and what is no number."""
    x = torch.randn(40, 3, head_dim) * torch.logspace(-20, 20, 40)[:, None, None]
    x[0], x[1], x[2, 0] = 0.0, 1e-31, torch.arange(head_dim) - 127.0 + 0.5
    pools = [[unwritten(9, 3, 5, head_dim, dtype) for _ in range(2)] for _ in range(2)]
    slots = torch.randperm(45)[:40]
    for op, pages in zip((cpu.write_kv, reference.write_kv), pools, strict=True):
        op(x, x.flip(0), *pages, slots)
    for ours, twin in zip(*pools, strict=True):
        assert torch.equal(ours.view(torch.uint8), twin.view(torch.uint8))
    if dtype == torch.int8:
        error = (kv_rows.unpack(kv_rows.pack(x, dtype), torch.float64) - x).abs()
        assert bool((error <= x.abs().amax(dim=2, keepdim=True) / 254 * (1 + 1e-6) + 1e-30).all())
        x[5, 0, 0], x[6, 1, 2] = math.nan, math.inf
        cpu.write_kv(x, x, *pools[0], slots)
        read = kv_rows.unpack(pools[0][0].flatten(0, 2), torch.float32)
        assert int(read.isfinite().all(dim=1).logical_not().sum()) == 15 + 2, "the slots not written, and two rows"


def test_large_scores(isa: str) -> None:
    """The largest score decides; nothing overflows, nothing becomes NaN."""
    t = text(200)
    t.query *= 1e3
    query, key, value, spans = attend([t], [200])
    exact = reference.paged_attention(query.double(), key, value, spans, 1.0)
    plain = reference.paged_attention(query, key, value, spans, 1.0)
    assert_as_exact_as_torch(cpu.paged_attention(query, key, value, spans, 1.0), plain, exact)


def test_strided_queries_and_empty_spans(isa: str) -> None:
    query, key, value, spans = attend([text(20), text(30)], [3, 2])
    wide = torch.randn(5, 10, 64)
    wide[:, 2:8] = query
    with_empty = Spans(
        torch.tensor([0, 3, 3, 5], dtype=torch.int32),
        spans.kv_length[[0, 0, 1]].contiguous(),
        spans.pages[[0, 0, 1]].contiguous(),
    )
    plain = cpu.paged_attention(query, key, value, spans, 0.125)
    assert_same_bits([cpu.paged_attention(wide[:, 2:8], key, value, with_empty, 0.125), plain])
    nothing = Spans(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1).int())
    assert cpu.paged_attention(query[:0], key, value, nothing, 0.125).shape == (0, 6, 64)


def test_spans_outside_of_their_pages_are_refused(isa: str) -> None:
    query, key, value, spans = attend([text(20)], [3])
    for bad in (
        Spans(spans.query_start, spans.kv_length + 100, spans.pages),
        Spans(spans.query_start, spans.kv_length * 0 + 2, spans.pages),
        Spans(spans.query_start, spans.kv_length, spans.pages + 99),
        Spans(spans.query_start, spans.kv_length, spans.pages - 99),
        Spans(spans.query_start + 1, spans.kv_length, spans.pages),
        Spans(spans.query_start, spans.kv_length.long(), spans.pages),
    ):
        with pytest.raises(ValueError, match="paged_attention"):
            cpu.paged_attention(query, key, value, bad, 0.125)
    with pytest.raises(ValueError, match="does not take"):
        cpu.paged_attention(query.transpose(0, 1), key, value, spans, 0.125)


def families(page_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Spans]:
    """Arguments of paged_attention for spans whose page tables branch like a tree, as the prefix index deals them out:
    prompts in pieces, drafts and single tokens."""
    draw = random.Random(page_size)
    tables: list[list[int]] = []
    lengths, counts, page_count = [], [], 0
    for _ in range(13):
        length = draw.choice([1, 130, 300, 513, 700])
        needed = -(-length // page_size)
        parent = draw.choice([[], *tables])[:needed]
        kept = parent[: draw.choice([needed, needed // 2, draw.randint(0, needed)])]
        tables.append(kept + list(range(page_count, page_count + needed - len(kept))))
        page_count += needed - len(kept)
        lengths.append(length)
        counts.append(min(length, draw.choice([1, 1, 1, 2, 3, 17, 150])))
    table = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for row, pages in zip(table, tables, strict=True):
        row[: len(pages)] = torch.tensor(pages)
    pools = [kv_rows.pack(torch.randn(page_count, 2, page_size, 32), dtype) for _ in range(2)]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    query = torch.randn(sum(counts), 6, 32)
    return query, pools[0], pools[1], Spans(starts, torch.tensor(lengths, dtype=torch.int32), table)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> Tensor:
    """paged_attention of each span alone."""
    results = []
    for i, count in enumerate(spans.query_start.diff().tolist()):
        start = int(spans.query_start[i])
        one = Spans(torch.tensor([0, count]).int(), spans.kv_length[i : i + 1], spans.pages[i : i + 1])
        results.append(cpu.paged_attention(query[start : start + count], key, value, one, 0.2))
    return torch.cat(results)


@DTYPES
@pytest.mark.parametrize("page_size", [16, 7, 128, 200])
def test_a_shared_prefix_is_read_once_without_a_trace(isa: str, page_size: int, dtype: torch.dtype) -> None:
    arguments = families(page_size, dtype)
    results = [one_by_one(*arguments)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(cpu.paged_attention(*arguments, 0.2))
    assert_same_bits(results)


@DTYPES
def test_instruction_sets_agree_on_a_shared_prefix(
    on_each_isa: Callable[[Callable[[], Tensor]], list[Tensor]], dtype: torch.dtype
) -> None:
    arguments = families(16, dtype)
    assert_same_bits(on_each_isa(lambda: cpu.paged_attention(*arguments, 0.2)))

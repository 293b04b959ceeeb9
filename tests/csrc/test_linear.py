"""linear: accuracy against float64, and bits that depend on nothing but the row and the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from palimpsest.engine import cpu, reference
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from torch import Tensor

Compute = Callable[[Callable[[], Tensor]], list[Tensor]]
WEIGHTS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# rows, in, out: below, at and above the block of k, the vector, the tile and the panel
SHAPES = [
    (1, 1, 1),
    (1, 300, 17),
    (3, 255, 33),
    (8, 256, 48),
    (9, 513, 97),
    (13, 31, 96),
    (25, 576, 192),
    (70, 1000, 31),
]


@WEIGHTS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "size", "out"), SHAPES)
def test_accuracy(isa: str, rows: int, size: int, out: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, size), torch.randn(out, size).to(dtype)
    b = torch.randn(out).to(dtype) if bias else None
    exact = reference.linear(x.double(), weight, b)
    assert_as_exact_as_torch(cpu.linear(x, weight, b), reference.linear(x, weight, b), exact)


@WEIGHTS
@pytest.mark.parametrize(("size", "out"), [(600, 200), (64, 33), (45, 100)])
def test_a_row_does_not_depend_on_company_threads_or_stride(isa: str, size: int, out: int, dtype: torch.dtype) -> None:
    wide, weight, bias = torch.randn(130, size + 7), torch.randn(out, size).to(dtype), torch.randn(out)
    x = wide[:, 3 : 3 + size]
    torch.set_num_threads(2)
    together = cpu.linear(x, weight, bias)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 24, 25, 36):
        torch.set_num_threads(1 + count % 2)
        for first in (0, 130 - count):
            rows = slice(first, first + count)
            assert_same_bits([together[rows], cpu.linear(x[rows].clone(), weight, bias)])


@WEIGHTS
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_instruction_sets_agree(on_each_isa: Compute, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(rows, 590), torch.randn(75, 590).to(dtype), torch.randn(75).to(dtype)
    assert_same_bits(on_each_isa(lambda: cpu.linear(x, weight, bias)))


@pytest.mark.parametrize("rows", [1, 40])
def test_the_order_is_one_chain_per_block_of_256(isa: str, rows: int) -> None:
    """The chain, spelled out. A float64 sum of a float32 and an exact product rounds like an FMA (but once in 2^29)."""
    x, weight = torch.randn(rows, 600), torch.randn(20, 600)
    products = x.double().unsqueeze(1) * weight.double()  # [rows, out, in]
    blocks = []
    for block in products.split(256, dim=2):
        chain = torch.zeros(rows, 20)
        for k in range(block.shape[2]):
            chain = (chain.double() + block[:, :, k]).float()
        blocks.append(chain)
    assert_same_bits([cpu.linear(x, weight, None), (blocks[0] + blocks[1]) + blocks[2]])


def test_no_rows(isa: str) -> None:
    assert cpu.linear(torch.empty(0, 8), torch.randn(5, 8), None).shape == (0, 5)


def test_other_layouts_are_refused(isa: str) -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    bad = [
        (x.double(), weight),
        (x, weight.half()),
        (x[:, :7], weight),
        (x, torch.randn(8, 6).t()),
        (x[:, :0], weight[:, :0]),
    ]
    for bad_x, bad_weight in bad:
        with pytest.raises(ValueError, match=r"cpu\.linear does not take"):
            cpu.linear(bad_x, bad_weight, None)
    with pytest.raises(ValueError, match=r"cpu\.linear does not take"):
        cpu.linear(x, weight, torch.randn(5))

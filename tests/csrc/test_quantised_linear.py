"""quantised_linear: the bits of its twin, on every instruction set, whatever the company of a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from palimpsest.engine import cpu, reference
from palimpsest.engine.config import QUANTISED
from palimpsest.engine.packed_weight import PackedWeight
from palimpsest.engine.quant import quantise_weight
from palimpsest.tests.csrc.exactness import assert_same_bits
from torch import Tensor

# rows, in, out: one, below, at and above the group of 32, the groups of scales, the panel and the rows in registers
SHAPES = [(1, 1, 1), (1, 576, 48), (3, 31, 17), (8, 128, 16), (9, 300, 33), (17, 65, 100)]


def random_weight(out: int, size: int, bits: int = 4, group: int = 32, minima: bool = True) -> PackedWeight:
    """Every code, scales of both signs (as those of Q4_0), and minima."""
    scales, minimum = torch.randn(2, out, -(-size // (group or size)))
    codes = torch.randint(0, 1 << bits, (out, size), dtype=torch.uint8)
    return PackedWeight.pack(codes, scales.half(), minimum.half() if minima else None, bits, group)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize(("rows", "size", "out"), SHAPES)
def test_the_bits_of_the_twin(isa: str, rows: int, size: int, out: int, kind: str) -> None:
    x, weight = torch.randn(rows, size), quantise_weight(torch.randn(out, size), kind)
    for bias in (None, torch.randn(out), torch.randn(out).bfloat16()):
        assert_same_bits(
            [cpu.quantised_linear(x, weight, bias), reference.quantised_linear(x, weight, bias)],
        )


@pytest.mark.parametrize(("bits", "group", "minima"), [(8, 32, False), (8, 0, False), (4, 64, False), (4, 32, True)])
def test_the_bits_of_the_twin_for_every_code(isa: str, bits: int, group: int, minima: bool) -> None:
    """A file may hold codes that our own rounding never makes, such as -128, at the largest sums that there are."""
    x, weight = torch.randn(5, 200), random_weight(40, 200, bits, group, minima)
    x[1], x[2] = 3.0, -3.0
    x[3, ::2] *= 1e-3
    assert_same_bits([cpu.quantised_linear(x, weight, None), reference.quantised_linear(x, weight, None)])
    for code in (0, (1 << bits) - 1):
        extreme = PackedWeight.pack(torch.full((40, 200), code, dtype=torch.uint8), *numbers(weight), bits, group)
        assert_same_bits([cpu.quantised_linear(x, extreme, None), reference.quantised_linear(x, extreme, None)])


def numbers(weight: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """Scales and minima as [out, groups of scales]."""
    rows = [
        None if t is None else t.transpose(1, 2).flatten(0, 1)[: weight.out_size]
        for t in (weight.scales, weight.minima)
    ]
    assert rows[0] is not None
    return rows[0], rows[1]


def test_the_twin_is_the_product_of_what_was_rounded() -> None:
    """In float64, where roundings between the groups vanish: x rounded to 127 steps of each group, W dequantised."""
    x, weight = torch.randn(6, 100), random_weight(20, 100)
    rounded = []
    for group in x.double().split(32, dim=1):
        step = group.abs().amax(dim=1, keepdim=True) / 127
        rounded.append((group / step).round() * step)
    exact = torch.cat(rounded, dim=1) @ weight.dequantise().double().t()
    assert torch.allclose(reference.quantised_linear(x.double(), weight, None), exact, rtol=1e-6, atol=1e-6)
    assert torch.allclose(reference.quantised_linear(x, weight, None).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("size", "out"), [(600, 200), (45, 100)])
def test_a_row_does_not_depend_on_company_threads_or_stride(isa: str, size: int, out: int, kind: str) -> None:
    wide, weight, bias = torch.randn(130, size + 7), quantise_weight(torch.randn(out, size), kind), torch.randn(out)
    x = wide[:, 3 : 3 + size]
    torch.set_num_threads(2)
    together = cpu.quantised_linear(x, weight, bias)
    for count in (1, 2, 3, 5, 7, 8, 9, 24):
        torch.set_num_threads(1 + count % 2)
        for first in (0, 130 - count):
            rows = slice(first, first + count)
            assert_same_bits([together[rows], cpu.quantised_linear(x[rows].clone(), weight, bias)])


@pytest.mark.parametrize("kind", ["int8", "int8-g64", "int4"])
def test_instruction_sets_agree(on_each_isa: Callable[[Callable[[], Tensor]], list[Tensor]], kind: str) -> None:
    x, weight = torch.randn(40, 590), quantise_weight(torch.randn(75, 590), kind)
    assert_same_bits(on_each_isa(lambda: cpu.quantised_linear(x, weight, None)))


def test_nothing_tiny_and_what_is_no_number(isa: str) -> None:
    weight = quantise_weight(torch.randn(20, 64), "int8")
    x = torch.zeros(5, 64)
    x[1] = 1e-31  # counts as 0
    x[2] = 2e-30
    x[3, 40] = torch.inf
    x[4, 63] = torch.nan
    y = cpu.quantised_linear(x, weight, None)
    assert_same_bits([y[:3], reference.quantised_linear(x[:3], weight, None)])
    assert not y[:2].any() and y[2].any()
    assert not y[3:].isfinite().any()


def test_no_rows(isa: str) -> None:
    weight = quantise_weight(torch.randn(5, 8), "int4")
    assert cpu.quantised_linear(torch.empty(0, 8), weight, None).shape == (0, 5)


def test_other_layouts_are_refused(isa: str) -> None:
    x, weight = torch.randn(4, 8), quantise_weight(torch.randn(6, 8), "int8")
    for bad_x, bias in ((x.double(), None), (x[:, :7], None), (x.t(), None), (x, torch.randn(5))):
        with pytest.raises(ValueError, match=r"cpu\.quantised_linear does not take"):
            cpu.quantised_linear(bad_x, weight, bias)

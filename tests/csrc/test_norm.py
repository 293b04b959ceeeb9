"""rms_norm: accuracy against float64, and bits that depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from palimpsest.engine import cpu, reference
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 576, 4099])
def test_accuracy(isa: str, n: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, n) * 3, torch.randn(n).to(dtype)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_as_exact_as_torch(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), exact)


def test_a_row_does_not_depend_on_company_threads_or_stride(isa: str) -> None:
    wide, weight = torch.randn(300, 700), torch.randn(577)
    x = wide[:, 40:617]
    torch.set_num_threads(2)
    together = cpu.rms_norm(x, weight, 1e-6)
    torch.set_num_threads(1)
    for row in (0, 17, 299):
        assert_same_bits([cpu.rms_norm(x[row].clone(), weight, 1e-6), together[row]])


def test_instruction_sets_agree(on_each_isa: Callable[[Callable[[], Tensor]], list[Tensor]]) -> None:
    x, weight = torch.randn(9, 1003), torch.randn(1003).bfloat16()
    assert_same_bits(on_each_isa(lambda: cpu.rms_norm(x, weight, 1e-6)))


def test_heads_of_a_projection_and_no_rows(isa: str) -> None:
    x, weight = torch.randn(5, 3, 64), torch.randn(64)
    assert torch.allclose(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), atol=1e-5)
    assert cpu.rms_norm(x[:0], weight, 1e-6).shape == (0, 3, 64)


def test_other_dtypes_and_shapes_are_refused(isa: str) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    for bad_x, bad_weight in ((x.double(), weight), (x, weight.half()), (x, weight[:7]), (x.t(), torch.randn(4))):
        with pytest.raises(ValueError, match=r"cpu\.rms_norm does not take"):
            cpu.rms_norm(bad_x, bad_weight, 1e-6)

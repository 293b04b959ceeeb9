"""silu_product, rotate, write_kv, embedding: accuracy, copies bit for bit, refusal of what lies outside."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from palimpsest.engine import cpu, reference
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from torch import Tensor

Compute = Callable[[Callable[[], Tensor]], list[Tensor]]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.mark.parametrize("n", [1, 16, 100, 1536])
def test_silu_product(isa: str, n: int) -> None:
    wide, up = torch.randn(33, n + 5) * 8, torch.randn(33, n)
    gate = wide[:, :n]
    result = cpu.silu_product(gate, up)
    exact = reference.silu_product(gate.double(), up.double())
    assert_as_exact_as_torch(result, reference.silu_product(gate, up), exact)
    assert_same_bits([cpu.silu_product(gate[7:8], up[7:8])[0], result[7]])


def test_silu_product_far_out(isa: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, math.nan]])
    result = cpu.silu_product(gate, torch.ones_like(gate))
    assert torch.allclose(result, reference.silu_product(gate, torch.ones_like(gate)), atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (2, 12), (1, 2), (5, 80)])
def test_rotate(isa: str, heads: int, head_dim: int) -> None:
    x, positions = torch.randn(40, heads, head_dim), torch.randperm(99)[:40]
    angles = torch.rand(99, head_dim // 2) * 7
    cos, sin = angles.cos(), angles.sin()
    result = cpu.rotate(x, positions, cos, sin)
    exact = reference.rotate(x.double(), positions, cos.double(), sin.double())
    assert_as_exact_as_torch(result, reference.rotate(x, positions, cos, sin), exact)
    assert_same_bits([cpu.rotate(x[5:6].clone(), positions[5:6], cos, sin)[0], result[5]])


def test_instruction_sets_agree(on_each_isa: Compute) -> None:
    gate, up = torch.randn(5, 203) * 20, torch.randn(5, 203)
    assert_same_bits(on_each_isa(lambda: cpu.silu_product(gate, up)))
    x, angles = torch.randn(5, 3, 46), torch.rand(9, 23)
    assert_same_bits(on_each_isa(lambda: cpu.rotate(x, torch.arange(5), angles.cos(), angles.sin())))
    logits = torch.randn(3, 9001) * 10
    assert_same_bits(on_each_isa(lambda: cpu.log_sum_exp(logits)))


@DTYPES
def test_write_kv_rounds_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    key = torch.randn(50, 3, 24) * 10 ** torch.randn(50, 3, 24)
    key[0, 0, :4] = torch.tensor([math.nan, math.inf, 3.4e38, 1e-40])
    wide = torch.randn(50, 5, 24)
    value, slots = wide[:, 1:4], torch.randperm(70)[:50]
    pages, expected = ([torch.zeros(10, 3, 7, 24, dtype=dtype) for _ in range(2)] for _ in range(2))
    cpu.write_kv(key, value, *pages, slots)
    reference.write_kv(key, value, *expected, slots)
    for ours, theirs in zip(pages, expected, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@DTYPES
def test_embedding(isa: str, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(30, 67).to(dtype), torch.randint(30, (80,))
    assert_same_bits([cpu.embedding(ids, weight, torch.float32), reference.embedding(ids, weight, torch.float32)])


def test_indices_outside_are_refused(isa: str) -> None:
    weight, pages = torch.randn(30, 8), torch.zeros(4, 2, 3, 8)
    x, table = torch.randn(1, 2, 8), torch.rand(12, 4)
    for index in (-1, 30):
        with pytest.raises(ValueError, match=f"token id {index}"):
            cpu.embedding(torch.tensor([index]), weight, torch.float32)
    for index in (-1, 12):
        with pytest.raises(ValueError, match=f"slot {index}"):
            cpu.write_kv(x, x, pages, pages.clone(), torch.tensor([index]))
        with pytest.raises(ValueError, match=f"position {index}"):
            cpu.rotate(x, torch.tensor([index]), table, table)


@pytest.mark.parametrize("n", [1, 17, 4096, 4097, 50000])
def test_log_sum_exp(isa: str, n: int) -> None:
    wide = torch.randn(5, n + 3) * 6
    wide[1] += 1e4
    wide[2, : n // 2] = -math.inf
    x = wide[:, :n]
    result = cpu.log_sum_exp(x)
    assert_as_exact_as_torch(result[2:], reference.log_sum_exp(x[2:]), reference.log_sum_exp(x[2:].double()))
    assert_as_exact_as_torch(result[:2], reference.log_sum_exp(x[:2]), reference.log_sum_exp(x[:2].double()))
    torch.set_num_threads(2)
    assert_same_bits([cpu.log_sum_exp(x[3:4].clone())[0], result[3]])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_log_sum_exp_of_what_is_no_number(isa: str, bad: float) -> None:
    x = torch.full((3, 5000), -math.inf)
    x[0, 100], x[1, 4999] = bad, bad
    result = cpu.log_sum_exp(x)
    assert not result[:2].isfinite().any() and not result[:2].isneginf().any()
    assert result[2].isneginf()

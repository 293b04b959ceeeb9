"""Norm and SiLU product against their twins, over odd sizes, single and no rows, and strided inputs."""

from __future__ import annotations

import pytest
import torch
from palimpsest.engine import reference
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch
from torch import Tensor

ROWS = pytest.mark.parametrize("rows", [0, 1, 5])


def assert_like_twin(kernel: Tensor, twin: Tensor, exact: Tensor) -> None:
    assert_as_exact_as_torch(kernel.cpu(), twin.cpu(), exact.cpu())


@ROWS
@pytest.mark.parametrize("columns", [1, 96, 129])
def test_rms_norm(device: torch.device, rows: int, columns: int) -> None:
    from palimpsest.triton_kernels.norm import rms_norm

    x = torch.randn(rows, columns + 3, device=device)[:, :columns]  # rows are not neighbours
    weight = torch.randn(columns, device=device).bfloat16()
    exact = reference.rms_norm(x.double(), weight, 1e-5)
    assert_like_twin(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), exact)


@ROWS
def test_add_rms_norm(device: torch.device, rows: int) -> None:
    from palimpsest.triton_kernels.norm import add_rms_norm

    x, added = torch.randn(2, rows, 132, device=device)[:, :, :129]  # rows are not neighbours
    weight = torch.randn(129, device=device).bfloat16()
    total, normed = add_rms_norm(x, added, weight, 1e-5)
    assert torch.equal(total, x + added)
    assert_like_twin(normed, reference.rms_norm(total, weight, 1e-5), reference.rms_norm(total.double(), weight, 1e-5))


@pytest.mark.parametrize("of_sum", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_rms_norm_backward(device: torch.device, rows: int, of_sum: bool) -> None:
    from palimpsest.triton_kernels.norm import rms_norm_backward

    x, grad, extra, weight = (torch.randn(*shape, device=device) for shape in (*[(rows, 33)] * 3, (33,)))

    def twin(dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        of_x, of_weight = torch.autograd.grad(reference.rms_norm(*inputs, 1e-5), inputs, grad.to(dtype))
        return of_x + extra.to(dtype) if of_sum else of_x, of_weight

    for kernel, plain, exact in zip(
        rms_norm_backward(grad, x, weight, 1e-5, extra if of_sum else None),
        twin(torch.float32),
        twin(torch.float64),
        strict=True,
    ):
        assert_like_twin(kernel, plain, exact)


@ROWS
def test_silu_product_and_its_gradient(device: torch.device, rows: int) -> None:
    from palimpsest.triton_kernels.activation import silu_product, silu_product_backward

    both = torch.randn(rows, 2 * 1030, device=device) * 4
    gate, up = both.chunk(2, dim=1)
    grad = torch.randn_like(gate)
    assert_like_twin(
        silu_product(gate, up), reference.silu_product(gate, up), reference.silu_product(gate.double(), up.double())
    )

    def twin(dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (gate, up)]
        return torch.autograd.grad(reference.silu_product(*inputs), inputs, grad.to(dtype))

    for kernel, plain, exact in zip(
        silu_product_backward(grad, gate, up), twin(torch.float32), twin(torch.float64), strict=True
    ):
        assert_like_twin(kernel, plain, exact)

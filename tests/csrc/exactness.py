"""How kernels are judged: against float64, and bit by bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def assert_as_exact_as_torch(kernel: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The kernel's root mean square error is at most twice that of plain torch, plus 2 ulp of the largest magnitude.

    kernel, plain: float32 results. exact: the same in float64.
    """
    assert kernel.shape == exact.shape and kernel.dtype == torch.float32
    if exact.numel() == 0:
        return
    largest = exact.abs().max().float()
    ulp = (torch.nextafter(largest, torch.tensor(torch.inf)) - largest).item()
    error, allowed = ((result.double() - exact).square().mean().sqrt().item() for result in (kernel, plain))
    assert error <= 2 * allowed + 2 * ulp, f"error {error:.3g}, torch {allowed:.3g}, ulp {ulp:.3g}"


def assert_same_bits(results: Iterable[Tensor]) -> None:
    first, *others = results
    for other in others:
        assert torch.equal(first.view(torch.int32), other.view(torch.int32))

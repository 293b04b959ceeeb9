"""ScaledWeight: the weight of a linear layer as 8-bit codes with a scale per row, as the kernels of a GPU read it.

W = codes * scale. int8 codes and scales are those of a PackedWeight with one scale per row. float8_e4m3fn codes are
W / scale to the nearest, ties to even, with scale = largest magnitude of the row / 448, the largest finite e4m3 number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CheckpointError
from .packed_weight import PackedWeight

__all__ = ["ScaledWeight"]

ROWS = 1024  # rounded at once: bounds the temporaries


@dataclass(frozen=True)
class ScaledWeight:
    """codes: int8 or float8_e4m3fn [out, in]. scales: float32 [out]."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def of_packed(cls, packed: PackedWeight) -> ScaledWeight:
        """The same numbers; for 8 bits with one scale per row."""
        codes = (packed.codes()[:, : packed.in_size] ^ 128).view(torch.int8).contiguous()
        return cls(codes, packed.per_group(packed.scales)[:, 0].float())

    @classmethod
    def float8(cls, weight: Tensor) -> ScaledWeight:
        """Round [out, in] to float8_e4m3fn. Raises CheckpointError for weights that are not finite."""
        largest = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1)).float()
        scales = largest / torch.finfo(torch.float8_e4m3fn).max
        if not scales.isfinite().all():
            raise CheckpointError("a weight is not finite; load the model with native weights")
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for first in range(0, len(weight), ROWS):
            rows = slice(first, first + ROWS)
            divisors = torch.where(scales[rows] == 0, 1.0, scales[rows])
            codes[rows] = (weight[rows].float() / divisors[:, None]).to(codes.dtype)
        return cls(codes, scales)

    def moved(self, copy: Callable[[Tensor], Tensor]) -> ScaledWeight:
        """The same weight in other memory."""
        return ScaledWeight(copy(self.codes), copy(self.scales))

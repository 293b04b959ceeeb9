"""PackedWeight: the weight of a linear layer as small integers with scales, in the order in which kernels read it.

A weight is scale * (code - zero), or scale * code + minimum where there are minima; zero is 128 for 8 bits, 8 for 4.
A scale (and minimum) covers `group` neighbours on the `in` axis; the last group of a row may be shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["GROUP", "PANEL", "PackedWeight"]

GROUP = 32  # values on the `in` axis that kernels sum as whole numbers; every group of scales is a multiple, or a row
PANEL = 16  # rows of W that lie together


@dataclass(frozen=True)
class PackedWeight:
    """W [out_size, in_size], filled up to whole panels of 16 rows and groups of 32 columns.

    bits: 8 or 4. group: columns that share a scale: 32, 64, 128, or 0 for the whole row.
    values: uint8 [panels, in / 32, 512 or 256]. Within a group, step s holds the columns 4 s .. 4 s + 3 of row 0, then
    of row 1, ... 15 of the panel. With 4 bits the steps 2 s and 2 s + 1 share their bytes, the first in the low halves.
    scales, minima: float16 [panels, groups of scales, 16]; 0 for rows that are not there.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    bits: int
    group: int
    in_size: int
    out_size: int

    @classmethod
    def pack(cls, codes: Tensor, scales: Tensor, minima: Tensor | None, bits: int, group: int) -> PackedWeight:
        """uint8 codes [out, in] below 2**bits, float16 scales and minima [out, groups of scales] (minima: 4 bits)."""
        rows, columns = codes.shape
        codes = F.pad(codes, (0, -columns % GROUP, 0, -rows % PANEL))
        steps = codes.view(-1, PANEL, codes.shape[1] // GROUP, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        if bits == 4:
            low, high = steps[:, :, 0::2], steps[:, :, 1::2]
            steps = low | (high << 4)
        values = steps.reshape(*steps.shape[:2], -1)
        packed = [None if t is None else _panels(t) for t in (scales, minima)]
        return cls(values, packed[0], packed[1], bits, group, columns, rows)  # type: ignore[arg-type]

    @property
    def zero(self) -> int:
        """The code that stands for 0."""
        return 0 if self.minima is not None else 1 << (self.bits - 1)

    @property
    def scale_shift(self) -> int:
        """Group g of 32 columns has the scale g >> scale_shift."""
        return (self.group // GROUP).bit_length() - 1 if self.group else 62

    @property
    def nbytes(self) -> int:
        """Bytes that a forward pass reads."""
        return sum(t.numel() * t.element_size() for t in (self.values, self.scales, self.minima) if t is not None)

    def moved(self, copy: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same weight in other memory."""
        minima = None if self.minima is None else copy(self.minima)
        return replace(self, values=copy(self.values), scales=copy(self.scales), minima=minima)

    def codes(self) -> Tensor:
        """uint8 [out, in rounded up to whole groups of 32]."""
        panels, groups = self.values.shape[:2]
        if self.bits == 4:
            pairs = self.values.view(panels, groups, GROUP // 8, PANEL, 4)
            steps = torch.stack((pairs & 15, pairs >> 4), dim=3).flatten(2, 3)
        else:
            steps = self.values.view(panels, groups, GROUP // 4, PANEL, 4)
        return steps.permute(0, 3, 1, 2, 4).reshape(panels * PANEL, groups * GROUP)[: self.out_size]

    def per_group(self, numbers: Tensor) -> Tensor:
        """`scales` or `minima` as float16 [out, in / 32], one for each group of 32 columns."""
        rows = numbers.transpose(1, 2).flatten(0, 1)[: self.out_size]
        return rows[:, torch.arange(self.values.shape[1]) >> self.scale_shift]

    def dequantise(self) -> Tensor:
        """The float32 [out, in] that the integers stand for."""
        codes = self.codes().view(self.out_size, -1, GROUP).float() - self.zero
        weight = codes * self.per_group(self.scales).float().unsqueeze(-1)
        if self.minima is not None:
            weight = weight + self.per_group(self.minima).float().unsqueeze(-1)
        return weight.flatten(1)[:, : self.in_size]


def _panels(numbers: Tensor) -> Tensor:
    """[out, n] -> [panels, n, 16]."""
    filled = F.pad(numbers, (0, 0, 0, -numbers.shape[0] % PANEL))
    return filled.view(-1, PANEL, numbers.shape[1]).transpose(1, 2).contiguous()

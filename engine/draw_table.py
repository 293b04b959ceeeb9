"""DrawTable: how rows are drawn, as columns of numbers that a GPU gets by one copy."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .draw import Draw
from .noise import stream_key
from .upload import upload

__all__ = ["DrawTable"]


class DrawTable(NamedTuple):
    """One number per row in each column; the filters of a greedy row are off.

    keys: int64, the bits of noise.stream_key. random: int64, 0 for a greedy row. top_k: int64. top_p, depths,
    temperatures: float64, the last one 1 for a greedy row. cut: whether top_k or top_p leave something out of any row.
    filtered: or min_p.
    """

    keys: Tensor
    random: Tensor
    top_k: Tensor
    top_p: Tensor
    depths: Tensor
    temperatures: Tensor
    cut: bool
    filtered: bool

    @classmethod
    def of(cls, rows: Sequence[Draw], device: torch.device) -> DrawTable:
        """The columns of one row or more.

        No part of the step's own numbers: each round of a draft has other rows, and a copy costs nothing that is made
        while the layers run.
        """
        keys, random, top_k, top_p = array("Q"), array("q"), array("q"), array("d")
        depths, temperatures = array("d"), array("d")
        for row in rows:
            keys.append(stream_key(*row.stream))
            row = row if row.temperature > 0 else Draw(row.stream, 0.0)
            random.append(row.temperature > 0)
            top_k.append(row.top_k)
            top_p.append(row.top_p)
            depths.append(row.depth)
            temperatures.append(row.temperature or 1.0)
        cut = max(top_k) > 0 or min(top_p) < 1.0
        filtered = cut or max(depths) > -math.inf
        columns = (keys, random, top_k, top_p, depths, temperatures)
        for column in columns:  # each begins at a multiple of 16 bytes, so that kernels are compiled for one alignment
            column.frombytes(bytes(8 * (len(rows) % 2)))
        host = torch.frombuffer(bytearray().join(columns), dtype=torch.int64)
        table = upload(host, device).view(len(columns), -1)[:, : len(rows)]
        wholes, reals = table[:3], table[3:].view(torch.float64)
        return cls(wholes[0], wholes[1], wholes[2], reals[0], reals[1], reals[2], cut, filtered)

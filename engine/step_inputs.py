"""StepInputs: the whole numbers of a step side by side in one piece of memory, so that a GPU gets them by one copy.

Gathered in plain lists: behind a pass over the weights, which drives all else out of the cache, each tensor op of a
decode step costs tens of microseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .model import Batch
from .ops import Spans
from .step import Span

__all__ = ["StepInputs"]


class StepInputs(NamedTuple):
    """memory: int64 ids, positions, slots [tokens each], int32 query_start [places + 1], kv_length [places], the page
    tables [rows, width], then the `lists`, whose lengths are kept.

    places: spans that there is room for; those behind the step's `rows` spans are empty.
    """

    memory: bytearray
    tokens: int
    places: int
    rows: int
    width: int
    lengths: tuple[int, ...]

    @classmethod
    def pack(
        cls, spans: Sequence[Span], page_size: int, lists: Sequence[array[int]] = (), places: int | None = None
    ) -> StepInputs:
        """The rows of the spans in order, and int32 lists of numbers that the step needs besides."""
        ids, positions, slots = list[int](), list[int](), list[int]()
        query_start, kv_length, tables = [0], list[int](), list[int]()
        width = max((len(span.pages) for span in spans), default=0)
        for span in spans:
            pages, rows = span.pages, range(span.start, span.start + span.rows)
            ids += span.ids
            ids += span.draft
            positions += rows
            slots += [pages[at // page_size] * page_size + at % page_size for at in rows]
            query_start.append(len(ids))
            kv_length.append(rows.stop)
            tables += pages
            tables += [0] * (width - len(pages))
        places = len(spans) if places is None else places
        query_start += [len(ids)] * (places - len(spans))
        kv_length += [0] * (places - len(spans))
        longs, ints = array("q", ids + positions + slots), array("i", query_start + kv_length + tables)
        memory = bytearray().join((longs, ints, *lists))
        return cls(memory, len(ids), places, len(spans), width, tuple(map(len, lists)))

    @property
    def head(self) -> int:
        """How many int32 lie before the tables."""
        return 6 * self.tokens + 2 * self.places + 1

    def host(self) -> Tensor:
        """The memory itself, int32."""
        return torch.frombuffer(self.memory, dtype=torch.int32)

    def views(self, memory: Tensor) -> tuple[Batch, tuple[Tensor, ...]]:
        """What lies in a copy of `host()`: the batch, with tables [rows, width], and the lists."""
        sizes = [6 * self.tokens, self.places + 1, self.places, self.rows * self.width, *self.lengths]
        longs, starts, lengths, tables, *lists = memory.split_with_sizes(sizes)
        ids, positions, slots = longs.view(torch.int64).split_with_sizes([self.tokens] * 3)
        return Batch(ids, positions, slots, Spans(starts, lengths, tables.view(self.rows, self.width))), tuple(lists)

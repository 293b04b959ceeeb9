"""Turns as ragged batches for the training forward: no padding, what turns have in common computed once.

A sequence is its prompt and its response but for the last token, whose row predicts nothing that was drawn; so the rows
are those that the rollout computed. Turns stand in the order of their ids, whatever order they came in: what has a
prefix in common stands together, and sums over rows have one order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.model import Batch, Decoder, KVPages
from ..engine.ops import Spans

__all__ = ["Ids", "Pack", "pack_turns", "response_rows"]

Ids = tuple["array[int]", "array[int]"]  # of a prompt and its response, int32


@dataclass(frozen=True)
class Pack:
    """Some turns as one batch.

    batch: the rows, each computed once. num_pages: of scratch KV that its slots need.
    rows: int64 [R], the row of `batch` that predicts each response token, turn after turn. targets: int64 [R], these
    tokens. turns: which turns of those given, in this order. lengths: of their responses.
    """

    batch: Batch
    num_pages: int
    rows: Tensor
    targets: Tensor
    turns: list[int]
    lengths: list[int]

    def to(self, device: torch.device) -> Pack:
        """With its tensors there."""
        batch, spans = self.batch, self.batch.spans
        moved = Batch(
            batch.ids.to(device),
            batch.positions.to(device),
            batch.slots.to(device),
            Spans(spans.query_start.to(device), spans.kv_length.to(device), spans.pages.to(device)),
        )
        return replace(self, batch=moved, rows=self.rows.to(device), targets=self.targets.to(device))


def pack_turns(turns: Sequence[Ids], budget: int, page_size: int, share: bool = True) -> Iterator[Pack]:
    """Pack (prompt, response) pairs into batches of at most `budget` rows; turns without a response are left out.

    share: compute whole pages of equal ids behind equal ids once per batch. Raises ConfigError for a turn that is
    longer than the budget.
    """
    order = sorted((i for i, (_, response) in enumerate(turns) if response), key=lambda i: turns[i][0] + turns[i][1])
    builder = _Builder(page_size, share)
    for i in order:
        tokens = len(turns[i][0]) + len(turns[i][1]) - 1
        if tokens > budget:
            raise ConfigError(
                f"a turn of {tokens} tokens does not fit into train_tokens={budget}; raise it to the longest turn, or "
                "lower chunk_tokens, memory_tokens or answer_tokens"
            )
        if builder.rows + builder.cost(turns[i]) > budget:
            yield builder.finish()
            builder = _Builder(page_size, share)
        builder.add(i, turns[i])
    if builder.turns:
        yield builder.finish()


def response_rows(model: Decoder, pack: Pack, page_size: int, kv_dtype: torch.dtype, recompute: bool) -> Tensor:
    """Run a pack through the model; -> normed hidden rows [R, hidden], one per response token.

    recompute: keep only what enters each layer, and run the layer again in the backward pass.
    """
    config = model.config
    shape = (pack.num_pages, config.num_kv_heads, page_size, config.head_dim)
    # One layer's pages serve all layers: a layer reads only what it has just written.
    scratch = KVPages(*(torch.empty(shape, dtype=kv_dtype, device=model.ops.device) for _ in range(2)))
    hidden = model(pack.batch, [scratch] * config.num_layers, recompute=recompute)
    return torch.index_select(hidden, 0, pack.rows)  # its backward adds in the order of the rows


@dataclass
class _Builder:
    """A batch in the making. known: the page behind page `parent` (-1: none) that holds some ids."""

    page_size: int
    share: bool
    rows: int = 0
    turns: list[int] = field(default_factory=list)
    known: dict[tuple[int, bytes], int] = field(default_factory=dict)
    first_rows: list[int] = field(default_factory=list)
    spans: list[tuple[array[int], int, list[int]]] = field(default_factory=list)
    chosen: list[np.ndarray] = field(default_factory=list)
    targets: list[array[int]] = field(default_factory=list)

    def cost(self, turn: Ids) -> int:
        """Rows that a turn would add."""
        ids = _computed(turn)
        return len(ids) - len(self._shared(ids)) * self.page_size

    def add(self, index: int, turn: Ids) -> None:
        """Put a turn, number `index` of those given, behind the others; whole pages that it shares are put once."""
        ids, size = _computed(turn), self.page_size
        pages = self._shared(ids)
        start = len(pages) * size
        for first in range(start, len(ids), size):
            page = len(self.first_rows)
            self.first_rows.append(self.rows + first - start)
            if self.share and first + size <= len(ids):
                self.known[pages[-1] if pages else -1, ids[first : first + size].tobytes()] = page
            pages.append(page)
        if start < len(ids):
            self.spans.append((ids[start:], start, pages))
            self.rows += len(ids) - start
        positions = np.arange(len(turn[0]) - 1, len(ids))
        self.chosen.append(np.array(self.first_rows)[np.array(pages)[positions // size]] + positions % size)
        self.targets.append(turn[1])
        self.turns.append(index)

    def _shared(self, ids: array[int]) -> list[int]:
        """The pages at the head of `ids` that this batch holds already."""
        pages: list[int] = []
        for first in range(0, len(ids) - self.page_size + 1, self.page_size):
            page = self.known.get((pages[-1] if pages else -1, ids[first : first + self.page_size].tobytes()))
            if page is None:
                break
            pages.append(page)
        return pages

    def finish(self) -> Pack:
        """The batch of all turns added."""
        size = self.page_size
        tables = np.zeros((len(self.spans), max(len(pages) for _, _, pages in self.spans)), dtype=np.int32)
        positions, slots = [], []
        for table, (ids, start, pages) in zip(tables, self.spans, strict=True):
            table[: len(pages)] = pages
            position = np.arange(start, start + len(ids))
            positions.append(position)
            slots.append(table[position // size].astype(np.int64) * size + position % size)
        lengths = np.array([len(ids) for ids, _, _ in self.spans], dtype=np.int32)
        starts = np.array([start for _, start, _ in self.spans], dtype=np.int32)
        return Pack(
            batch=Batch(
                ids=_int64([ids for ids, _, _ in self.spans]),
                positions=torch.from_numpy(np.concatenate(positions)),
                slots=torch.from_numpy(np.concatenate(slots)),
                spans=Spans(
                    query_start=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
                    kv_length=torch.from_numpy(starts + lengths),
                    pages=torch.from_numpy(tables),
                ),
            ),
            num_pages=len(self.first_rows),
            rows=torch.from_numpy(np.concatenate(self.chosen)),
            targets=_int64(self.targets),
            turns=self.turns,
            lengths=[len(response) for response in self.targets],
        )


def _computed(turn: Ids) -> array[int]:
    prompt, response = turn
    return prompt + response[:-1]


def _int64(parts: Sequence[array[int]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.int32) for part in parts])).long()

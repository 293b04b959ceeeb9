"""Runner: a step as tensors. Builds the ragged batch, runs the model, samples. Knows neither queues nor text."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice

import torch
from torch import Tensor

from . import kv_rows
from .errors import ConfigError
from .layer_stack import LayerStack
from .memory import available_bytes, explained
from .model import Batch, Decoder, KVPages
from .model_config import ModelConfig
from .ops import Spans
from .rotary import turn_keys
from .run import Run, tile
from .sampler import prompt_logprobs, sample
from .step import KVMove, PageCopy, Span, SpanResult, Step

__all__ = ["Runner", "page_bytes"]

# Rows that go through the head at once: bounds the [rows, vocabulary] logits. Of drafts few at first and twice as many
# each time: most that are wrong are so early.
HEAD_TILE, FIRST_TILE = 64, 8
TENSOR_TYPES = {"i": torch.int32, "q": torch.int64}


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    row = kv_rows.columns(config.head_dim, dtype) * dtype.itemsize
    return 2 * config.num_layers * config.num_kv_heads * page_size * row


class Runner:
    """Holds the model and the KV tensors; `run` turns a step into results.

    run_layers: how a batch goes through the layers, in one call or op by op: the same bits either way.
    """

    def __init__(
        self, model: Decoder, *, num_pages: int, page_size: int, kv_dtype: torch.dtype, eos_ids: tuple[int, ...]
    ) -> None:
        self.model, self.page_size, self.eos_ids = model, page_size, eos_ids
        self.device = model.ops.device
        config = model.config
        shape = (num_pages, config.num_kv_heads, page_size, kv_rows.columns(config.head_dim, kv_dtype))
        try:
            self.pages = [
                KVPages(*(torch.empty(shape, dtype=kv_dtype, device=self.device) for _ in range(2)))
                for _ in range(config.num_layers)
            ]
        except RuntimeError as error:
            size, free = num_pages * page_bytes(config, page_size, kv_dtype), available_bytes(self.device)
            raise ConfigError(
                f"the KV pool of {size:,} bytes can't be allocated, {free:,} are free; lower EngineConfig.kv_bytes or "
                "kv_share"
            ) from error
        self.run_layers: Callable[[Batch], Tensor] = partial(model, pages=self.pages)
        self.refresh()

    def refresh(self) -> None:
        """See the model anew, after its parameters or layers were changed or replaced."""
        fits = LayerStack.fits(self.model, self.pages)
        self.run_layers = LayerStack(self.model, self.pages) if fits else partial(self.model, pages=self.pages)

    @torch.inference_mode()
    def run(self, step: Step) -> list[SpanResult]:
        """Compute a step; -> one result per span, in order."""
        self._copy(step.copies)
        for move in step.moves:
            self._move(move)
        if not step.spans:
            return []
        starts = list(accumulate((span.rows for span in step.spans), initial=0))
        what, remedy = f"a step of {starts[-1]} tokens", "lower EngineConfig.max_step_tokens, kv_share or kv_bytes"
        with explained(what, self.device, remedy):
            hidden = self.run_layers(self._batch(step.spans))
            scores = [self._score(hidden, span, start) for span, start in zip(step.spans, starts, strict=False)]
            drawn = self._draw(hidden, step.spans, starts)
        return [_with_scores(*pair) if pair[1] else pair[0] for pair in zip(drawn, scores, strict=True)]

    def _copy(self, copies: tuple[PageCopy, ...]) -> None:
        """Copy partial pages, reading all sources before any target is written: a target may be another's source."""
        if not copies:
            return
        sources = torch.tensor([copy.source for copy in copies])
        targets = torch.tensor([copy.target for copy in copies])
        for layer in self.pages:
            for pages in (layer.key, layer.value):
                pages[targets] = pages[sources]

    def _move(self, move: KVMove) -> None:
        """Copy KV to other positions, each key turned once from what the model made of it."""
        old, new = (torch.arange(at, at + move.length) for at in (move.source, move.target))
        source, target = (
            (torch.tensor(pages)[at // self.page_size], slice(None), at % self.page_size)
            for pages, at in ((move.source_pages, old), (move.target_pages, new))
        )
        for layer in self.pages:
            layer.key[target] = turn_keys(layer.key[source], old, new, self.model.cos, self.model.sin)
            layer.value[target] = layer.value[source]

    def _batch(self, spans: tuple[Span, ...]) -> Batch:
        """The spans' rows in order. Gathered in plain arrays: behind a pass over the weights, which drives all else out
        of the cache, each tensor op of a decode step costs tens of microseconds.
        """
        ids, positions, slots = array("q"), array("q"), array("q")
        query_start, kv_length, tables = array("i", [0]), array("i"), array("i")
        size, most_pages = self.page_size, max(len(span.pages) for span in spans)
        for span in spans:
            pages, rows = span.pages, range(span.start, span.start + span.rows)
            ids.extend([*span.ids, *span.draft])
            positions.extend(rows)
            slots.extend([pages[at // size] * size + at % size for at in rows])
            query_start.append(len(ids))
            kv_length.append(rows.stop)
            tables.extend(pages)
            tables.extend([0] * (most_pages - len(pages)))
        return Batch(
            ids=self._tensor(ids),
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            spans=Spans(
                query_start=self._tensor(query_start),
                kv_length=self._tensor(kv_length),
                pages=self._tensor(tables).view(len(spans), most_pages),
            ),
        )

    def _tensor(self, values: array[int]) -> Tensor:
        return torch.frombuffer(values, dtype=TENSOR_TYPES[values.typecode]).to(self.device)

    def _score(self, hidden: Tensor, span: Span, start: int) -> list[float]:
        """Log-probabilities that the span's rows owe for prompt tokens, a tile of rows at a time."""
        scores: list[float] = []
        for first in range(0, len(span.scored_targets), HEAD_TILE):
            ids = span.scored_targets[first : first + HEAD_TILE]
            targets = torch.tensor(ids, dtype=torch.int64, device=self.device)
            row = start + span.scored_from + first
            logits = self.model.logits(hidden[row : row + len(targets)])
            scores.extend(prompt_logprobs(logits, targets, self.model.ops))
        return scores

    def _draw(self, hidden: Tensor, spans: tuple[Span, ...], starts: list[int]) -> list[SpanResult]:
        """The tokens of each span that samples, an empty result for the others.

        Draft rows are drawn from a tile at a time, and those behind a row that gave another token never.
        """
        runs = {
            i: Run(span, starts[i] + len(span.ids) - 1, self.eos_ids) for i, span in enumerate(spans) if span.samples
        }
        live, most = list(runs.values()), FIRST_TILE
        while live:
            parts = tile(live, min(max(most, len(live)), HEAD_TILE))
            most *= 2
            logits = self.model.logits(_select(hidden, [row for run, count in parts for row in run.rows(count)]))
            rows = [row for run, count in parts for row in run.sample_rows(count)]
            drawn = iter(sample(logits, rows, self.model.ops))
            for run, count in parts:
                run.take(islice(drawn, count))
            live = [run for run in live if not run.over]
        return [runs[i].result if i in runs else SpanResult() for i in range(len(spans))]


def _select(hidden: Tensor, rows: list[int]) -> Tensor:
    """Some rows (rising), in place where they are neighbours, as in a step that only decodes."""
    if len(rows) == len(hidden):
        return hidden
    first, last = rows[0], rows[-1]
    return hidden[first : last + 1] if last - first < len(rows) else hidden[rows]


def _with_scores(result: SpanResult, scores: list[float]) -> SpanResult:
    if all(map(math.isfinite, scores)):
        return replace(result, prompt_logprobs=scores)
    return SpanResult(error="the logits of a prompt token hold NaN or infinity: check the checkpoint")

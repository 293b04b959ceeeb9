"""Runner: a step as tensors. Builds the ragged batch, runs the model, samples. Knows neither queues nor text."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from . import kv_rows
from .errors import ConfigError
from .graphs import GraphPlan, Graphs
from .layer_stack import LayerStack
from .lora import adapters
from .memory import available_bytes, explained
from .model import Batch, Decoder, KVPages
from .model_config import ModelConfig
from .run import FIRST_TILE, HEAD_TILE, Rounds, Run
from .sampler import prompt_logprobs, sample
from .step import KVMove, Span, SpanResult, Step
from .step_inputs import StepInputs
from .upload import upload

__all__ = ["Runner", "page_bytes"]


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    row = kv_rows.columns(config.head_dim, dtype) * dtype.itemsize
    return 2 * config.num_layers * config.num_kv_heads * page_size * row


class Runner:
    """Holds the model and the KV tensors; `run` turns a step into results.

    run_layers: how a batch goes through the layers, in one call or op by op: the same bits either way. graphs: of the
    layers, for small steps; the same bits too where kernels are exact.
    """

    def __init__(
        self, model: Decoder, *, num_pages: int, page_size: int, kv_dtype: torch.dtype, eos_ids: tuple[int, ...],
        graphs: GraphPlan | None = None,
    ) -> None:  # fmt: skip
        """graphs: what is recorded; the tensors have a page more than `num_pages` then."""
        self.model, self.page_size, self.eos_ids = model, page_size, eos_ids
        self.device = model.ops.device
        config = model.config
        self.num_pages, self._plan = num_pages, graphs
        self.graphs: Graphs | None = None
        self._recorded: list[object] = []
        shape = (
            num_pages + (graphs is not None),
            config.num_kv_heads,
            page_size,
            kv_rows.columns(config.head_dim, kv_dtype),
        )
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
        if self._plan is not None:
            self._record(self._plan)

    def _record(self, plan: GraphPlan) -> None:
        """Record the layers, unless they are as they were. Not with adapters, which come and go at any time."""
        model = self.model
        tensors = (tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
        layers: list[object] = [*model.modules(), *tensors]
        if layers == self._recorded:
            return
        self._recorded, self.graphs = layers, None  # the old ones' memory goes first
        if not adapters(model):
            remedy = "use EngineConfig(graphs=False)"
            with self._on_device(), explained("recording CUDA graphs", self.device, remedy):
                self.graphs = Graphs(
                    self.run_layers, plan, self.page_size, self.num_pages, self.device, exact=model.ops.exact
                )

    @torch.inference_mode()
    def run(self, step: Step, meanwhile: Callable[[], None]) -> list[SpanResult]:
        """Compute a step; -> one result per span, in order.

        meanwhile: called once, when the layers are launched: a GPU is at work then, and nothing waits for it yet.
        """
        if step.empty:
            return []
        spans, tokens = step.spans, sum(span.rows for span in step.spans)
        graph = None if self.graphs is None else self.graphs.fitting(spans, tokens)
        narrows = graph is None and self.device.type == "cpu"  # picking rows would wait for a GPU
        ends = list(accumulate(span.wanted if narrows else span.rows for span in spans))
        runs = {
            i: Run(span, ends[i] - len(span.draft) - 1, self.eos_ids) for i, span in enumerate(spans) if span.samples
        }
        rounds = Rounds(runs.values(), FIRST_TILE if self.device.type == "cpu" else HEAD_TILE)
        what, remedy = f"a step of {tokens} tokens", "lower EngineConfig.max_step_tokens, kv_share or kv_bytes"
        with self._on_device(), explained(what, self.device, remedy):
            lists = _lists(step, rounds.rows)
            inputs = StepInputs.pack(spans, self.page_size, lists) if graph is None else graph.pack(spans, lists)
            memory = upload(inputs.host(), self.device)
            batch, tensors = inputs.views(memory)
            given = iter(tensors)
            if step.copies:
                self._copy(next(given), next(given))
            for move in step.moves:
                self._move(move, next(given), next(given))
            if not spans:
                return []
            if narrows and ends[-1] < tokens:
                batch = replace(batch, wanted_start=torch.tensor([0, *ends], dtype=torch.int32))
            hidden = self.run_layers(batch) if graph is None else graph(inputs, memory)
            meanwhile()
            scores = [self._score(hidden, span, end, given) for span, end in zip(spans, ends, strict=True)]
            self._draw(hidden, rounds, given)
        results = [runs[i].result if i in runs else SpanResult() for i in range(len(spans))]
        return [_with_scores(*pair) if pair[1] else pair[0] for pair in zip(results, scores, strict=True)]

    def _on_device(self) -> torch.cuda.device:
        """Kernels are launched on the current GPU, and in every new thread that is the first one."""
        return torch.cuda.device(self.pages[0].key.get_device())  # -1, and nothing to do, on the CPU

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy partial pages, reading all sources before any target is written: a target may be another's source."""
        for layer in self.pages:
            for pages in (layer.key, layer.value):
                pages[targets] = pages[sources]

    def _move(self, move: KVMove, source_pages: Tensor, target_pages: Tensor) -> None:
        """Copy KV to other positions, each key turned once from what the model made of it."""
        old, new = (torch.arange(at, at + move.length, device=self.device) for at in (move.source, move.target))
        sources, targets = (
            pages[at // self.page_size].long() * self.page_size + at % self.page_size
            for pages, at in ((source_pages, old), (target_pages, new))
        )
        for layer in self.pages:
            self.model.ops.move_kv(layer.key, layer.value, sources, targets, old, new, self.model.cos, self.model.sin)

    def _score(self, hidden: Tensor, span: Span, end: int, given: Iterator[Tensor]) -> list[float]:
        """Log-probabilities that the span's rows owe for prompt tokens, a tile of rows at a time. end: of its rows."""
        scores: list[float] = []
        if span.scored_targets:
            owing = hidden[end - span.rows + span.scored_from :]
            for targets in next(given).long().split_with_sizes(_tiles(len(span.scored_targets))):
                logits = self.model.logits(owing[len(scores) : len(scores) + len(targets)])
                scores.extend(prompt_logprobs(logits, targets, self.model.ops))
        return scores

    def _draw(self, hidden: Tensor, rounds: Rounds, given: Iterator[Tensor]) -> None:
        """The tokens of all that sample."""
        while rounds.rows:
            logits = self.model.logits(_select(hidden, rounds.rows, given))
            rounds.take(sample(logits, rounds.sample_rows(), self.model.ops))
            if _scattered(rounds.rows):
                given = iter([upload(torch.tensor(rounds.rows, dtype=torch.int32), self.device)])


def _lists(step: Step, rows: list[int]) -> list[array[int]]:
    """The numbers that a step needs besides its batch, in the order in which it needs them. rows: drawn from first."""
    lists = []
    if step.copies:
        lists += [array("i", [copy.source for copy in step.copies]), array("i", [copy.target for copy in step.copies])]
    for move in step.moves:
        lists += [array("i", move.source_pages), array("i", move.target_pages)]
    lists += [span.scored_targets for span in step.spans if span.scored_targets]
    if _scattered(rows):
        lists.append(array("i", rows))
    return lists


def _tiles(count: int) -> list[int]:
    """A number of rows as tiles of the head."""
    return [min(HEAD_TILE, count - first) for first in range(0, count, HEAD_TILE)]


def _scattered(rows: list[int]) -> bool:
    """Whether rows (rising) are not neighbours, as they are in a step that only decodes."""
    return bool(rows) and rows[-1] - rows[0] >= len(rows)


def _select(hidden: Tensor, rows: list[int], given: Iterator[Tensor]) -> Tensor:
    """Some rows: in place where they are neighbours, else those that are given."""
    if _scattered(rows):
        return hidden[next(given)]
    return hidden if len(rows) == len(hidden) else hidden[rows[0] : rows[-1] + 1]


def _with_scores(result: SpanResult, scores: list[float]) -> SpanResult:
    if all(map(math.isfinite, scores)):
        return replace(result, prompt_logprobs=scores)
    return SpanResult(error="the logits of a prompt token hold NaN or infinity: check the checkpoint")

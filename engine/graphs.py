"""Graphs: the layers of a small step recorded as CUDA graphs, one per number of tokens, and replayed.

A step of few tokens takes as long as launching its hundreds of kernels; a replay launches them all at once. Whatever
its spans are, decode tokens, drafts or the end of a prompt, a step is padded to the next number of tokens that was
recorded. The rows that are added are one more span, of a sequence of its own in a page that no other has: they write
and read nothing of anybody's, and a row's bits do not depend on its company where kernels are exact. Where they are
not, the kernels that were recorded may depend on each span being a single row, and other steps run as they are.

A recording knows addresses. So a step's numbers are copied to where they were at the recording; pages and parameters
stay where they are, or the graphs are recorded anew.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .config import SamplingParams
from .model import Batch
from .sequence import Sequence
from .step import Span
from .step_inputs import StepInputs
from .upload import upload

__all__ = ["GpuRecorder", "GraphPlan", "Graphs", "Recorder", "StepGraph"]

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # beyond, the work of a step outlasts its launches

# Runs a function once and records what it does; what it gives then does the same again, into the same tensor.
Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


@dataclass(frozen=True)
class GraphPlan:
    """What is recorded, and by whom. sizes: numbers of tokens, rising. spans: most of a step. window: tokens of one."""

    recorder: Callable[[], Recorder]
    sizes: tuple[int, ...]
    spans: int
    window: int

    @classmethod
    def within(
        cls, recorder: Callable[[], Recorder], max_step_tokens: int, max_sequences: int, window: int
    ) -> GraphPlan:
        """For steps as a scheduler with these limits makes them."""
        most = min(max_step_tokens, window)
        return cls(recorder, tuple(size for size in SIZES if size <= most), max_sequences, window)


class GpuRecorder:
    """Records on the current GPU. All graphs share memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run once aside first: kernels are compiled and libraries make their workspaces, which cannot be recorded."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class StepGraph:
    """The layers for `tokens` rows in at most `places` spans."""

    def __init__(
        self, tokens: int, places: int, tables: Tensor, page_size: int, spare: int, record: Recorder,
        run_layers: Callable[[Batch], Tensor],
    ) -> None:  # fmt: skip
        """tables: int32 [places, pages of a window], shared by all graphs. spare: the page of the padding."""
        self.tokens, self.places = tokens, places
        self._page_size, self._spare, self._tables = page_size, spare, tables
        self._nobody = Sequence(-1, array("i"), SamplingParams())
        inputs = self.pack((), ())
        self._memory = upload(inputs.host(), tables.device).clone()
        batch, _ = inputs.views(self._memory)
        tables[:1, : inputs.width] = batch.spans.pages
        static = replace(batch, spans=replace(batch.spans, pages=tables))
        self._replay = record(lambda: run_layers(static))

    def pack(self, spans: Seq[Span], lists: Seq[array[int]]) -> StepInputs:
        """The numbers of a step of at most `tokens` tokens, padded."""
        missing = self.tokens - sum(span.rows for span in spans)
        if missing:
            pages = (self._spare,) * -(-missing // self._page_size)
            ids = array("i", bytes(4 * missing))
            spans = (*spans, Span(self._nobody, 0, ids, pages, False, 0, array("i")))
        return StepInputs.pack(spans, self._page_size, lists, self.places)

    def __call__(self, inputs: StepInputs, memory: Tensor) -> Tensor:
        """Run what `pack` gave and the device has in `memory`; -> hidden rows [tokens, hidden], until the next run.

        Behind the tables of a step are those of steps before it, which nothing reads.
        """
        head, tables = inputs.head, inputs.rows * inputs.width
        self._memory[:head].copy_(memory[:head])
        self._tables[: inputs.rows, : inputs.width] = memory[head : head + tables].view(inputs.rows, inputs.width)
        return self._replay()


class Graphs:
    """The graphs of a plan over a model's layers and pages. sizes: their numbers of tokens."""

    @torch.inference_mode()
    def __init__(
        self, run_layers: Callable[[Batch], Tensor], plan: GraphPlan, page_size: int, spare: int,
        device: torch.device, *, exact: bool,
    ) -> None:  # fmt: skip
        """spare: a page that no sequence gets. exact: whether a row's bits depend on nothing but the row."""
        needed = bisect_left(plan.sizes, plan.spans) + 1  # for steps of single rows
        self.sizes, self._exact = plan.sizes if exact else plan.sizes[:needed], exact
        # With the padding's; without exactness each row may need a span of its own, as kernels of single rows want it.
        record, most = plan.recorder(), plan.spans + 1 if exact else self.sizes[-1]
        tables = torch.zeros(most, -(-plan.window // page_size), dtype=torch.int32, device=device)
        self._graphs: dict[int, StepGraph] = {}
        for size in reversed(self.sizes):  # into the memory of the largest the others fit
            places = min(size, most)
            self._graphs[size] = StepGraph(size, places, tables[:places], page_size, spare, record, run_layers)

    def fitting(self, spans: Seq[Span], tokens: int) -> StepGraph | None:
        """The smallest graph for a step, if there is one."""
        at = bisect_left(self.sizes, tokens)
        if at == len(self.sizes) or not (self._exact or tokens == len(spans)):
            return None
        return self._graphs[self.sizes[at]]

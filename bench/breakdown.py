"""Breakdown: where the time of a piece of work goes, op by op, with the bandwidth and arithmetic that each reached."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..engine.layer_stack import LayerStack
from ..engine.ops import Spans
from ..engine.runner import Runner
from .clock import Sample, timed
from .costs import Cost

__all__ = ["Breakdown", "Total", "call_cost", "explain", "ways"]


def ways(runner: Runner) -> list[bool]:
    """Whether to run op by op, for each way that this runner's layers can be run: the usual one first."""
    return [False, True] if isinstance(runner.run_layers, LayerStack) else [True]


def explain(title: str, runner: Runner, run: Callable[[], object], op_by_op: bool) -> str:
    """Run once under clocks, with the layers in one call or op by op; -> a table below the title."""
    breakdown = Breakdown()
    with breakdown.watching(runner, op_by_op):
        sample = timed(run)
    way = "op by op" if op_by_op else "layers in one call"
    return f"{title}, {way}: {sample.seconds * 1e3:.1f} ms\n{breakdown.table(sample)}"


@dataclass
class Total:
    """What the calls of one op came to."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, seconds: float, cost: Cost) -> None:
        self.calls += 1
        self.seconds += seconds
        self.flops += cost.flops
        self.bytes += cost.bytes


class Breakdown:
    """Totals by op, filled while `watching` a runner."""

    def __init__(self) -> None:
        self.totals: dict[str, Total] = {}

    @contextmanager
    def watching(self, runner: Runner, op_by_op: bool) -> Iterator[None]:
        """Put a clock around every op that the model calls, for the time of the `with`."""
        owners = [module for module in runner.model.modules() if hasattr(module, "ops")]
        originals = [module.ops for module in owners]
        clocks = {id(ops): _Clocked(ops, self) for ops in originals}
        run_layers, graphs = runner.run_layers, runner.graphs
        try:
            runner.graphs = None  # a replay calls no op
            for module, ops in zip(owners, originals, strict=True):
                module.ops = clocks[id(ops)]  # type: ignore[assignment]
            runner.run_layers = (
                partial(runner.model, pages=runner.pages) if op_by_op else self.clocked("all layers", run_layers)
            )
            yield
        finally:
            runner.run_layers, runner.graphs = run_layers, graphs
            for module, ops in zip(owners, originals, strict=True):
                module.ops = ops

    def clocked(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        """`op`, with its calls counted under `name`."""

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = op(*args)
            seconds = time.perf_counter() - start
            self.totals.setdefault(name, Total()).add(seconds, call_cost(name, args, result))
            return result

        return call

    def table(self, sample: Sample) -> str:
        """The totals as lines, largest first, and what the ops leave over of the sample's time."""
        lines = [f"  {'op':22s}{'calls':>7s}{'ms':>10s}{'share':>8s}{'GB/s':>8s}{'GFLOP/s':>9s}"]
        spent = 0.0
        for name, total in sorted(self.totals.items(), key=lambda item: -item[1].seconds):
            spent += total.seconds
            rates = f"{total.bytes / total.seconds / 1e9:8.1f}{total.flops / total.seconds / 1e9:9.1f}"
            share = f"{total.seconds * 1e3:10.2f}{total.seconds / sample.seconds:8.1%}"
            lines.append(f"  {name:22s}{total.calls:7d}{share}{rates if total.bytes else ''}")
        rest = sample.seconds - spent
        lines.append(f"  {'Python and the rest':22s}{'':7s}{rest * 1e3:10.2f}{rest / sample.seconds:8.1%}")
        return "\n".join(lines)


class _Clocked:
    """A backend's ops with a clock around each."""

    def __init__(self, ops: Any, breakdown: Breakdown) -> None:
        self._ops, self._breakdown = ops, breakdown

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = self._breakdown.clocked(name, getattr(self._ops, name))
        setattr(self, name, op)
        return op


def call_cost(name: str, args: tuple[Any, ...], result: Any) -> Cost:
    """Bytes that a call has to move, outputs included, and multiply-adds of the ops that consist of them."""
    if name == "all layers":  # what is inside is not seen from here
        return Cost(0.0, 0.0)
    if name == "attend":
        query, key, value, _turn, *where = args[:8]
        return _attend_cost(query, key, value, *where)
    tensors = [tensor for value in (*args, result) for tensor in _tensors(value)]
    if name == "embedding":  # of the table only the rows asked for
        return Cost(0.0, 2.0 * result.nbytes)
    flops = 2.0 * args[0].shape[-1] * result.numel() if name.endswith("linear") else 0.0
    return Cost(flops, float(sum(tensor.nbytes for tensor in tensors)))


def _attend_cost(
    query: Tensor, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor, spans: Spans
) -> Cost:
    """Keys and values that the rows see, and those written: of the pages nothing else is touched."""
    heads, head_dim = query.shape[1:]
    kv_heads = key_pages.shape[1]
    rows = spans.query_start.diff().tolist()
    lengths = spans.kv_length.tolist()
    # Row i of a span that ends at `length` sees length - rows + 1 + i keys.
    scores = sum(count * length - count * (count - 1) / 2 for count, length in zip(rows, lengths, strict=True))
    kv = sum(lengths) * kv_heads * key_pages.shape[3] * (key_pages.element_size() + value_pages.element_size())
    written = 2 * (key.nbytes + value.nbytes) + slots.nbytes
    return Cost(4.0 * scores * heads * head_dim, float(kv + 2 * query.nbytes + written))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of an argument: itself, or the fields of packed weights."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return [field for field in fields if isinstance(field, Tensor)]
    return []

"""Forced responses: the benchmark chooses the ids that a model "says", so that it controls how many drafts are right.

Everything is computed as ever; only the id that comes out of the sampler is another.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from torch import Tensor

from ..engine import runner
from ..engine.ops import Ops
from ..engine.sampler import Sampled, SampleRow, sample
from .ours import tokens

__all__ = ["Script", "forced", "spoilt"]

# By sample and turn: the ids of the response, the ending one included.
Script = Mapping[tuple[int, int], "array[int]"]
Listener = Callable[[Tensor, list[SampleRow]], object]


@contextmanager
def forced(script: Script, listen: Listener | None = None) -> Iterator[None]:
    """While this lasts, sequences of the script's samples and turns draw the script's ids.

    listen: gets the logits [R, vocabulary] of all rows, those behind a draft's wrong token too.
    """

    def say(logits: Tensor, rows: list[SampleRow], ops: Ops) -> list[Sampled]:
        if listen is not None:
            listen(logits, rows)
        return [_said(one, row, script) for one, row in zip(sample(logits, rows, ops), rows, strict=True)]

    with mock.patch.object(runner, "sample", say):
        yield


def _said(drawn: Sampled, row: SampleRow, script: Script) -> Sampled:
    response = script.get((row.sample, row.turn))
    # A draft may go on behind the end of the response: what is drawn there is never asked for.
    if response is None or row.index >= len(response):
        return drawn
    return replace(drawn, token_id=response[row.index])


def spoilt(memory: array[int], right: int, seed: int, vocabulary: int) -> array[int]:
    """A memory, int32, of which `right` percent are left and the others, evenly spread, replaced."""
    other = tokens(len(memory), seed, vocabulary)
    share = (100 - right) / 100
    wrong = [int((i + 1) * share) > int(i * share) for i in range(len(memory))]
    ids = zip(memory, other, wrong, strict=True)
    return array("i", [token if not replaced else new + (new == token) for token, new, replaced in ids])

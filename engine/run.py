"""Run: the tokens that one span draws in one step, as long as they are the ones that its draft foresaw.

Each is drawn from the row before it, exactly as without a draft: by the filters, penalties and random numbers of its
own place in the response. A draft that foresaw it only means that the next row is already there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice

from .sampler import Sampled, SampleRow
from .step import Span, SpanResult

__all__ = ["FIRST_TILE", "HEAD_TILE", "Rounds", "Run"]

# Rows that go through the head at once: bounds the [rows, vocabulary] logits. Of drafts few at first and twice as many
# each time: most that are wrong are so early. A GPU takes as long for a few rows as for a tile, and each round waits.
HEAD_TILE, FIRST_TILE = 64, 8


class Run:
    """What a span has drawn so far. first_row: the batch's row of the span's last token before the draft."""

    def __init__(self, span: Span, first_row: int, eos_ids: tuple[int, ...]) -> None:
        self._span, self._first_row, self._eos_ids = span, first_row, eos_ids
        self._drawn: list[Sampled] = []
        self._error: str | None = None
        self.over = False

    @property
    def left(self) -> int:
        """Rows that may still be drawn from."""
        return len(self._span.draft) + 1 - len(self._drawn)

    def rows(self, count: int) -> range:
        """The batch's next `count` rows to draw from."""
        first = self._first_row + len(self._drawn)
        return range(first, first + count)

    def sample_rows(self, count: int) -> list[SampleRow]:
        """What these rows need to become tokens, each as if the draft before it had been drawn."""
        sequence, draft = self._span.sequence, self._span.draft
        prompt, response = array("i"), array("i")
        if sequence.params.penalises:  # else nobody reads the ids
            prompt, response = sequence.tokens[: sequence.prompt_length], sequence.response
        return [
            SampleRow(
                params=sequence.params,
                sample=sequence.sample,
                turn=sequence.turn,
                index=sequence.response_length + i,
                prompt_ids=prompt,
                response_ids=response + draft[:i],
                eos_ids=self._eos_ids,
            )
            for i in range(len(self._drawn), len(self._drawn) + count)
        ]

    def take(self, drawn: Iterable[Sampled]) -> None:
        """Go on with the tokens of the next rows, up to the first that the draft did not foresee."""
        for token in drawn:
            if self.over:
                continue
            self._error = token.error
            if token.error is None:
                self._drawn.append(token)
            place = len(self._drawn) - 1
            self.over = token.error is not None or self.left == 0 or token.token_id != self._span.draft[place]

    @property
    def result(self) -> SpanResult:
        """What the scheduler is told."""
        return SpanResult(
            token_ids=array("i", [token.token_id for token in self._drawn]),
            logprobs=[token.logprob for token in self._drawn],
            top=[token.top for token in self._drawn],
            error=self._error,
        )


class Rounds:
    """Some runs, a tile of rows at a time; rows behind one that gave another token than foreseen are never drawn from.

    rows: of the batch, rising, to draw from in this round; none when all runs are over.
    """

    def __init__(self, runs: Iterable[Run], first_tile: int) -> None:
        self._live, self._most = list(runs), first_tile
        self._parts: list[tuple[Run, int]]
        self.rows: list[int]
        self._deal()

    def sample_rows(self) -> list[SampleRow]:
        """What the rows need to become tokens."""
        return [row for run, count in self._parts for row in run.sample_rows(count)]

    def take(self, drawn: Iterable[Sampled]) -> None:
        """Give the runs the tokens of the rows, and go on to the next round."""
        tokens = iter(drawn)
        for run, count in self._parts:
            run.take(islice(tokens, count))
        self._live = [run for run in self._live if not run.over]
        self._most *= 2
        self._deal()

    def _deal(self) -> None:
        """A fair share of a tile's rows for each run."""
        if not self._live:
            self._parts, self.rows = [], []
            return
        most = min(max(self._most, len(self._live)), HEAD_TILE)
        share = max(1, most // len(self._live))
        self._parts = [(run, min(share, run.left)) for run in self._live[:most]]
        self.rows = [row for run, count in self._parts for row in run.rows(count)]

"""Run: the tokens that one span draws in one step, as long as they are the ones that its draft foresaw.

Each is drawn from the row before it, exactly as without a draft: by the filters, penalties and random numbers of its
own place in the response. A draft that foresaw it only means that the next row is already there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from .sampler import Sampled, SampleRow
from .step import Span, SpanResult

__all__ = ["Run", "tile"]


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


def tile(runs: list[Run], most: int) -> list[tuple[Run, int]]:
    """Runs that are not over and how many rows to draw from for each, `most` rows in all: a fair share for each run."""
    share = max(1, most // len(runs))
    return [(run, min(share, run.left)) for run in runs[:most]]

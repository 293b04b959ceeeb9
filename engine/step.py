"""Step: what one forward pass computes, and what it found. The scheduler makes it, the runner consumes it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from .sequence import Sequence, TokenLogprob

__all__ = ["KVMove", "PageCopy", "Span", "SpanResult", "Step"]


def _no_ids() -> array[int]:
    return array("i")


@dataclass(frozen=True)
class PageCopy:
    """Copy page `source` to page `target`, whose first tokens are the same, before the step writes anything."""

    source: int
    target: int


@dataclass(frozen=True)
class KVMove:
    """Copy the KV of `length` tokens from position `source` of one page table to `target` of another, keys turned.

    Approximate: see carried.py. The source's pages are in no other move or copy as a target.
    """

    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Span:
    """Tokens start .. start + len(ids) of one sequence, to be computed in this step, then a draft of those to follow.

    pages: the sequence's table. samples: a token is drawn after the last row. scored_targets: the next prompt tokens
    whose log-probabilities are owed by as many rows from index `scored_from` on.
    draft: ids that may be drawn after the last row, each computed as if it was; only where the span samples.
    source: where the draft comes from.
    """

    sequence: Sequence
    start: int
    ids: array[int]
    pages: tuple[int, ...]
    samples: bool
    scored_from: int
    scored_targets: array[int]
    draft: array[int] = field(default_factory=_no_ids)
    source: str = ""

    @property
    def rows(self) -> int:
        """Rows of the batch that the span takes."""
        return len(self.ids) + len(self.draft)

    @property
    def wanted(self) -> int:
        """Rows at its end that hold all from which a token is drawn or scored."""
        if self.scored_targets:
            return self.rows - self.scored_from
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True)
class Step:
    """One forward pass: page copies, then moves, then a ragged batch of spans."""

    copies: tuple[PageCopy, ...]
    spans: tuple[Span, ...]
    moves: tuple[KVMove, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.copies or self.spans or self.moves)


@dataclass(frozen=True)
class SpanResult:
    """What the runner found for a span.

    token_ids: the tokens drawn, if it samples: those of the draft as long as they are what is drawn, then one more.
    logprobs, top: of each of them. prompt_logprobs: those that the span owes.
    error: why no token could be drawn after these; the sequence can't go on.
    """

    token_ids: array[int] = field(default_factory=_no_ids)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    error: str | None = None

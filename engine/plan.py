"""Plan: a step in the making."""

from __future__ import annotations

from array import array

from .draft import Draft
from .sequence import Sequence
from .step import KVMove, PageCopy, Span, Step

__all__ = ["Plan"]


class Plan:
    """How many tokens each sequence gets, its draft, and what is left of the budget, in tokens."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.lengths: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, Draft] = {}
        self.copies: list[PageCopy] = []
        self.moves: dict[Sequence, KVMove] = {}

    def take(self, sequence: Sequence, length: int) -> None:
        """Let a sequence compute its next `length` tokens, if any."""
        if length > 0:
            self.lengths[sequence] = length
            self.budget -= length

    def add(self, sequence: Sequence, draft: Draft) -> None:
        """Let a draft follow a sequence's tokens."""
        self.drafts[sequence] = draft
        self.budget -= len(draft.ids)

    def drop(self, sequence: Sequence) -> None:
        """Leave a sequence out, whose pages are about to be taken."""
        self.budget += self.lengths.pop(sequence, 0)
        self.moves.pop(sequence, None)
        draft = self.drafts.pop(sequence, None)
        self.budget += 0 if draft is None else len(draft.ids)
        self.copies = [copy for copy in self.copies if copy.target not in sequence.pages]

    def step(self) -> Step:
        """The finished plan."""
        spans = tuple(_span(sequence, length, self.drafts.get(sequence)) for sequence, length in self.lengths.items())
        return Step(tuple(self.copies), spans, tuple(self.moves.values()))


def _span(sequence: Sequence, length: int, draft: Draft | None) -> Span:
    start, end = sequence.computed, sequence.computed + length
    scored_from, targets = 0, array("i")
    if sequence.first_unscored < end:
        scored = range(max(start, sequence.first_unscored), min(end, sequence.prompt_length - 1))
        scored_from, targets = scored.start - start, sequence.tokens[scored.start + 1 : scored.stop + 1]
    return Span(
        sequence=sequence,
        start=start,
        ids=sequence.tokens[start:end],
        pages=tuple(sequence.pages),
        samples=end == len(sequence.tokens) and not sequence.is_open,
        scored_from=scored_from,
        scored_targets=targets,
        draft=array("i") if draft is None else draft.ids,
        source="" if draft is None else draft.source,
    )

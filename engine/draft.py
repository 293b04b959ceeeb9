"""Draft and Drafter: tokens that may follow a response, proposed so that one step verifies many of them.

A draft never changes what is drawn, only how many steps that takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from .sequence import DraftCounters, Segment

__all__ = ["Draft", "Drafter"]


@dataclass(frozen=True)
class Draft:
    """Proposed ids (int32, of the model's vocabulary) and where they come from: "memory" and the like."""

    ids: array[int]
    source: str


class Drafter:
    """Proposes what may follow one response: the rest of a text as long as the response repeats it."""

    def __init__(self, text: array[int], source: str) -> None:
        self._text, self._source = text, source
        self.statistics: dict[str, DraftCounters] = {}

    @classmethod
    def for_prompt(cls, prompt: Iterable[int] | Iterable[Segment]) -> Drafter:
        """The drafter of a prompt, given as segments or ids."""
        memory = [part.ids for part in prompt if isinstance(part, Segment) and part.name == "memory"]
        return cls(memory[0] if memory else array("i"), "memory")

    def propose(self, response: array[int], limit: int) -> Draft | None:
        """At most `limit` ids that may follow the response so far; the same ones when it is asked again."""
        if response != self._text[: len(response)] or len(response) >= len(self._text):
            return None
        return Draft(self._text[len(response) : len(response) + limit], self._source)

    def record(self, draft: Draft, accepted: int) -> None:
        """Learn that the first `accepted` ids of a draft, or of the head of it that there was room for, were drawn."""
        self.statistics.setdefault(draft.source, DraftCounters()).add(len(draft.ids), accepted)

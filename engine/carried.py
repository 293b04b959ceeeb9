"""Carried: KV of a finished response that a prompt takes over at another position instead of computing it. Approximate.

Two things differ when text moves: the angle of its keys, which is put right (rotary.py), and what the text attended to
when it was written, which is not. A few exact tokens at its start repair most of that (EPIC, arXiv 2410.15332), so the
first RECOMPUTED ones are computed. What is approximate stays with its sequence: from there on none of its pages enters
the prefix index. A sequence that loses its pages, or whose source did, is computed exactly.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from .config import SamplingParams
from .errors import RequestError
from .sequence import Sequence
from .step import KVMove

__all__ = ["RECOMPUTED", "Carried"]

RECOMPUTED = 16


@dataclass(frozen=True)
class Carried:
    """Tokens `start` to `start + length` of a finished sequence, which stand in a prompt from `position` on.

    source: it was added with keep_kv=True; its pages are given back once they are copied.
    """

    source: Sequence
    start: int
    position: int
    length: int

    @classmethod
    def of_response(cls, source: Sequence, first: int, position: int, length: int) -> Carried:
        """`length` tokens from index `first` of a response on, without a last one whose KV no step has computed."""
        start = source.prompt_length + first
        return cls(source, start, position, min(length, source.computed - start))

    @property
    def first(self) -> int:
        """The first position whose KV is moved; all before it is exact."""
        return self.position + RECOMPUTED

    @property
    def end(self) -> int:
        return self.position + self.length

    def move(self, pages: list[int]) -> KVMove:
        """The move to a sequence with these pages."""
        return KVMove(
            source_pages=tuple(self.source.pages),
            target_pages=tuple(pages),
            source=self.start + RECOMPUTED,
            target=self.first,
            length=self.length - RECOMPUTED,
        )

    def check(self, tokens: array[int], params: SamplingParams, is_open: bool) -> None:
        """Raises RequestError where a request with this prompt can't take it over."""
        if is_open:
            raise RequestError("an open sequence can't take over carried KV; add the whole prompt at once")
        if params.prompt_logprobs or params.top_logprobs:
            raise RequestError(
                "carried KV is approximate, so top_logprobs and prompt_logprobs can't be asked for; leave them out, or "
                "leave out `carried`"
            )
        if not (self.source.finished and self.source.keeps_kv):
            raise RequestError(
                f"sequence {self.source.id} has no KV to carry; add it with keep_kv=True and wait until it has finished"
            )
        theirs, ours = self.source.tokens[self.start :][: self.length], tokens[self.position : self.end]
        if self.length > 0 and (min(self.start, self.position) < 0 or theirs != ours or self.end >= len(tokens)):
            raise RequestError(
                f"tokens {self.start} to {self.start + self.length} of sequence {self.source.id} are not those of the "
                f"prompt from {self.position} on, with at least one behind them; only KV of the same ids can be carried"
            )

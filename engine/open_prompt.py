"""OpenPrompt: the next turn's prompt, prefilled while the turn before it still writes the memory."""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import TYPE_CHECKING

from .draft import Drafter
from .reading import Request
from .sequence import Sequence, joined
from .templates import Slot

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["OpenPrompt"]


class OpenPrompt:
    """Follows the memory of a running turn and computes what is known of the prompt after it.

    What the running turn's prompt starts with is resident, so nothing is done while the two prompts agree. At the first
    token that differs the next turn becomes an open sequence, and the prefix index gives it the pages that they share.

    sequence: the open sequence, where there is one.
    """

    def __init__(self, engine: Engine, running: Request, following: Request, sample: int) -> None:
        """following: the next turn's request with an empty memory. sample: of its random stream."""
        self.sequence: Sequence | None = None
        self._engine = engine
        self._resident = running.prompt_ids
        self._following = following
        self._sample = sample
        self._head = joined(takewhile(lambda segment: segment.name != Slot.MEMORY, following.segments))

    def feed(self, memory: array[int]) -> None:
        """Take what is known of the memory, int32 ids from its start; it may also prove other than fed before."""
        known = self._head + memory
        if self.sequence is not None and not self._extend(known):
            self.drop()
        if self.sequence is None and known != self._resident[: len(known)]:
            following = self._following
            self.sequence = self._engine.add(
                known, following.params, sample=self._sample, turn=following.index, is_open=True
            )

    def close(self, request: Request, drafter: Drafter | None) -> Sequence:
        """The sequence of the next turn, whose prompt is now complete. drafter: as in Engine.add."""
        if self.sequence is not None and self._extend(request.prompt_ids):
            sequence, self.sequence = self.sequence, None
            self._engine.close(sequence, drafter=drafter)
            return sequence
        self.drop()
        return self._engine.add(
            request.segments, request.params, sample=self._sample, turn=request.index, drafter=drafter
        )

    def drop(self) -> None:
        """End the open sequence, if there is one."""
        if self.sequence is not None:
            with self._engine.aborting([self.sequence]):
                pass
            self.sequence = None

    def _extend(self, ids: array[int]) -> bool:
        """Let the open sequence grow to `ids`; False if that is not how it goes on, or if somebody has aborted it."""
        sequence = self.sequence
        if sequence is None or sequence.finished or ids[: len(sequence.tokens)] != sequence.tokens:
            return False
        if len(ids) > len(sequence.tokens):
            self._engine.extend(sequence, ids[len(sequence.tokens) :])
        return True

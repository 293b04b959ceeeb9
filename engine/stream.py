"""Update and Stream: what the steps bring for a sequence, one by one or as an iterator that owns it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import RequestError
from .sequence import Completion, Sequence

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Stream", "Update", "require_delivery", "without_error"]


@dataclass(frozen=True)
class Update:
    """What one step brought for one sequence.

    token_ids: the ids drawn, int32. text: new text that no later token can change. text_tokens: how many leading ids of
    the whole response belong to its text whatever comes: no end, and before any stop string. completion: set when the
    sequence is finished.
    """

    sequence: Sequence
    token_ids: array[int]
    text: str
    text_tokens: int
    completion: Completion | None


class Stream(Iterator[Update]):
    """The updates of one sequence. `close`, a `with` block or letting go of it aborts what is not finished."""

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine, self._sequence = engine, sequence
        self._pending: deque[Update] = deque()
        self._over = False

    def __next__(self) -> Update:
        """The next update. Raises RequestError if the request ends in an error."""
        if self._over:
            raise StopIteration
        while not self._pending:
            self._pending.extend(self._engine.step_for([self._sequence]))
            require_delivery([self._sequence] if self._sequence.finished and not self._pending else [])
        update = self._pending.popleft()
        if update.completion is not None:
            self._over = True
            without_error(update.completion, f"sequence {self._sequence.id}")
        return update

    def close(self) -> None:
        """Abort the sequence if it is not finished; the stream then ends."""
        self._over = True
        with self._engine.aborting([self._sequence]):
            pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def require_delivery(missing: list[Sequence]) -> None:
    """A driver must not wait for ever for updates that somebody else has taken."""
    if missing:
        raise RequestError(
            f"the last update of sequence {missing[0].id} was handed out by another call of Engine.step; "
            "use step_for with one's own sequences beside generate and stream"
        )


def without_error(completion: Completion, whose: str) -> Completion:
    """The completion itself; RequestError if it ended in an error."""
    if completion.finish_reason == "error":
        raise RequestError(f"{whose} failed after {len(completion.token_ids)} tokens: {completion.error}")
    return completion

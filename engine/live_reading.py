"""LiveReading: a reading whose turns an engine takes, one after the other, each opened while the one before it runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING

from .acceptance import Acceptance
from .carried import Carried
from .draft import Drafter
from .errors import RequestError
from .memory_reading import MemoryReading
from .open_prompt import OpenPrompt
from .reading import Answered, Event, Request, TextProgress, Turn, TurnEnded
from .sequence import Completion, Sequence
from .stream import Update
from .templates import Slot

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["LiveReading"]


class LiveReading:
    """Hands a reading's requests to the engine and its responses to the reading.

    What one turn shows of how good drafts are serves the next.

    place: number of the reading among those that are driven together. finished: whether it has its answer.
    """

    def __init__(self, engine: Engine, reading: MemoryReading, place: int, sample: int) -> None:
        """sample: the sample index of its random streams."""
        self.place = place
        self.finished = False
        self._engine, self._reading, self._sample = engine, reading, sample
        self._running: tuple[Request, Sequence] | None = None
        self._following: OpenPrompt | None = None
        self._acceptance = Acceptance(engine.step_cost)
        self._carries = reading.carries

    @property
    def sequences(self) -> list[Sequence]:
        """What it has in the engine: the running turn and the opened one."""
        opened = None if self._following is None else self._following.sequence
        return [sequence for sequence in (self._running and self._running[1], opened) if sequence is not None]

    def take_turn(self, ended: Turn | None = None) -> Iterator[Event]:
        """Begin the next turn, or end with the answer. ended: the turn before it, if it was taken here."""
        request = self._reading.next()
        if request is None:
            self.finished = True
            yield Answered(self._reading.answered())
            return
        drafter = None
        if self._engine.drafts:
            drafter = Drafter.for_prompt(request.segments, acceptance=self._acceptance)
            self._reading.siblings.begin(self.place, request.index, drafter)
        if self._following is None:
            sequence = self._engine.add(
                request.segments,
                request.params,
                sample=self._sample,
                turn=request.index,
                drafter=drafter,
                keep_kv=self._carries and request.kind == "update",
                carried=self._carried(request, ended) if self._carries else None,
            )
        else:
            sequence = self._following.close(request, drafter)
        self._running, self._following = (request, sequence), None
        yield self._reading.started(request)
        if self._engine.config.open_prompt and request.kind == "update" and not self._carries:
            self._following = OpenPrompt(self._engine, request, self._reading.following(), self._sample)
            self._following.feed(array("i"))

    def follow(self, update: Update) -> Iterator[Event]:
        """Go on with what a step brought. Raises RequestError when the turn was aborted or failed."""
        if self._running is None or update.sequence is not self._running[1]:
            return  # the opened turn was aborted by somebody else, and will be added anew
        request, sequence = self._running
        if self._engine.drafts:
            self._reading.siblings.write(self.place, update.token_ids)
        if update.text:
            yield TextProgress(request.kind, request.index, update.text, sequence.response_length)
        if update.completion is None:
            self._look_ahead(sequence.response[: update.text_tokens])
            return
        turn = _ended(request, update.completion)
        self._reading.record(turn)
        yield TurnEnded(turn, self._reading.memory_text, self._reading.counters.document_tokens)
        yield from self.take_turn(turn)

    def _look_ahead(self, written: array[int]) -> None:
        if self._following is not None:
            self._following.feed(self._reading.memory_so_far(written))

    def _carried(self, request: Request, ended: Turn | None) -> Carried | None:
        """The KV of the memory that the turn before has written."""
        if ended is None or self._running is None:
            return None
        before = takewhile(lambda segment: segment.name != Slot.MEMORY, request.segments)
        position = sum(len(segment.ids) for segment in before)
        memory = len(self._reading.memory)
        length = min(memory, len(request.prompt_ids) - 1 - position)
        return Carried.of_response(self._running[1], ended.text_tokens - memory, position, length)


def _ended(request: Request, completion: Completion) -> Turn:
    if completion.finish_reason in ("abort", "error"):
        what = "was aborted" if completion.error is None else f"failed ({completion.error})"
        raise RequestError(
            f"turn {request.index} ({request.kind}) {what} after {len(completion.token_ids)} tokens, "
            "so the reading has no answer; read again, or resume from a trace"
        )
    return Turn.of(request, completion)

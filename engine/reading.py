"""What a memory agent asks, records and reports: requests, turns, readings and the events between them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from .config import SamplingParams
from .sequence import Completion, DraftCounters, Segment, joined

__all__ = [
    "Answered",
    "Chunks",
    "Event",
    "Kind",
    "Reading",
    "ReadingCounters",
    "Request",
    "TextProgress",
    "Turn",
    "TurnEnded",
    "TurnStarted",
]

Kind = Literal["update", "final", "call"]  # of a memory agent the first two; what other agents ask


@dataclass(frozen=True)
class Request:
    """What a reading asks of the engine next. index: number of the turn, from 0; it keys the random stream."""

    kind: Kind
    index: int
    segments: list[Segment]
    params: SamplingParams

    @property
    def prompt_ids(self) -> array[int]:
        """The whole prompt, int32."""
        return joined(self.segments)


@dataclass(frozen=True)
class Turn:
    """One prompt and its response.

    prompt_ids, response_ids: int32; the response with the token that ended it.
    text_tokens: how many leading ids of the response lie wholly before what ended it.
    text: the response without special tokens, cut before a stop string.
    logprobs: per response token, in nats (see Completion). finish_reason: "stop" or "length".
    prefilled_tokens, decode_steps: what the turn cost the engine. prefilled_ahead: of the tokens prefilled, those that
    the turn before had not ended for. cached_tokens: prompt tokens that were resident already. carried_tokens: those
    with the approximate KV of AgentConfig.memory_kv="carried". drafts: by source, what came of drafts.
    """

    kind: Kind
    index: int
    prompt_ids: array[int]
    response_ids: array[int]
    text_tokens: int
    text: str
    logprobs: list[float]
    finish_reason: str
    seconds: float
    prefilled_tokens: int
    decode_steps: int
    prefilled_ahead: int = 0
    cached_tokens: int = 0
    carried_tokens: int = 0
    drafts: dict[str, DraftCounters] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, completion: Completion) -> Turn:
        """What came of a request."""
        return cls(
            kind=request.kind,
            index=request.index,
            prompt_ids=request.prompt_ids,
            response_ids=completion.token_ids,
            text_tokens=completion.text_tokens,
            text=completion.text,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            seconds=completion.seconds,
            prefilled_tokens=completion.counters.prefilled_tokens,
            decode_steps=completion.counters.decode_steps,
            prefilled_ahead=completion.counters.prefilled_ahead,
            cached_tokens=completion.counters.cached_tokens,
            carried_tokens=completion.counters.carried_tokens,
            drafts=completion.counters.drafts,
        )


@dataclass
class ReadingCounters:
    """What a reading has cost so far.

    document_tokens: tokens of the chunks whose turns have ended. truncated_memories: memories cut at their limit, which
    are used as they are. empty_memories: memories without a token. undecoded_turns: turns that took no decode step, as
    a draft was right to its end. seconds: the sum over the turns.
    prefilled_tokens, prefilled_ahead, cached_tokens, carried_tokens, decode_steps, drafts: as in Turn, summed.
    """

    turns: int = 0
    document_tokens: int = 0
    prefilled_tokens: int = 0
    prefilled_ahead: int = 0
    cached_tokens: int = 0
    carried_tokens: int = 0
    decode_steps: int = 0
    truncated_memories: int = 0
    empty_memories: int = 0
    undecoded_turns: int = 0
    seconds: float = 0.0
    drafts: dict[str, DraftCounters] = field(default_factory=dict)

    def add(self, turn: Turn) -> None:
        """Count a turn that ended."""
        self.turns += 1
        self.prefilled_tokens += turn.prefilled_tokens
        self.prefilled_ahead += turn.prefilled_ahead
        self.cached_tokens += turn.cached_tokens
        self.carried_tokens += turn.carried_tokens
        self.decode_steps += turn.decode_steps
        self.undecoded_turns += not turn.decode_steps
        self.seconds += turn.seconds
        for source, counters in turn.drafts.items():
            self.drafts[source] = self.drafts.get(source, DraftCounters()) + counters


@dataclass(frozen=True)
class Reading:
    """A document read and a question answered.

    answer: text of the final turn. memory: text of the last memory. turns: empty with AgentConfig(keep_turns=False).
    """

    answer: str
    memory: str
    turns: list[Turn]
    counters: ReadingCounters = field(default_factory=ReadingCounters)


@dataclass(frozen=True)
class TurnStarted:
    """A turn was handed to the engine.

    document_tokens: tokens read before it. chunk_tokens: tokens it reads (final: 0). tokens_ahead: tokens at hand that
    are still to be read.
    """

    kind: Kind
    index: int
    prompt_tokens: int
    chunk_tokens: int
    document_tokens: int
    tokens_ahead: int


@dataclass(frozen=True)
class TextProgress:
    """New text of the running turn. tokens: length of its response so far."""

    kind: Kind
    index: int
    text: str
    tokens: int


@dataclass(frozen=True)
class TurnEnded:
    """A turn is complete. memory: text of the memory that holds from now on. document_tokens: tokens read so far."""

    turn: Turn
    memory: str
    document_tokens: int


@dataclass(frozen=True)
class Answered:
    """The reading is complete; always the last event."""

    reading: Reading


Event = TurnStarted | TextProgress | TurnEnded | Answered


class Chunks:
    """A stream of int32 ids cut into chunks of `size` tokens, the last one shorter; none for an empty document.

    Holds a chunk and a piece at a time. tokens_ahead: how many it holds beyond the last chunk it gave. An exception in
    the stream is raised in place of the chunk that would need what comes after it; looking ahead raises nothing.
    """

    def __init__(self, pieces: Iterable[array[int] | Exception], size: int) -> None:
        self._pieces = iter(pieces)
        self.size = size
        self._held = array("i")
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[array[int]]:
        return self

    def __next__(self) -> array[int]:
        chunk = self.peek()
        if self._error is not None and len(chunk) < self.size:
            raise self._error
        if not chunk:
            raise StopIteration
        del self._held[: len(chunk)]
        return chunk

    def peek(self) -> array[int]:
        """The chunk that comes next, or what there is of it; empty at the end."""
        while len(self._held) < self.size and self._error is None:
            piece = next(self._pieces, None)
            if piece is None:
                break
            if isinstance(piece, Exception):
                self._error = piece
            else:
                self._held.extend(piece)
        return self._held[: self.size]

    @property
    def tokens_ahead(self) -> int:
        return len(self._held)

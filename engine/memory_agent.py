"""MemoryAgent: reads a document chunk by chunk, overwrites its memory after each, answers from the memory alone.

The method is MemAgent (arXiv 2507.02259). `MemoryReading` is the state machine of one reading and never touches the
engine; `MemoryAgent` drives any number of them. Another workflow is another such pair.
"""

from __future__ import annotations

import dataclasses
import warnings
from array import array
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING

from .config import AgentConfig
from .errors import ConfigError, RequestError
from .reading import (
    Answered,
    Chunks,
    Event,
    Reading,
    ReadingCounters,
    Request,
    TextProgress,
    Turn,
    TurnEnded,
    TurnStarted,
)
from .sequence import Completion, Sequence
from .templates import FIRST_MEMORY, Slot, TokenTemplate, find_final, find_update

if TYPE_CHECKING:
    from .engine import Engine
    from .tokenizer import Tokenizer

__all__ = ["MemoryAgent", "MemoryReading", "Reading", "Turn", "memory_ids"]

THINK_END = "</think>"


class MemoryReading:
    """One reading as a state machine: `next` says what to ask, `record` takes the turn that came of it.

    memory: int32 ids of the memory that holds now. counters: what it cost so far. chunk_tokens: tokens read per turn.
    """

    def __init__(self, agent: MemoryAgent, document: str | Iterable[str], question: str) -> None:
        """Made by MemoryAgent.open, which documents the errors."""
        self._agent = agent
        self._question = agent.tokenizer.encode(question)
        self.chunk_tokens = agent.chunk_size(len(self._question))
        self._chunks = Chunks(agent.tokenizer.encode_pieces(_pieces(document)), self.chunk_tokens)
        self._chunk = array("i")
        self._turns: list[Turn] = []
        self._answer: str | None = None
        self.memory = agent.first_memory
        self.counters = ReadingCounters()

    def next(self) -> Request | None:
        """The next turn's request, or None once the answer is there. Pulls one chunk; call it once per turn."""
        if self._answer is not None:
            return None
        agent, index = self._agent, self.counters.turns
        self._chunk = next(self._chunks, array("i"))
        values = {Slot.PROBLEM: self._question, Slot.MEMORY: self.memory, Slot.CHUNK: self._chunk}
        if self._chunk:
            return Request("update", index, agent.update_prompt.fill(values), agent.update_params)
        return Request("final", index, agent.final_prompt.fill(values), agent.final_params)

    def record(self, turn: Turn) -> None:
        """Go on with the turn that `next` asked for: its response becomes the memory, or the answer."""
        self.counters.add(turn)
        if self._agent.config.keep_turns:
            self._turns.append(turn)
        if turn.kind == "final":
            self._answer = turn.text
            return
        self.memory = memory_ids(turn)
        if self._agent.config.strip_thinking:
            self.memory = after_thinking(self.memory, self._agent.tokenizer)
        self.counters.document_tokens += len(self._chunk)
        self.counters.truncated_memories += turn.finish_reason == "length"
        self.counters.empty_memories += not self.memory

    @property
    def memory_text(self) -> str:
        return self._agent.tokenizer.decode(self.memory)

    @property
    def result(self) -> Reading | None:
        """The finished reading, or None while there are turns to take."""
        if self._answer is None:
            return None
        return Reading(self._answer, self.memory_text, self._turns, self.counters)

    def started(self, request: Request) -> TurnStarted:
        """The event that a request was handed to the engine."""
        prompt_tokens = sum(len(segment.ids) for segment in request.segments)
        return TurnStarted(
            kind=request.kind,
            index=request.index,
            prompt_tokens=prompt_tokens,
            chunk_tokens=len(self._chunk),
            document_tokens=self.counters.document_tokens,
            tokens_ahead=self._chunks.tokens_ahead,
        )


class MemoryAgent:
    """Reads documents with an engine, one memory-overwriting turn per chunk.

        agent = MemoryAgent(engine, AgentConfig(chunk_tokens=5000))
        reading = agent.read(document, "Who built the lighthouse?")

    Streams of one engine may be taken in turns; each step then serves all of them.
    """

    def __init__(self, engine: Engine, config: AgentConfig | None = None) -> None:
        """Raises ConfigError for a model without a chat template, or with one that changes what a user says."""
        self.config = AgentConfig() if config is None else config
        if not isinstance(self.config, AgentConfig):
            raise ConfigError(f"a memory agent's configuration is an AgentConfig, got {config!r}")
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.update_prompt = TokenTemplate(find_update(self.config.template), engine.tokenizer)
        self.final_prompt = TokenTemplate(find_final(self.config.final_form), engine.tokenizer)
        self.update_params = dataclasses.replace(self.config.sampling, max_tokens=self.config.memory_tokens)
        self.final_params = dataclasses.replace(self.config.sampling, max_tokens=self.config.answer_tokens)
        self.first_memory = engine.tokenizer.encode(FIRST_MEMORY)

    def read(self, document: str | Iterable[str], question: str) -> Reading:
        """Read a document, whole or as a stream of texts, and answer the question.

        Raises RequestError when the engine has no room for the question and limits, or when a turn fails.
        """
        return self.read_many([(document, question)])[0]

    def read_many(self, tasks: Iterable[tuple[str | Iterable[str], str]]) -> list[Reading]:
        """Read (document, question) pairs side by side; each goes on as soon as its own turn ends.

        A task's place in the list is its sample index, so that equal tasks draw different numbers.
        Raises as `read` does; an error in one ends them all.
        """
        readings = [self.open(*_task(task)) for task in tasks]
        for _ in self._drive(readings):
            pass
        return [reading.result for reading in readings if reading.result is not None]

    def stream(self, document: str | Iterable[str], question: str) -> Generator[Event, None, None]:
        """Read as `read` does and yield what happens; Answered comes last. Closing it aborts the running turn."""
        return self.run(self.open(document, question))

    def open(self, document: str | Iterable[str], question: str) -> MemoryReading:
        """A reading that nothing drives yet.

        Raises RequestError for arguments of another type and when the engine has no room for a chunk; warns when it has
        room for less than chunk_tokens. A piece of the document that is no str raises it when the piece is read.
        """
        if not isinstance(question, str):
            raise RequestError(f"the question must be a str, got {type(question).__name__}")
        if isinstance(document, (bytes, bytearray)) or not isinstance(document, Iterable):
            kind = type(document).__name__
            raise RequestError(f"a document is a str or an iterable of str, got {kind}; open_document reads files")
        return MemoryReading(self, document, question)

    def run(self, reading: MemoryReading) -> Generator[Event, None, None]:
        """Drive an opened reading to its end and yield what happens."""
        yield from self._drive([reading])

    def chunk_size(self, question_tokens: int) -> int:
        """Tokens per chunk for a question of this length: chunk_tokens, or with a warning what the engine has room for.

        An update turn needs room for its fixed text, question, old memory, chunk and new memory.
        Raises RequestError when that leaves no token for the chunk, or when the final turn does not fit.
        """
        config, longest = self.config, self.engine.longest
        limit, remedy = f"the window of {longest} tokens", ""
        if longest < self.engine.window:
            limit, remedy = f"the KV pool of {longest} tokens", "; or raise kv_bytes or kv_share of EngineConfig"
        memory = max(config.memory_tokens, len(self.first_memory))
        final = self.final_prompt.fixed_tokens + question_tokens + memory + config.answer_tokens
        others = self.update_prompt.fixed_tokens + question_tokens + memory + config.memory_tokens
        need = max(others + 1, final)
        if need > longest:
            raise RequestError(
                f"{limit} is too small: with a question of {question_tokens}, a memory of "
                f"{config.memory_tokens} and an answer of {config.answer_tokens} tokens a turn needs at least {need}; "
                f"shorten the question or lower memory_tokens or answer_tokens{remedy}"
            )
        room = longest - others
        if room < config.chunk_tokens:
            warnings.warn(
                f"chunk_tokens={config.chunk_tokens} lowered to {room}: {limit} also holds the "
                f"question ({question_tokens}), the prompt's text ({self.update_prompt.fixed_tokens}), the old memory "
                f"({memory}) and the new one ({config.memory_tokens})",
                stacklevel=4,
            )
        return min(room, config.chunk_tokens)

    def _drive(self, readings: ListLike[MemoryReading]) -> Generator[Event, None, None]:
        """Take the turns of all readings, each at its own pace. A reading's place in the list is its sample index."""
        running: list[Sequence] = []
        asked: dict[Sequence, tuple[int, Request]] = {}

        def start(index: int) -> Event:
            """Hand a reading's next turn to the engine, or say that it has its answer."""
            request = readings[index].next()
            if request is None:
                return Answered(_finished(readings[index]))
            sequence = self.engine.add(request.segments, request.params, sample=index, turn=request.index)
            running.append(sequence)
            asked[sequence] = (index, request)
            return readings[index].started(request)

        with self.engine.aborting(running):
            for index in range(len(readings)):
                yield start(index)
            while running:
                for update in self.engine.step_for(running):
                    index, request = asked[update.sequence]
                    if update.text:
                        yield TextProgress(request.kind, request.index, update.text, update.sequence.response_length)
                    if update.completion is None:
                        continue
                    running.remove(update.sequence)
                    del asked[update.sequence]
                    turn = _ended(request, update.completion)
                    readings[index].record(turn)
                    yield TurnEnded(turn, readings[index].memory_text, readings[index].counters.document_tokens)
                    yield start(index)


def _task(task: object) -> tuple[str | Iterable[str], str]:
    if not isinstance(task, (tuple, list)) or len(task) != 2:
        raise RequestError(f"a task is a pair (document, question), got {task!r:.60}; read takes a single document")
    document, question = task
    return document, question


def _pieces(document: str | Iterable[str]) -> Iterator[str]:
    for piece in [document] if isinstance(document, str) else document:
        if not isinstance(piece, str):
            raise RequestError(f"a document's pieces are str, got {piece!r:.60}; decode bytes first")
        yield piece


def _ended(request: Request, completion: Completion) -> Turn:
    if completion.finish_reason in ("abort", "error"):
        what = "was aborted" if completion.error is None else f"failed ({completion.error})"
        raise RequestError(
            f"turn {request.index} ({request.kind}) {what} after {len(completion.token_ids)} tokens, "
            "so the reading has no answer; read again, or resume from a trace"
        )
    return Turn.of(request, completion)


def memory_ids(turn: Turn) -> array[int]:
    """The memory that an update turn wrote, int32: its own ids, never re-tokenised, white space kept.

    They end before the first EOS or stop id, or with the last token wholly before the stop string. A special token that
    the model drew earlier stays, as in MemAgent's training: in the next prompt it is the control token that it was.
    """
    return turn.response_ids[: turn.text_tokens]


def after_thinking(ids: array[int], tokenizer: Tokenizer) -> array[int]:
    """The ids wholly after the last </think>; all of them without one. A token that the tag's end shares is left out.

    The tag is looked for in the text, since many vocabularies spell it with its neighbours: "</", "think", ">\\n\\n".
    """

    def tags(length: int) -> int:
        return tokenizer.decode(ids[:length], skip_special=False).count(THINK_END)

    return ids[bisect_left(range(len(ids) + 1), tags(len(ids)), key=tags) :]


def _finished(reading: MemoryReading) -> Reading:
    result = reading.result
    if result is None:
        raise RuntimeError("a reading without a next turn has no answer")
    return result

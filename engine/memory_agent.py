"""MemoryAgent: reads a document chunk by chunk, overwrites its memory after each, answers from the memory alone.

The method is MemAgent (arXiv 2507.02259). `MemoryReading` is the state machine of one reading; `MemoryAgent` drives any
number of them with an engine. Another workflow is another such pair.
"""

from __future__ import annotations

import dataclasses
import warnings
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice, tee
from typing import TYPE_CHECKING

from .config import AgentConfig
from .errors import ConfigError, RequestError
from .live_reading import LiveReading
from .memory_reading import MemoryReading, memory_ids
from .reading import Answered, Chunks, Event, Reading, Turn
from .siblings import Siblings
from .templates import FIRST_MEMORY, TokenTemplate, find_final, find_update

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["MemoryAgent", "MemoryReading", "Reading", "Turn", "memory_ids"]


class MemoryAgent:
    """Reads documents with an engine, one memory-overwriting turn per chunk.

        agent = MemoryAgent(engine, AgentConfig(chunk_tokens=5000))
        reading = agent.read(document, "Who built the lighthouse?")

    Streams of one engine may be taken in turns; each step then serves all of them.
    """

    def __init__(self, engine: Engine, config: AgentConfig | None = None) -> None:
        """Raises ConfigError for a model without a chat template, or with one that changes what a user says, and for
        memory_kv="carried" where the engine's KV can't be moved."""
        self.config = AgentConfig() if config is None else config
        if not isinstance(self.config, AgentConfig):
            raise ConfigError(f"a memory agent's configuration is an AgentConfig, got {config!r}")
        if self.config.memory_kv == "carried":
            engine.require_carriable()
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
        readings = [self.open(*task) for task in _tasks(tasks)]
        for _ in self._drive(readings):
            pass
        return [reading.answered() for reading in readings]

    def rollout(self, document: str | Iterable[str], question: str, n: int, *, first_sample: int = 0) -> list[Reading]:
        """Read one document n times, with the sample indices first_sample ... first_sample + n - 1.

        The document is tokenised once, and what the prompts share is computed once: the first chunk, and with the
        template "chunk_first" every chunk. Raises as `read` does.
        """
        tasks = [(document, question)]
        group = {place: reading for _, place, reading in self.rollouts(tasks, n, first_sample=first_sample)}
        return [group[place] for place in range(n)]

    def rollouts(
        self,
        tasks: Iterable[tuple[str | Iterable[str], str]],
        n: int,
        *,
        first_sample: int = 0,
        stride: int | None = None,
    ) -> Generator[tuple[int, int, Reading], None, None]:
        """Read each of many (document, question) pairs n times; -> (number of the task, place in its group, reading) as
        readings finish.

        Reading i of task t has the sample index first_sample + t * stride + i; stride is n where it is not given, and
        more where others read the tasks between. Tasks are taken as places in the engine become free. Closing the
        generator aborts what is under way. Raises as `read` does; an error in one ends them all.
        """
        stride = n if stride is None else stride
        for name, number, low in (("n", n, 1), ("first_sample", first_sample, 0), ("stride", stride, n)):
            if isinstance(number, bool) or not isinstance(number, int) or number < low:
                raise RequestError(f"{name} must be a whole number of at least {low}, got {number!r}")
        readings = (reading for task in _tasks(tasks) for reading in self._group(*task, n))
        with closing(self._drive(readings, lambda place: first_sample + place // n * stride + place % n)) as events:
            for place, event in events:
                if isinstance(event, Answered):
                    yield (*divmod(place, n), event.reading)

    def stream(self, document: str | Iterable[str], question: str) -> Generator[Event, None, None]:
        """Read as `read` does and yield what happens; Answered comes last. Closing it aborts the running turn."""
        return self.run(self.open(document, question))

    def open(self, document: str | Iterable[str], question: str) -> MemoryReading:
        """A reading that nothing drives yet.

        Raises RequestError for arguments of another type and when the engine has no room for a chunk; warns when it has
        room for less than chunk_tokens. A piece of the document that is no str raises it when the piece is read.
        """
        return self._group(document, question, 1)[0]

    def _group(self, document: str | Iterable[str], question: str, n: int) -> list[MemoryReading]:
        """n readings of a document that is tokenised once."""
        if not isinstance(question, str):
            raise RequestError(f"the question must be a str, got {type(question).__name__}")
        if isinstance(document, (bytes, bytearray)) or not isinstance(document, Iterable):
            kind = type(document).__name__
            raise RequestError(f"a document is a str or an iterable of str, got {kind}; open_document reads files")
        ids = self.tokenizer.encode(question)
        size = self.chunk_size(len(ids))
        pieces = tee(_with_error(self.tokenizer.encode_pieces(_pieces(document))), n)
        siblings = Siblings()
        return [MemoryReading(self, ids, Chunks(each, size), siblings) for each in pieces]

    def run(self, reading: MemoryReading) -> Generator[Event, None, None]:
        """Drive an opened reading to its end and yield what happens."""
        with closing(self._drive([reading])) as events:
            for _, event in events:
                yield event

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

    def _drive(
        self, readings: Iterable[MemoryReading], sample_of: Callable[[int], int] = int
    ) -> Generator[tuple[int, Event], None, None]:
        """Take the turns of all readings, each at its own pace, as many at once as the engine has places.

        Yields the place of a reading in `readings`, and what happens in it. sample_of: a place's sample index.
        """
        arriving = enumerate(readings)
        live: list[LiveReading] = []
        try:
            while True:
                for place, reading in islice(arriving, self.engine.config.max_sequences - len(live)):
                    live.append(LiveReading(self.engine, reading, place, sample_of(place)))
                    yield from ((place, event) for event in live[-1].take_turn())
                if not live:
                    return
                owners = {sequence: one for one in live for sequence in one.sequences}
                for update in self.engine.step_for(owners):
                    owner = owners[update.sequence]
                    yield from ((owner.place, event) for event in owner.follow(update))
                live = [one for one in live if not one.finished]
        finally:
            with self.engine.aborting([sequence for one in live for sequence in one.sequences]):
                pass


def _tasks(tasks: object) -> Iterator[tuple[str | Iterable[str], str]]:
    if not isinstance(tasks, Iterable):
        raise RequestError(f"tasks are an iterable of pairs (document, question), got {tasks!r:.60}")
    for task in tasks:
        if not isinstance(task, (tuple, list)) or len(task) != 2:
            raise RequestError(f"a task is a pair (document, question), got {task!r:.60}; read takes a single document")
        document, question = task
        yield document, question


def _pieces(document: str | Iterable[str]) -> Iterator[str]:
    for piece in [document] if isinstance(document, str) else document:
        if not isinstance(piece, str):
            raise RequestError(f"a document's pieces are str, got {piece!r:.60}; decode bytes first")
        yield piece


def _with_error(pieces: Iterator[array[int]]) -> Iterator[array[int] | Exception]:
    """The pieces, and at the end what broke them off: so that each reading of a group gets to know it."""
    try:
        yield from pieces
    except Exception as error:  # whatever the caller's document raises
        yield error

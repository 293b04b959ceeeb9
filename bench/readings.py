"""Readings: a memory agent's turns one by one, with memories that the benchmark chooses."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

from ..engine.config import AgentConfig, SamplingParams
from ..engine.engine import Engine
from ..engine.memory_agent import MemoryAgent
from ..engine.reading import Turn, TurnEnded
from ..engine.templates import Slot
from .clock import Sample, timed
from .forced import forced, spoilt
from .ours import tokens
from .turns import drafting

__all__ = ["ForcedReading"]

PIECE = 2000  # tokens of the document that are made at once


class ForcedReading:
    """A reading of an endless document whose memory has `memory` tokens, of which each turn keeps `right` percent.

    drafts, open_prompt: as in EngineConfig, for this reading's turns. template, memory_kv: as in AgentConfig.
    last: the turn that `turn` has timed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        memory: int,
        chunk: int,
        right: int,
        drafts: bool,
        open_prompt: bool,
        seed: int,
        template: str = "memory_first",
        memory_kv: str = "exact",
    ) -> None:
        config = AgentConfig(
            chunk_tokens=chunk,
            memory_tokens=memory + 1,  # and the id that ends it
            answer_tokens=1,
            template=template,
            memory_kv=memory_kv,
            sampling=SamplingParams(temperature=0),
            keep_turns=False,
        )
        self._engine, self._drafts, self._open_prompt = engine, drafts, open_prompt
        self._right, self._vocabulary, self._seed = right, engine.model.config.vocab_size, seed
        self._memory = array("i", tokens(memory, seed, self._vocabulary))
        self._agent = MemoryAgent(engine, config)
        self._events = self._agent.stream(self._document(), "What is said?")
        self._turns = 0
        self.last: Turn | None = None

    def turn(self) -> Sample:
        """Take one turn; the first one writes the memory that the others repeat."""
        if self._turns:
            self._memory = spoilt(self._memory, self._right, self._seed + self._turns, self._vocabulary)
        response = array("i", [*self._memory, self._engine.tokenizer.eos_ids[0]])
        before = self._engine.config
        self._engine.config = replace(before, open_prompt=self._open_prompt)
        try:
            with drafting(self._engine, self._drafts), forced({(0, self._turns): response}):
                sample = timed(self._advance)
        finally:
            self._engine.config = before
        self._turns += 1
        return sample

    @property
    def after_memory(self) -> int:
        """Tokens of a prompt behind its memory: separator, chunk and tail."""
        prompt = self._agent.update_prompt.fill(dict.fromkeys(Slot, array("i")))
        names = [segment.name for segment in prompt]
        fixed = sum(len(segment.ids) for segment in prompt[names.index("memory") :])
        return fixed + self._agent.config.chunk_tokens

    def close(self) -> None:
        """End what is under way."""
        self._events.close()

    def _advance(self) -> None:
        for event in self._events:
            if isinstance(event, TurnEnded):
                self.last = event.turn
                return

    def _document(self) -> Iterator[str]:
        number = 0
        while True:
            number += 1
            ids = array("i", tokens(PIECE, self._seed + 100_000 + number, self._vocabulary))
            yield self._engine.tokenizer.decode(ids)

"""Turns: update turns of a memory agent as an engine sees them, with responses that the benchmark chooses."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..engine.acceptance import Acceptance
from ..engine.config import SamplingParams
from ..engine.draft import Drafter
from ..engine.engine import Engine
from ..engine.sequence import Segment, joined
from ..engine.sequence import Sequence as EngineSequence
from .clock import Sample, timed
from .forced import forced, spoilt
from .ours import tokens

__all__ = ["HEAD", "SEPARATOR", "TAIL", "Turns", "drafting"]

HEAD, SEPARATOR, TAIL = 120, 8, 20  # tokens of the fixed pieces of a prompt
SEEDS = {"head": 1, "before_chunk": 2, "tail": 3, "memory": 10_000, "chunk": 20_000, "new": 30_000}


class Turns:
    """Turns with a memory of `memory` tokens behind a resident head, and a chunk of `chunk` tokens.

    Memory and chunk are new in each round, so that only the head is ever found in the cache.
    """

    def __init__(self, engine: Engine, memory: int, chunk: int) -> None:
        self.engine, self.memory, self.chunk = engine, memory, chunk
        self.vocabulary = engine.model.config.vocab_size
        self._learnt: dict[int, Acceptance] = {}
        self._number = 0

    @property
    def computed(self) -> int:
        """Tokens of one turn, prompt behind the head and response."""
        return 2 * self.memory + SEPARATOR + self.chunk + TAIL

    def plain(self) -> Sample:
        """A turn that takes a step for each token of a memory that is written anew."""
        with drafting(self.engine, False):
            return self._turn(0, None)

    def drafted(self, right: int) -> Sample:
        """A turn that drafts the old memory, of which `right` percent are right, with what the turns before taught."""
        acceptance = self._learnt.get(right)
        if acceptance is None:
            acceptance = self._learnt[right] = Acceptance(self.engine.step_cost)
            for _ in range(2):  # from the third turn on a reading has settled
                self._turn(right, acceptance)
        return self._turn(right, acceptance)

    def surprised(self) -> Sample:
        """A reading's first drafted turn, of whose memory all proves wrong."""
        return self._turn(0, Acceptance(self.engine.step_cost))

    def one_pass(self) -> Sample:
        """The same prompt with the memory once more behind it, as a prompt: a forward pass with one row of the head."""
        ids = joined(self._prompt()) + self._ids("memory", self.memory)
        with drafting(self.engine, False):
            return timed(lambda: self.engine.generate([ids], SamplingParams(temperature=0, max_tokens=1)))

    def to_first_token(self, *, is_open: bool) -> Sample:
        """From the last token of the memory to the first of the response, no drafts. is_open: as an open prompt."""
        prompt = self._prompt()
        known, ids = len(joined(prompt[:2])), joined(prompt)
        params = SamplingParams(temperature=0, max_tokens=1)
        with drafting(self.engine, False):
            if not is_open:
                return timed(lambda: self.engine.generate([ids], params))
            sequence = self.engine.add(ids[:known], params, is_open=True)
            while self.engine.has_work:
                self.engine.step()

            def go_on() -> None:
                self.engine.extend(sequence, ids[known:])
                self.engine.close(sequence)
                self._finish([sequence])

            return timed(go_on)

    def _turn(self, right: int, acceptance: Acceptance | None) -> Sample:
        prompt = self._prompt()
        response = spoilt(prompt[1].ids, right, SEEDS["new"] + self._number, self.vocabulary)
        response.append(self.engine.tokenizer.eos_ids[0])
        params = SamplingParams(temperature=0, max_tokens=len(response))

        def run() -> None:
            drafter = None if acceptance is None else Drafter.for_prompt(prompt, acceptance=acceptance)
            self._finish([self.engine.add(prompt, params, drafter=drafter)])

        with forced({(0, 0): response}):
            return timed(run)

    def _finish(self, sequences: Sequence[EngineSequence]) -> None:
        while not all(sequence.finished for sequence in sequences):
            self.engine.step()

    def _prompt(self) -> list[Segment]:
        """A prompt whose memory and chunk were never seen before."""
        self._number += 1
        lengths = {
            "head": HEAD, "memory": self.memory, "before_chunk": SEPARATOR, "chunk": self.chunk, "tail": TAIL,
        }  # fmt: skip
        return [Segment(name, self._ids(name, length)) for name, length in lengths.items()]

    def _ids(self, name: str, count: int) -> array[int]:
        fresh = self._number if name in ("memory", "chunk") else 0
        return array("i", tokens(count, SEEDS[name] + fresh, self.vocabulary))


@contextmanager
def drafting(engine: Engine, wanted: bool) -> Iterator[None]:
    """Whether requests added meanwhile are drafted when nobody says how."""
    before = engine.drafts
    engine.drafts = wanted
    try:
        yield
    finally:
        engine.drafts = before

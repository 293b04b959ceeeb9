"""Group: one update turn of many readings of the same chunk, with the chunk before the memory or behind it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..engine.acceptance import Acceptance
from ..engine.config import SamplingParams
from ..engine.draft import Drafter
from ..engine.engine import Engine
from ..engine.runner import page_bytes
from ..engine.sequence import Segment
from .clock import Sample, timed
from .forced import forced, spoilt
from .ours import tokens
from .turns import HEAD, SEPARATOR, TAIL

__all__ = ["Group"]

ORDERS = {
    "chunk_first": ("head", "chunk", "between", "memory", "tail"),
    "memory_first": ("head", "memory", "between", "chunk", "tail"),
}


class Group:
    """`size` readings, each with a memory of its own of `memory` tokens, at a chunk of `chunk` tokens.

    right: percent of its memory that each keeps. kv_bytes: by template, what the turn held at most.
    """

    def __init__(self, engine: Engine, *, size: int, memory: int, chunk: int, right: int) -> None:
        self.engine, self.size, self.right = engine, size, right
        self._lengths = {"head": HEAD, "memory": memory, "between": SEPARATOR, "chunk": chunk, "tail": TAIL}
        self._vocabulary = engine.model.config.vocab_size
        self._acceptance = {template: [Acceptance(engine.step_cost) for _ in range(size)] for template in ORDERS}
        self._turns = 0
        self.kv_bytes = dict.fromkeys(ORDERS, 0)

    @property
    def computed(self) -> int:
        """Tokens that all turns together cannot do without: the chunk once, memories and responses each."""
        each = 2 * self._lengths["memory"] + TAIL
        return SEPARATOR + self._lengths["chunk"] + self.size * each

    def turn(self, template: str) -> Sample:
        """All readings' turns together, new chunk and new memories, nothing but the head resident."""
        self._turns += 1
        prompts = [self._prompt(template, place) for place in range(self.size)]
        return timed(lambda: self._run(template, prompts))

    def _run(self, template: str, prompts: Sequence[list[Segment]]) -> None:
        responses = {(place, 0): self._response(prompt, place) for place, prompt in enumerate(prompts)}
        params = SamplingParams(temperature=0, max_tokens=self._lengths["memory"] + 1)
        with forced(responses):
            sequences = []
            for place, prompt in enumerate(prompts):
                drafter = Drafter.for_prompt(prompt, acceptance=self._acceptance[template][place])
                sequences.append(self.engine.add(prompt, params, sample=place, drafter=drafter))
            while not all(sequence.finished for sequence in sequences):
                self.engine.step()
                self._count(template)

    def _count(self, template: str) -> None:
        pages = {page for sequence in self.engine.scheduler.running for page in sequence.pages}
        key = self.engine.runner.pages[0].key
        size = page_bytes(self.engine.model.config, self.engine.config.page_size, key.dtype)
        self.kv_bytes[template] = max(self.kv_bytes[template], len(pages) * size)

    def _response(self, prompt: Sequence[Segment], place: int) -> array[int]:
        memory = next(segment.ids for segment in prompt if segment.name == "memory")
        response = spoilt(memory, self.right, 70_000 + place, self._vocabulary)
        response.append(self.engine.tokenizer.eos_ids[0])
        return response

    def _prompt(self, template: str, place: int) -> list[Segment]:
        seeds = {"head": 1, "between": 2, "tail": 3, "chunk": 40_000 + self._turns}
        seeds["memory"] = 50_000 + self.size * self._turns + place
        ids = {name: array("i", tokens(self._lengths[name], seeds[name], self._vocabulary)) for name in seeds}
        return [Segment(name, ids[name]) for name in ORDERS[template]]

"""The oracle of the facts task: single turns to imitate before any reward is there to learn from.

It writes what a careful reader keeps: the facts that the question needs, a short sentence each, and nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...engine.config import _require, _require_choice, _require_int, _require_number, _tuple
from ...engine.memory_agent import MemoryAgent
from ...engine.templates import FIRST_MEMORY, Slot
from ..supervised import Example
from .facts import NOTHING, VARIANTS, Story, write_block
from .span import span
from .wording import Wording

__all__ = ["FactsOracle", "FactsOracleConfig"]

UNKNOWN = "unknown"  # the answer of a memory that holds none
FOUND = 0.55  # share of chunks in which something stands that is to be kept
MISTAKEN = 0.15  # share of memories without a fact that hold one about something else, which is to be dropped


@dataclass(frozen=True)
class FactsOracleConfig:
    """seed: of all examples. blocks: fewest and most in an example's chunk, see facts.BLOCK. variants: names from
    facts.VARIANTS, one is drawn for each example. finals: share of examples that are final turns."""

    seed: int = 0
    blocks: tuple[int, int] = (2, 8)
    variants: tuple[str, ...] = tuple(VARIANTS)
    finals: float = 0.1

    def __post_init__(self) -> None:
        owner = "FactsOracleConfig"
        _require_int(owner, "seed", self.seed, 0)
        object.__setattr__(self, "blocks", span(owner, "blocks", self.blocks))
        object.__setattr__(self, "variants", _tuple(owner, "variants", self.variants))
        _require(bool(self.variants), f"{owner}.variants must name at least one of {', '.join(VARIANTS)}")
        for variant in self.variants:
            _require_choice(owner, "variants", variant, tuple(VARIANTS))
        _require_number(owner, "finals", self.finals, 0.0, 1.0)

    def examples(self, agent: MemoryAgent) -> FactsOracle:
        """The examples of this configuration, in the prompts of an agent."""
        return FactsOracle(agent, self)


class FactsOracle:
    """Examples without end, in the prompts of an agent: example i is the same wherever and whenever it is asked for."""

    def __init__(self, agent: MemoryAgent, config: FactsOracleConfig) -> None:
        self.agent, self.config = agent, config
        self._wording = Wording("train")

    def example(self, index: int) -> Example:
        """Example number `index`, from 0."""
        rng = random.Random(f"facts oracle {self.config.seed} {index}")
        story = Story(self._wording, rng.choice(self.config.variants), rng)
        last = len(story.sentences)
        if rng.random() < self.config.finals:
            told = 0 if rng.random() < 0.1 else rng.randint(1, last)
            return self._example(story, story.memory(told), None, rf"\boxed{{{story.answer_after(told) or UNKNOWN}}}")
        found = rng.random() < FOUND
        before, after = rng.choice([(i, j) for j in range(last + 1) for i in range(j + 1) if (i < j) == found])
        memory = story.memory(before) if before else self._empty(story, rng)
        return self._example(story, memory, self._chunk(story, before, after, rng), story.memory(after))

    def _empty(self, story: Story, rng: random.Random) -> str:
        """A memory that holds nothing of the story."""
        if rng.random() < MISTAKEN:
            return story.other_note(rng)
        return rng.choice([FIRST_MEMORY, NOTHING])

    def _chunk(self, story: Story, before: int, after: int, rng: random.Random) -> str:
        """Blocks in which the sentences from `before` to `after` stand, and parts of two others: chunks are cut
        wherever their last token is."""
        told = story.sentences[before:after]
        count = rng.randint(*self.config.blocks)
        places = sorted(rng.randrange(count) for _ in told)
        held = [[sentence for sentence, at in zip(told, places, strict=True) if at == place] for place in range(count)]
        first, *blocks, last = (write_block(story, sentences, "prose", rng) for sentences in [[], *held, []])
        return first[rng.randrange(len(first)) :] + "".join(blocks) + last[: rng.randrange(len(last))]

    def _example(self, story: Story, memory: str, chunk: str | None, response: str) -> Example:
        agent, encode = self.agent, self.agent.tokenizer.encode
        values = {Slot.PROBLEM: encode(story.question), Slot.MEMORY: encode(memory)}
        if chunk is None:
            segments = agent.final_prompt.fill(values)
        else:
            segments = agent.update_prompt.fill(values | {Slot.CHUNK: encode(chunk)})
        return Example.of(segments, encode(response), agent.tokenizer.eos_ids[0])

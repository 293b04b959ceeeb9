"""The quiz of the facts task: many questions about one chunk, in prompts that have it first and no memory, so that a
training pass computes it once for all of them; and between them turns of the oracle in the agent's own prompts.

The answer of one question is a fact about others to the rest.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from ...engine.config import _require_int, _require_number
from ...engine.memory_agent import MemoryAgent
from ...engine.templates import TEMPLATES, Slot, Template, TokenTemplate
from ..supervised import Example
from .facts import NOTHING, write_block
from .facts_oracle import FactsOracle, FactsOracleConfig
from .span import span
from .wording import Statement, Wording

__all__ = ["FactsQuiz", "FactsQuizConfig"]

NEAR = 0.5  # share of the questions that are about the same as one before them, but for another part


@dataclass(frozen=True)
class FactsQuizConfig:
    """seed: of all examples. blocks: fewest and most in a chunk, see facts.BLOCK. questions: about each chunk, so many
    examples in a row. told: share of them that the chunk answers. singles: examples of the oracle after them, one fact
    each, with single_blocks, fewest and most, in their chunks."""

    seed: int = 0
    blocks: tuple[int, int] = (3, 8)
    questions: int = 12
    told: float = 0.5
    singles: int = 3
    single_blocks: tuple[int, int] = (1, 3)

    def __post_init__(self) -> None:
        owner = "FactsQuizConfig"
        _require_int(owner, "seed", self.seed, 0)
        object.__setattr__(self, "blocks", span(owner, "blocks", self.blocks))
        _require_int(owner, "questions", self.questions, 1)
        _require_number(owner, "told", self.told, 0.0, 1.0)
        _require_int(owner, "singles", self.singles, 0)
        object.__setattr__(self, "single_blocks", self.oracle.blocks)

    @property
    def oracle(self) -> FactsOracleConfig:
        """What the singles are examples of."""
        return FactsOracleConfig(self.seed, self.single_blocks, ("one_fact",))

    def examples(self, agent: MemoryAgent) -> FactsQuiz:
        """The examples of this configuration, in the prompts of an agent."""
        return FactsQuiz(agent, self)


class FactsQuiz:
    """Examples without end, in the prompts of an agent: example i is the same wherever and whenever it is asked for."""

    def __init__(self, agent: MemoryAgent, config: FactsQuizConfig) -> None:
        self.agent, self.config = agent, config
        self._wording = Wording("train")
        self._template = TokenTemplate(_chunk_before_problem(), agent.tokenizer)
        self._oracle = FactsOracle(agent, config.oracle)

    def example(self, index: int) -> Example:
        """Example number `index`, from 0."""
        config = self.config
        chunk, asked = divmod(index, config.questions + config.singles)
        if asked >= config.questions:
            return self._oracle.example(chunk * config.singles + asked - config.questions)
        sheet = Sheet(self._wording, config, random.Random(f"facts quiz {config.seed} {chunk}"))
        question, response = sheet.turns[asked]
        encode = self.agent.tokenizer.encode
        texts = {Slot.PROBLEM: question, Slot.CHUNK: sheet.chunk}
        values: dict[Slot, array[int]] = {slot: encode(text) for slot, text in texts.items()}
        return Example.of(self._template.fill(values), encode(response), self.agent.tokenizer.eos_ids[0])


def _chunk_before_problem() -> Template:
    """The published prompt with its chunk in front of the problem, and without the memory."""
    parts = TEMPLATES["chunk_first"].parts
    problem, chunk = parts[1:4], parts[4:7]
    return Template((parts[0], *chunk, *problem, parts[-1]))


class Sheet:
    """A chunk, and turns about it: a question, and the memory after it."""

    def __init__(self, wording: Wording, config: FactsQuizConfig, rng: random.Random) -> None:
        self.wording = wording
        self._statements: list[Statement] = []
        for _ in range(config.questions):
            self._statements.append(self._new(rng))
        self.reserved = [statement.value.casefold() for statement in self._statements]
        is_told = [rng.random() < config.told for _ in self._statements]
        told = [wording.tell(one, rng) for one, known in zip(self._statements, is_told, strict=True) if known]
        self.chunk = self._write(told, rng.randint(*config.blocks), rng)
        self.turns = [
            (wording.ask(one, rng), wording.note(one) if known else NOTHING)
            for one, known in zip(self._statements, is_told, strict=True)
        ]

    def other(self, rng: random.Random) -> str:
        """A sentence about something that is not asked."""
        while True:
            sentence = self.wording.tell(self._new(rng), rng)
            if not self.tells(sentence):
                return sentence

    def tells(self, sentence: str) -> bool:
        """Whether an answer stands in a sentence."""
        folded = sentence.casefold()
        return any(word in folded for word in self.reserved)

    def _new(self, rng: random.Random) -> Statement:
        """A statement about what none of the others is about, with a value that has nothing in common with theirs."""
        while True:
            one = self._near(rng) if self._statements and rng.random() < NEAR else self._far(rng)
            value = one.value.casefold()
            apart = all(
                (one.family, one.subject) != (other.family, other.subject)
                and not any(value in part.casefold() for part in (other.value, *other.subject.values()))
                and not any(other.value.casefold() in part.casefold() for part in (value, *one.subject.values()))
                for other in self._statements
            )
            if apart and not any(value in part.casefold() for part in one.subject.values()):
                return one

    def _far(self, rng: random.Random) -> Statement:
        return self.wording.statement(rng.choice(list(self.wording.families)), rng)

    def _near(self, rng: random.Random) -> Statement:
        """One that shares a part with one of the others."""
        part, words = rng.choice(list(rng.choice(self._statements).subject.items()))
        families = [name for name, form in self.wording.families.items() if part in form["subject"]]
        return self.wording.statement(rng.choice(families), rng, {part: words})

    def _write(self, told: list[str], blocks: int, rng: random.Random) -> str:
        places = [rng.randrange(blocks) for _ in told]
        held = [[sentence for sentence, at in zip(told, places, strict=True) if at == place] for place in range(blocks)]
        return "".join(write_block(self, sentences, "prose", rng) for sentences in held).rstrip()

"""Facts: English documents in which a few sentences tell what is asked for, among filler and facts about others.

A document is a stream of blocks of some 64 tokens, each made from (seed, index, number of the block) alone. Facts about
others share names, roles and places with what is asked for. The answer's words stand in a document once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from ...engine.config import _require_choice, _require_int
from ..trajectory import Problem
from .wording import FILLERS, SPLITS, Statement, Wording

__all__ = ["BLOCK", "NOTHING", "VARIANTS", "Facts", "FactsConfig", "FactsDocument", "Story", "write_block"]

BLOCK = 64  # tokens, about, of the embedded model
NOTHING = "Nothing found yet."  # what a memory says before it knows anything
NEAR = 0.6  # share of the facts about others that share words with what is asked for
NEWS = 0.25  # share of them, where it can be, that are told as what has changed: that alone says nothing

Told = tuple[list[Statement], list[str], str]  # the sentences that tell the statements, and the question


def _one_fact(wording: Wording, rng: random.Random) -> Told:
    """One sentence tells it."""
    fact = wording.statement(rng.choice(list(wording.families)), rng)
    return [fact], [wording.tell(fact, rng)], wording.ask(fact, rng)


def _two_hop(wording: Wording, rng: random.Random) -> Told:
    """One sentence tells who holds an office, a later one what is asked about that person."""
    office = wording.statement("office", rng)
    families = [name for name, form in wording.families.items() if "person" in form["subject"]]
    fact = wording.statement(rng.choice(families), rng, {"person": office.value})
    question = wording.ask(fact, rng, person="the {role} of {town}".format_map(office.subject))
    return [office, fact], [wording.tell(office, rng), wording.tell(fact, rng)], question


def _last_value(wording: Wording, rng: random.Random) -> Told:
    """It is told twice, and the later value counts."""
    families = [name for name, form in wording.families.items() if "again" in form]
    first = wording.statement(rng.choice(families), rng)
    last = wording.statement(first.family, rng, first.subject)
    return [first, last], [wording.tell(first, rng), wording.tell_again(last, rng)], wording.ask(first, rng)


VARIANTS: Mapping[str, Callable[[Wording, random.Random], Told]] = MappingProxyType(
    {"one_fact": _one_fact, "two_hop": _two_hop, "last_value": _last_value}
)


@dataclass(frozen=True)
class FactsConfig:
    """seed: of all documents. tokens: length of a document, about, in tokens of the embedded model.

    variant: a name from VARIANTS. split: of words, sentences and questions, "train" or "held_out". filler: a kind, or
    "mixed"; those other than prose are never trained on.
    """

    seed: int = 0
    tokens: int = 1024
    variant: str = "one_fact"
    split: str = "train"
    filler: str = "prose"

    def __post_init__(self) -> None:
        owner = "FactsConfig"
        _require_int(owner, "seed", self.seed, 0)
        _require_int(owner, "tokens", self.tokens, BLOCK)
        _require_choice(owner, "variant", self.variant, tuple(VARIANTS))
        _require_choice(owner, "split", self.split, SPLITS)
        _require_choice(owner, "filler", self.filler, (*FILLERS, "mixed"))

    def source(self) -> Facts:
        """The problems of this configuration."""
        return Facts(self)


class Facts:
    """The documents of a configuration, without end: problem i is the same wherever and whenever it is asked for."""

    def __init__(self, config: FactsConfig) -> None:
        self.config, self._wording = config, Wording(config.split)

    def problem(self, index: int) -> Problem:
        """Problem number `index`, from 0; its document is made while it is read, in constant memory."""
        config = self.config
        name = f"facts {config.seed} {index}"
        rng = random.Random(name)
        story = Story(self._wording, config.variant, rng)
        blocks = round(config.tokens / BLOCK)
        places = sorted(rng.randrange(blocks) for _ in story.sentences)
        document = FactsDocument(self._wording, story, config.filler, name, blocks, places)
        return Problem(document, story.question, (story.answer,), f"{config.variant} {index}")


class Story:
    """What is asked, and the sentences that tell it, in their order.

    asked: the statement that the first sentence makes. reserved: words that stand in no other sentence.
    """

    def __init__(self, wording: Wording, variant: str, rng: random.Random) -> None:
        self.wording, self.variant = wording, variant
        while True:
            self._statements, self.sentences, self.question = VARIANTS[variant](wording, rng)
            self.asked, self.answer = self._statements[0], self._statements[-1].value
            self.reserved = tuple(statement.value.casefold() for statement in self._statements)
            if sum(self.reserved[-1] in part.casefold() for part in (self.question, *self.sentences)) == 1:
                return

    def memory(self, told: int) -> str:
        """What a memory should say after so many of the sentences."""
        kept = self._statements[told - 1 : told] if self.variant == "last_value" and told else self._statements[:told]
        return " ".join(self.wording.note(statement) for statement in kept) or NOTHING

    def answer_after(self, told: int) -> str | None:
        """What can be answered after so many of the sentences; None for nothing."""
        if not told or (self.variant == "two_hop" and told < len(self.sentences)):
            return None
        return self._statements[told - 1].value

    def tells(self, sentence: str) -> bool:
        """Whether words that are reserved stand in a sentence."""
        folded = sentence.casefold()
        return any(word in folded for word in self.reserved)

    def other(self, rng: random.Random) -> str:
        """A sentence about something else, which may share words with what is asked for."""
        return self._other(rng)[1]

    def other_note(self, rng: random.Random) -> str:
        """What a memory would keep of such a sentence."""
        return self.wording.note(self._other(rng)[0])

    def _other(self, rng: random.Random) -> tuple[Statement, str]:
        while True:
            statement = self._near(rng) if rng.random() < NEAR else self._far(rng)
            same = statement.family == self.asked.family and statement.subject == self.asked.subject
            is_news = "again" in self.wording.families[statement.family] and rng.random() < NEWS
            sentence = (self.wording.tell_again if is_news else self.wording.tell)(statement, rng)
            if not same and not self.tells(sentence):
                return statement, sentence

    def _far(self, rng: random.Random) -> Statement:
        return self.wording.statement(rng.choice(list(self.wording.families)), rng)

    def _near(self, rng: random.Random) -> Statement:
        """One that shares a part of its subject with what is asked for, or of the same kind about a namesake."""
        part, words = rng.choice(list(self.asked.subject.items()))
        families = [name for name, form in self.wording.families.items() if part in form["subject"]]
        if part == "person" and rng.random() < 0.5:
            words = self.wording.draw(part, rng, first=words.split()[0])
        family = self.asked.family if rng.random() < 0.5 else rng.choice(families)
        return self.wording.statement(family, rng, {part: words})


@dataclass(frozen=True)
class FactsDocument:
    """An iterable of blocks; the same every time. places: the numbers of the blocks that hold the story's sentences."""

    wording: Wording
    story: Story
    filler: str
    name: str
    blocks: int
    places: Sequence[int]

    def __iter__(self) -> Iterator[str]:
        return map(self.block, range(self.blocks))

    def block(self, number: int) -> str:
        """The text of one block, made without those before it."""
        rng = random.Random(f"{self.name} {number}")
        told = [sentence for sentence, place in zip(self.story.sentences, self.places, strict=True) if place == number]
        return write_block(self.story, told, self.filler, rng)


class Others(Protocol):
    """Where a block's other sentences come from: `other` tells something else, and what `tells` stands in no filler."""

    wording: Wording

    def other(self, rng: random.Random) -> str: ...

    def tells(self, sentence: str) -> bool: ...


def write_block(story: Others, told: Sequence[str], filler: str, rng: random.Random) -> str:
    """A paragraph of filler with one or two facts about others, and among them sentences in their order."""
    kind = rng.choice(FILLERS) if filler == "mixed" else filler
    lines = [story.other(rng) for _ in range(rng.randint(1, 2))]
    length = sum(map(len, lines)) + sum(map(len, told))
    while length < story.wording.characters[kind] - 25:  # half of a sentence
        line = story.wording.filler(kind, rng)
        if not story.tells(line):
            lines.append(line)
            length += len(line) + 1
    rng.shuffle(lines)
    places = sorted(rng.randint(0, len(lines)) for _ in told)
    for i, (place, sentence) in enumerate(zip(places, told, strict=True)):
        lines.insert(place + i, sentence)
    return (" " if kind == "prose" else "\n").join(lines) + "\n\n"

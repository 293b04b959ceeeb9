"""Slots: documents of facts about keys, two of which are asked for; every other fact is a distractor.

A document is a stream of units of 16 words: 4 facts (a key and its value) among 8 fillers. Words are made of letters,
so that the word-level tokenizer of slots_model.py gives one id for each, and a unit is 16 tokens. Chunks of whole units
cut no fact in two.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...engine.config import _require, _require_choice, _require_int
from ..trajectory import Problem

__all__ = ["FILLERS", "KEYS", "NOTHING", "UNIT", "VALUES", "VARIANTS", "Fact", "Slots", "SlotsConfig", "make_unit"]

KEYS, VALUES, FILLERS = (tuple(initial + letter for letter in "abcdefghijklmnop") for initial in "kvf")
NOTHING = "none"  # what a memory says of a key that it knows nothing of
UNIT, FACTS = 16, 4  # tokens of a unit, and facts in it
MOST_KEYS = 4  # asked for; two facts for each still fit into one unit

Fact = tuple[str, str]  # a key, and what is written of it

VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "plain": "a key's value is written once",
        "last_write_wins": "a key's value is written twice, and the later one counts",
        "two_hop": "of a key another key is written, and later that one's value, which counts",
    }
)


@dataclass(frozen=True)
class SlotsConfig:
    """seed: of all documents; held-out ones have another. tokens: length of a document, whole units.

    keys: how many are asked for; a memory that holds them takes 2 * keys + 1 tokens. variant: a name from VARIANTS.
    """

    seed: int = 0
    tokens: int = 1024
    keys: int = 2
    variant: str = "plain"

    def __post_init__(self) -> None:
        owner = "SlotsConfig"
        _require_int(owner, "seed", self.seed, 0)
        _require_int(owner, "tokens", self.tokens, UNIT)
        _require(self.tokens % UNIT == 0, f"{owner}.tokens must be a multiple of {UNIT}, got {self.tokens}")
        _require_int(owner, "keys", self.keys, 1)
        _require(self.keys <= MOST_KEYS, f"{owner}.keys must be at most {MOST_KEYS}, got {self.keys}")
        _require_choice(owner, "variant", self.variant, tuple(VARIANTS))

    def source(self) -> Slots:
        """The problems of this configuration."""
        return Slots(self)


class Slots:
    """The documents of a configuration, without end: problem i is the same wherever and whenever it is asked for."""

    def __init__(self, config: SlotsConfig) -> None:
        self.config = config

    def problem(self, index: int) -> Problem:
        """Problem number `index`, from 0; its document is made while it is read, in constant memory."""
        config = self.config
        rng = random.Random(f"slots {config.seed} {index}")
        asked = rng.sample(KEYS, config.keys)
        needles: list[tuple[int, Fact]] = []
        answers, taken = [], list(asked)
        for key in asked:
            written = _story(key, config.variant, taken, rng)
            units = sorted(rng.randrange(config.tokens // UNIT) for _ in written)
            needles += zip(units, written, strict=True)
            answers.append(written[-1][1])
            taken += [word for _, word in written if word in KEYS]
        needles.sort(key=lambda needle: needle[0])
        others = [key for key in KEYS if key not in taken]
        document = _Document(config.tokens // UNIT, needles, others, rng.randrange(2**63))
        return Problem(document, "".join(f" {key}" for key in asked), (" ".join(answers),))


def _story(key: str, variant: str, taken: Sequence[str], rng: random.Random) -> list[Fact]:
    """What a document says of an asked key, in order. taken: keys that stand for something already."""
    if variant == "last_write_wins":
        return [(key, value) for value in rng.sample(VALUES, 2)]
    if variant == "two_hop":
        link = rng.choice([other for other in KEYS if other not in taken])
        return [(key, link), (link, rng.choice(VALUES))]
    return [(key, rng.choice(VALUES))]


@dataclass(frozen=True)
class _Document:
    """An iterable of texts, each some units; the same every time."""

    units: int
    needles: Sequence[tuple[int, Fact]]
    others: Sequence[str]
    seed: int

    PIECE = 64  # units

    def __iter__(self) -> Iterator[str]:
        rng = random.Random(self.seed)
        held = {unit: [fact for at, fact in self.needles if at == unit] for unit, _ in self.needles}
        for start in range(0, self.units, self.PIECE):
            units = range(start, min(start + self.PIECE, self.units))
            yield "".join(make_unit(held.get(unit, ()), self.others, rng) for unit in units)


def make_unit(needles: Iterable[Fact], others: Sequence[str], rng: random.Random) -> str:
    """16 words, each with a space before it: the needles in their order, and facts about other keys up to 4."""
    wanted = list(needles)
    facts = max(FACTS, len(wanted))
    tells = [True] * facts + [False] * (UNIT - 2 * facts)
    rng.shuffle(tells)
    chosen = _spread(wanted, facts, others, rng)
    words: list[str] = []
    for tell in tells:
        words += next(chosen) if tell else (rng.choice(FILLERS),)
    return " " + " ".join(words)


def _spread(wanted: Sequence[Fact], facts: int, others: Sequence[str], rng: random.Random) -> Iterator[Fact]:
    """The wanted facts in their order at random places among distractors."""
    places = set(rng.sample(range(facts), len(wanted))) if wanted else set[int]()
    needles = iter(wanted)
    for i in range(facts):
        yield next(needles) if i in places else (rng.choice(others), rng.choice(VALUES))

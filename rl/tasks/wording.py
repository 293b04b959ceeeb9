"""Wording: statements, questions and filler in English, drawn from the word lists beside this file.

facts.json holds what can be told and asked, facts_filler.json what stands between. Both have a part for training and a
held-out one; no text and no word, but for numbers and months, is in both.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FILLERS", "SPLITS", "Statement", "Wording"]

SPLITS = ("train", "held_out")
FILLERS = ("prose", "lists", "dialogue", "code", "tables", "scripts")  # all but prose are held out
SYMBOL = re.compile(r"\{(\w+)\}")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Statement:
    """family: a name from facts.json. subject: what it is about, the words for each part. value: what is told of it."""

    family: str
    subject: Mapping[str, str]
    value: str


class Wording:
    """The words and texts of one split.

    families: what can be told. characters: of a block of each kind of filler, some 64 tokens of the embedded model.
    """

    def __init__(self, split: str) -> None:
        facts, filler = _read("facts.json"), _read("facts_filler.json")
        self.split = split
        self.families: Mapping[str, Any] = facts["families"]
        self.characters: Mapping[str, int] = filler["characters"]
        self._facts: dict[str, Sequence[str]] = facts["shared"] | facts[split]
        # kinds other than prose are held out in any case
        self._filler: dict[str, Sequence[str]] = filler["held_out"] | filler[split]

    def statement(self, family: str, rng: random.Random, given: Mapping[str, str] | None = None) -> Statement:
        """A random one. given: parts of its subject that stand already."""
        form, given = self.families[family], given or {}
        subject = {part: given.get(part) or self.draw(part, rng) for part in form["subject"]}
        return Statement(family, subject, self.draw(form["value"], rng))

    def draw(self, part: str, rng: random.Random, **given: str) -> str:
        """Random words for a part of a statement, as "town"."""
        return _expanded(f"{{{part}}}", self._facts, rng, given)

    def tell(self, statement: Statement, rng: random.Random) -> str:
        """A sentence that tells it."""
        return self._worded("tell", statement, rng)

    def tell_again(self, statement: Statement, rng: random.Random) -> str:
        """A sentence that tells it as news about what was told before."""
        return self._worded("again", statement, rng)

    def ask(self, statement: Statement, rng: random.Random, **instead: str) -> str:
        """A question for its value. instead: words for parts of the subject."""
        return self._worded("ask", statement, rng, instead)

    def note(self, statement: Statement) -> str:
        """The sentence that a memory keeps of it; its last words are the value."""
        text: str = self.families[statement.family]["note"]
        text = text.format_map({**statement.subject, "value": statement.value})
        return text[0].upper() + text[1:]

    def filler(self, kind: str, rng: random.Random) -> str:
        """A sentence or line that tells nothing."""
        return _expanded(f"{{{kind}}}", self._filler, rng, {})

    def _worded(
        self, what: str, statement: Statement, rng: random.Random, instead: Mapping[str, str] | None = None
    ) -> str:
        text: str = rng.choice(self.families[statement.family][what][self.split])
        text = text.format_map({**statement.subject, "value": statement.value, **(instead or {})})
        return text[0].upper() + text[1:]


def _expanded(text: str, words: Mapping[str, Sequence[str]], rng: random.Random, given: Mapping[str, str]) -> str:
    """Each {name} replaced by what is given for it, or by one of its words, which may hold names in turn."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        return given[name] if name in given else _expanded(rng.choice(words[name]), words, rng, given)

    return SYMBOL.sub(replaced, text)


def _read(name: str) -> Any:
    return json.loads((HERE / name).read_text(encoding="utf-8"))

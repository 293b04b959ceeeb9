"""Write the chronicle of Thornhithe, an invented harbour town: the document that `make demo` reads.

    python examples/demo/make_harbour.py > harbour.txt
    python examples/demo/make_harbour.py --facts > facts.json

The prose is in scenes.txt and the names are in words.json, both beside this file. A block of scenes.txt is a scene: a
header line (`kind`, or `fact YEAR title`), the text, and questions (`? question = answer`). In the text `[a|b]` is a
choice and `{slot}` a name, date or number drawn for this scene: `{man}`, `{woman2}`, `{man.last}`, `{ship}`,
`{street}`, `{day}`, `{day:5-8}` (in these months), `{n:3-9}`, `{sum:3-9}`, `{words:3-9}` (in words). A slot named again
in its scene keeps its value. The holders of the offices (`{reeve}` and the like) succeed each other through the years.
The same seed gives the same bytes. Standard library only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FIRST_YEAR, LAST_YEAR = 1861, 1900
LAMP_YEAR = 1863  # before it there is no keeper to speak of

FIXED_NAMES = {("Nathaniel", "Tolliver")}  # given to nobody else, since a scene has them
OFFICES = {  # slot: (what the office is called, the names its holders are drawn from)
    "master": ("harbour master", "man"),
    "reeve": ("reeve", "man"),
    "rector": ("rector of St Brennick's", "man"),
    "pilot": ("first pilot", "man"),
    "mistress": ("schoolmistress", "woman"),
    "keeper": ("keeper of the lamp", "man"),
}

SLOT = re.compile(r"\{([a-z]+\d*)(?:\.(first|last))?(?::(\d+)-(\d+))?\}")
CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Scene:
    """One block of scenes.txt. questions: pairs of templates, (question, answer)."""

    kind: str
    year: int
    title: str
    text: str
    questions: tuple[tuple[str, str], ...]


def read_scenes(path: Path) -> list[Scene]:
    """Parse scenes.txt; a block that cannot be read raises ValueError."""
    scenes = []
    for block in path.read_text("utf-8").strip().split("\n\n"):
        header, *lines = block.splitlines()
        kind, _, rest = header.partition(" ")
        year, _, title = rest.partition(" ")
        text = " ".join(line for line in lines if not line.startswith("? "))
        pairs = (line[2:].split(" = ") for line in lines if line.startswith("? "))
        questions = tuple((question, answer) for question, answer in pairs)
        scenes.append(Scene(kind, int(year or 0), title, text, questions))
    return scenes


@dataclass
class Chronicler:
    """Draws names, numbers and scenes, and writes the document with the facts that stand in it."""

    scenes: list[Scene]
    words: dict[str, list[str]]
    seed: int
    parts: list[str] = field(default_factory=list)
    facts: list[dict[str, str | int]] = field(default_factory=list)
    length: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.names = {kind: self._names(self.words[kind]) for kind in ("man", "woman")}
        self.decks: dict[str, list[Scene]] = {}
        self.year = FIRST_YEAR
        self.ships = itertools.cycle(self.random.sample(self.words["ship"], len(self.words["ship"])))
        self.holders = {slot: next(self.names[names]) for slot, (_, names) in OFFICES.items()}
        first_changes = self.random.sample(range(FIRST_YEAR + 3, FIRST_YEAR + 12), len(OFFICES))
        self.changes = dict(zip(OFFICES, first_changes, strict=True))

    def _names(self, first_names: list[str]) -> Iterator[str]:
        """Full names, none of them twice."""
        pairs = itertools.product(first_names, self.words["surname"])
        names = [f"{first} {last}" for first, last in pairs if (first, last) not in FIXED_NAMES]
        self.random.shuffle(names)
        return iter(names)

    def write(self) -> None:
        """Write the whole chronicle, year by year."""
        self._append("THE CHRONICLE OF THORNHITHE")
        self._tell(self._one("prologue"))
        for self.year in range(FIRST_YEAR, LAST_YEAR + 1):
            fact = next(s for s in self.scenes if s.kind == "fact" and s.year == self.year)
            self._append(f"{self.year}. {fact.title}")
            self._tell(self._draw("weather"))
            middle = [fact, *(self._draw("scene") for _ in range(3)), *(self._draw(k) for k in self._lesser_kinds())]
            self.random.shuffle(middle)
            for scene in middle:
                self._tell(scene)
            self._change_offices()
            self._tell(self._draw("closing"))
        self._tell(self._one("epilogue"))

    def _lesser_kinds(self) -> list[str]:
        return self.random.sample(["ships", "trade", "rolls"], 2)

    def _one(self, kind: str) -> Scene:
        return next(scene for scene in self.scenes if scene.kind == kind)

    def _draw(self, kind: str) -> Scene:
        """The next scene of a kind. A deck is shuffled anew only when every scene of it has been told."""
        deck = self.decks.setdefault(kind, [])
        if not deck:
            deck.extend(scene for scene in self.scenes if scene.kind == kind)
            self.random.shuffle(deck)
        fit = [scene for scene in deck if self.year >= LAMP_YEAR or "{keeper}" not in scene.text]
        scene = fit[-1]
        deck.remove(scene)
        return scene

    def _change_offices(self) -> None:
        """Let the offices that fall vacant this year pass on."""
        for slot, (office, names) in OFFICES.items():
            if self.changes[slot] != self.year:
                continue
            old, new = self.holders[slot], next(self.names[names])
            pronoun = "his" if names == "man" else "her"
            self._tell(self._draw("change"), {"office": office, "old": old, "new": new, "his": pronoun})
            self.holders[slot] = new
            self.changes[slot] = self.year + self.random.randint(6, 10)

    def _tell(self, scene: Scene, given: dict[str, str] | None = None) -> None:
        """Append the scene as a paragraph and note where its facts stand."""
        bound = {**self.holders, "year": str(self.year), **(given or {})}
        chosen = CHOICE.sub(lambda match: self.random.choice(match[1].split("|")), scene.text)
        text = SLOT.sub(lambda match: self._value(match, bound), chosen)
        start = self._append(text)
        for question, answer in scene.questions:
            question, answer = (SLOT.sub(lambda match: self._value(match, bound), part) for part in (question, answer))
            offset = start + text.index(answer)
            self.facts.append({"question": question, "answer": answer, "offset": offset, "year": self.year})

    def _append(self, text: str) -> int:
        """Add a paragraph; returns its offset in characters."""
        start = self.length
        self.parts.append(f"{text}\n\n")
        self.length += len(self.parts[-1])
        return start

    def _value(self, match: re.Match[str], bound: dict[str, str]) -> str:
        """What a slot stands for: its value in this scene, drawn when it is met for the first time."""
        name, part, low, high = match.groups()
        if name not in bound:
            bound[name] = self._new_value(name.rstrip("0123456789"), int(low or 0), int(high or 0))
        return bound[name] if part is None else bound[name].split()[0 if part == "first" else -1]

    def _new_value(self, kind: str, low: int, high: int) -> str:
        if kind in self.names:
            return next(self.names[kind])
        if kind == "day":
            month = self.random.randint(low or 1, high or 12)
            return f"{self.random.randint(1, 28)} {self.words['month'][month - 1]}"
        if kind == "ship":
            return next(self.ships)
        if kind == "street":
            return self.random.choice(self.words["street"])
        number = self.random.randint(low, high)
        return self._spelled(number) if kind == "words" else str(number)

    def _spelled(self, number: int) -> str:
        """The English words for a number from 0 to 99."""
        if number < 20:
            return self.words["number"][number]
        tens, units = divmod(number, 10)
        return self.words["ten"][tens - 2] + (f"-{self.words['number'][units]}" if units else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the chronicle of Thornhithe to standard output.")
    parser.add_argument("--seed", type=int, default=1861, help="other seeds, other people, dates and amounts")
    parser.add_argument("--facts", action="store_true", help="write the questions, answers and offsets as JSON instead")
    arguments = parser.parse_args()
    folder = Path(__file__).parent
    words = json.loads((folder / "words.json").read_text("utf-8"))
    chronicler = Chronicler(read_scenes(folder / "scenes.txt"), words, arguments.seed)
    chronicler.write()
    text = "".join(chronicler.parts).rstrip("\n") + "\n"
    facts = json.dumps(chronicler.facts, indent=1) + "\n"
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    sys.stdout.write(facts if arguments.facts else text)


if __name__ == "__main__":
    main()

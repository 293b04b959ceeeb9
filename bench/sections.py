"""Section: a part of a benchmark's report, whose rows can be measured one by one; Stage: what they run on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .clock import Sample
from .costs import prefill_cost
from .limits import Prober
from .options import Options
from .ours import Ours
from .report import Target
from .rounds import Entry, Measured, alternate, ratio

__all__ = ["Part", "Section", "Stage", "compare", "run_sections"]

Part = tuple[list[dict[str, Any]], list[Target]]


@dataclass(frozen=True)
class Section:
    """name: the head of its targets' names. rows: of the table, by name; none where it is measured as a whole.

    run: measures the rows of the given names.
    """

    name: str
    rows: tuple[str, ...]
    run: Callable[[Collection[str]], Part]


@dataclass(frozen=True)
class _Row:
    section: Section
    name: str

    @property
    def full_name(self) -> str:
        return f"{self.section.name}.{self.name}".strip(".")


def run_sections(sections: Iterable[Section], chosen: Options) -> Part:
    """Measure what is chosen of the sections, in their order. Raises ConfigError for a name that none of them has."""
    rows = chosen.choose(_Row(section, name) for section in sections for name in section.rows or ("",))
    wanted: dict[str, tuple[Section, list[str]]] = {}
    for row in rows:
        wanted.setdefault(row.section.name, (row.section, []))[1].append(row.name)
    parts = [section.run(names) for section, names in wanted.values()]
    return [line for found, _ in parts for line in found], [target for _, found in parts for target in found]


@dataclass(frozen=True)
class Stage:
    """The engine, how many rounds are run, and the machine's limits."""

    ours: Ours
    rounds: int
    probe: Prober

    def alternate(
        self,
        work: str,
        context: int,
        tokens: int,
        ways: Mapping[str, tuple[str, Callable[[], Sample]]],
        wanted: Collection[str],
    ) -> dict[str, Measured]:
        """The wanted ones of `ways`, given as (words, what to time) by row.

        The limit of each is one pass over the `tokens` that no way can do without, behind the head.
        """
        dtype = self.ours.variant.dtype
        cost = prefill_cost(self.ours.model_config, tokens, dtype)
        entries = {
            name: Entry(words, work, dtype, context, 1, tokens, cost, lambda _, way=way: way())  # type: ignore[misc]
            for name, (words, way) in ways.items()
            if name in wanted
        }
        measured = alternate(list(entries.values()), self.rounds, self.probe)
        return dict(zip(entries, measured, strict=True))


def compare(name: str, found: Mapping[str, Measured], mine: str, theirs: str, least: float) -> list[Target]:
    """The target that row `mine` has so many times the speed of row `theirs`, if both were measured."""
    if mine not in found or theirs not in found:
        return []
    return [Target(name, ratio(found[mine], found[theirs]), least)]

"""Diagnostics: what the turns of a step looked like, turn by turn, and where answers were lost from the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from ..engine.reading import Kind, Turn
from ..engine.sequence import DraftCounters
from .rewards import _squad_form
from .trajectory import Group, Trajectory

__all__ = ["Diagnostics", "TurnSums"]


@dataclass
class TurnSums:
    """Lists by the number of the turn. turns: how many there were. tokens: of their responses. cut: those that reached
    their limit."""

    turns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def add(self, number: int, turn: Turn) -> None:
        """Count the turn that is number `number` of its trajectory; its index may be any that its agent gave it."""
        for sums in (self.turns, self.tokens, self.cut):
            sums.extend([0] * (number + 1 - len(sums)))
        self.turns[number] += 1
        self.tokens[number] += len(turn.response_ids)
        self.cut[number] += turn.finish_reason == "length"

    def __add__(self, other: TurnSums) -> TurnSums:
        pairs = ((self.turns, other.turns), (self.tokens, other.tokens), (self.cut, other.cut))
        return TurnSums(*([a + b for a, b in zip_longest(*pair, fillvalue=0)] for pair in pairs))

    def means(self, sums: list[int]) -> list[float]:
        """Of one of the lists."""
        return [_share(n, turns) for n, turns in zip(sums, self.turns, strict=True)]


@dataclass
class Diagnostics:
    """Sums over trajectories.

    kinds: sums of turns of each kind. trajectories: those of a memory agent, for a problem with a reference answer.
    found: of these, those one of whose memories held it, that is all words of a reference in SQuAD's form. kept: those
    whose last memory does. lost: by turn, those whose memory held it, and does not from this turn on to the end.
    drafts: by source, what came of drafts.
    """

    kinds: dict[Kind, TurnSums] = field(default_factory=dict)
    trajectories: int = 0
    found: int = 0
    kept: int = 0
    lost: Counter[int] = field(default_factory=Counter)
    drafts: dict[str, DraftCounters] = field(default_factory=dict)

    def add(self, group: Group) -> None:
        """Count a group."""
        references = group.problem.answers if group.problem is not None else ()
        for trajectory in group.trajectories:
            for number, turn in enumerate(trajectory.turns):
                self.kinds.setdefault(turn.kind, TurnSums()).add(number, turn)
                for source, counters in turn.drafts.items():
                    self.drafts[source] = self.drafts.get(source, DraftCounters()) + counters
            if references:
                self._follow_answer(trajectory, references)

    def merged(self, others: Iterable[Diagnostics]) -> Diagnostics:
        """The sums of these and of others, as of other ranks."""
        total = Diagnostics()
        for one in (self, *others):
            for kind, sums in one.kinds.items():
                total.kinds[kind] = total.kinds.get(kind, TurnSums()) + sums
            for name in ("trajectories", "found", "kept"):
                setattr(total, name, getattr(total, name) + getattr(one, name))
            total.lost += one.lost
            for source, counters in one.drafts.items():
                total.drafts[source] = total.drafts.get(source, DraftCounters()) + counters
        return total

    def record(self) -> dict[str, Any]:
        """For the log: of memories and calls lists by turn, of final turns one number; answer_lost_at by turn."""
        values: dict[str, Any] = {}
        for name, sums in (("memory", self.kinds.get("update")), ("call", self.kinds.get("call"))):
            if sums is not None:
                values |= {f"{name}_tokens": sums.means(sums.tokens), f"{name}_cut": sums.means(sums.cut)}
        finals = self.kinds.get("final")
        if finals is not None:
            turns = sum(finals.turns)
            values |= {"answer_tokens": sum(finals.tokens) / turns, "answer_cut": sum(finals.cut) / turns}
        if self.trajectories:
            values |= {
                "answer_found": self.found / self.trajectories,
                "answer_kept": self.kept / self.trajectories,
                "answer_lost_at": {str(turn): n for turn, n in sorted(self.lost.items())},
            }
        return values

    def acceptance(self) -> dict[str, float]:
        """Of drafted tokens, the share that was accepted, by source and over all; it may depend on the time of day."""
        total = sum(self.drafts.values(), DraftCounters())
        named = {**self.drafts, "all": total} if self.drafts else {}
        return {source: _share(one.accepted, one.proposed) for source, one in sorted(named.items())}

    def _follow_answer(self, trajectory: Trajectory, references: tuple[str, ...]) -> None:
        wanted = [words for words in map(_words, references) if words]
        updates = [turn for turn in trajectory.turns if turn.kind == "update"]
        holds = [turn.index for turn in updates if any(words <= _words(turn.text) for words in wanted)]
        self.trajectories += bool(updates)
        if not holds:
            return
        self.found += 1
        if holds[-1] == updates[-1].index:
            self.kept += 1
        else:
            self.lost[holds[-1] + 1] += 1


def _words(text: str) -> set[str]:
    return set(_squad_form(text).split())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

"""Diagnostics: what the turns of a step looked like, turn by turn, and where answers were lost from the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..engine.sequence import DraftCounters
from .rewards import _squad_form
from .trajectory import Group, Trajectory

__all__ = ["Diagnostics"]


@dataclass
class Diagnostics:
    """Sums over trajectories; lists are by the number of the update turn.

    turns: update turns. memory_tokens: of the memories they wrote. cut: memories that reached their limit. answers,
    answer_tokens, answers_cut: the same of final turns. trajectories: whose problem has a reference answer.
    found: those one of whose memories held it, that is all words of a reference in SQuAD's form. kept: those whose last
    memory does. lost: those whose memory held it, and does not from this turn on to the end. drafts: by source, what
    came of drafts.
    """

    turns: list[int] = field(default_factory=list)
    memory_tokens: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    answers: int = 0
    answer_tokens: int = 0
    answers_cut: int = 0
    trajectories: int = 0
    found: int = 0
    kept: int = 0
    lost: Counter[int] = field(default_factory=Counter)
    drafts: dict[str, DraftCounters] = field(default_factory=dict)

    def add(self, group: Group) -> None:
        """Count a group."""
        references = group.problem.answers if group.problem is not None else ()
        for trajectory in group.trajectories:
            self._count_turns(trajectory)
            if references:
                self._follow_answer(trajectory, references)

    def merged(self, others: Iterable[Diagnostics]) -> Diagnostics:
        """The sums of these and of others, as of other ranks."""
        total = Diagnostics()
        for one in (self, *others):
            for name in ("turns", "memory_tokens", "cut"):
                setattr(total, name, _added(getattr(total, name), getattr(one, name)))
            for name in ("answers", "answer_tokens", "answers_cut", "trajectories", "found", "kept"):
                setattr(total, name, getattr(total, name) + getattr(one, name))
            total.lost += one.lost
            for source, counters in one.drafts.items():
                total.drafts[source] = total.drafts.get(source, DraftCounters()) + counters
        return total

    def record(self) -> dict[str, Any]:
        """For the log: means and shares instead of sums; lists by turn, `lost` by its number."""
        return {
            "memory_tokens": [_share(n, turns) for n, turns in zip(self.memory_tokens, self.turns, strict=True)],
            "memory_cut": [_share(n, turns) for n, turns in zip(self.cut, self.turns, strict=True)],
            "answer_tokens": _share(self.answer_tokens, self.answers),
            "answer_cut": _share(self.answers_cut, self.answers),
            "answer_found": _share(self.found, self.trajectories),
            "answer_kept": _share(self.kept, self.trajectories),
            "answer_lost_at": {str(turn): n for turn, n in sorted(self.lost.items())},
        }

    def acceptance(self) -> dict[str, Any]:
        """Of drafted tokens, the share that was accepted, by source and over all; it may depend on the time of day."""
        total = sum(self.drafts.values(), DraftCounters())
        named = {**self.drafts, "all": total} if self.drafts else {}
        return {source: _share(one.accepted, one.proposed) for source, one in sorted(named.items())}

    def _count_turns(self, trajectory: Trajectory) -> None:
        for turn in trajectory.turns:
            for source, counters in turn.drafts.items():
                self.drafts[source] = self.drafts.get(source, DraftCounters()) + counters
            tokens, cut = len(turn.response_ids), turn.finish_reason == "length"
            if turn.kind == "final":
                self.answers += 1
                self.answer_tokens += tokens
                self.answers_cut += cut
                continue
            if turn.index >= len(self.turns):
                for sums in (self.turns, self.memory_tokens, self.cut):
                    sums.extend([0] * (turn.index + 1 - len(sums)))
            self.turns[turn.index] += 1
            self.memory_tokens[turn.index] += tokens
            self.cut[turn.index] += cut

    def _follow_answer(self, trajectory: Trajectory, references: tuple[str, ...]) -> None:
        wanted = [words for words in map(_words, references) if words]
        updates = [turn for turn in trajectory.turns if turn.kind == "update"]
        holds = [turn.index for turn in updates if any(words <= _words(turn.text) for words in wanted)]
        self.trajectories += 1
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


def _added(left: list[int], right: list[int]) -> list[int]:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return [n + (shorter[i] if i < len(shorter) else 0) for i, n in enumerate(longer)]

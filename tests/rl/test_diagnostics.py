"""Diagnostics: lengths and cuts by turn, and the turn at which an answer left the memory for good."""

from __future__ import annotations

from array import array

from palimpsest.engine.config import SamplingParams
from palimpsest.engine.reading import Kind, Turn
from palimpsest.engine.sequence import DraftCounters
from palimpsest.rl.diagnostics import Diagnostics
from palimpsest.rl.trajectory import Group, Problem, Trajectory


def turn(index: int, text: str, kind: Kind = "update", reason: str = "stop") -> Turn:
    ids = array("i", range(len(text)))
    drafts = {"memory": DraftCounters(1, 4, index)}
    return Turn(kind, index, array("i"), ids, len(ids), text, [0.0] * len(ids), reason, 0.0, 0, 0, drafts=drafts)


def group(*readings: list[str], answers: tuple[str, ...] = ("The Keeper",)) -> Group:
    trajectories = []
    for memories in readings:
        turns = [turn(i, text, reason="length" if len(text) > 10 else "stop") for i, text in enumerate(memories)]
        turns.append(turn(len(memories), "x", "final"))
        trajectories.append(Trajectory(turns, 0.0, 0.0))
    return Group(trajectories, SamplingParams(), 0, problem=Problem("", "?", answers))


def test_what_is_said_of_turns_and_answers() -> None:
    seen = Diagnostics()
    seen.add(
        group(["", "a keeper of lamps", "keeper", "lamp"], ["keeper"], ["", "lamp"], ["keeper", "", "the keeper."])
    )
    record = seen.record()
    assert record["memory_tokens"] == [(0 + 6 + 0 + 6) / 4, (17 + 4 + 0) / 3, (6 + 11) / 2, 4.0]
    assert record["memory_cut"] == [0, 1 / 3, 1 / 2, 0] and record["answer_tokens"] == 1
    assert record["answer_found"] == 3 / 4 and record["answer_kept"] == 2 / 4
    assert record["answer_lost_at"] == {"3": 1}
    assert seen.acceptance() == {"memory": (10 + 1 + 3 + 6) / (4 * 14), "all": (10 + 1 + 3 + 6) / (4 * 14)}


def test_several_answers_no_answer_and_no_memory() -> None:
    seen = Diagnostics()
    seen.add(group([], ["the mate"], answers=("captain", "first mate", "mate", "the")))
    seen.add(group(["keeper"], answers=()))
    assert (seen.trajectories, seen.found, seen.kept) == (1, 1, 1)  # who reads nothing can keep nothing
    seen = Diagnostics()
    seen.add(
        Group([Trajectory([turn(0, "keeper", "call")], 0.0, 0.0)], SamplingParams(), 0, problem=Problem("", "?", ()))
    )
    assert seen.record() == {"call_tokens": [6.0], "call_cut": [0.0]}


def test_ranks_add_up() -> None:
    parts = [group(["", "keeper", ""]), group(["keeper"], ["a keeper of lamps", "x"])]
    whole, ranks = Diagnostics(), [Diagnostics(), Diagnostics()]
    for part, rank in zip(parts, ranks, strict=True):
        whole.add(part)
        rank.add(part)
    assert ranks[0].merged(ranks[1:]) == whole

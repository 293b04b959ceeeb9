"""Siblings: the readings of a group tell one another's drafters what they write of the same chunk."""

from __future__ import annotations

from array import array

from .draft import Drafter

__all__ = ["Siblings"]


class Siblings:
    """What each reading of a group has written in its present turn and in later ones than the slowest."""

    def __init__(self) -> None:
        self._written: dict[int, dict[int, array[int]]] = {}
        self._drafters: dict[int, tuple[int, Drafter]] = {}

    def begin(self, reader: int, turn: int, drafter: Drafter) -> None:
        """Reading number `reader` begins a turn: it learns what others wrote in theirs of the same number."""
        self._drafters[reader] = (turn, drafter)
        slowest = min(index for index, _ in self._drafters.values())
        self._written = {index: written for index, written in self._written.items() if index >= slowest}
        for writer, ids in self._written.setdefault(turn, {}).items():
            drafter.extend(writer, ids[:])

    def write(self, writer: int, ids: array[int]) -> None:
        """Reading number `writer` goes on with these ids (int32)."""
        turn = self._drafters[writer][0]
        self._written[turn].setdefault(writer, array("i")).extend(ids)
        for reader, (index, drafter) in self._drafters.items():
            if index == turn and reader != writer:
                drafter.extend(writer, ids)

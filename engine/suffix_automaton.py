"""SuffixAutomaton: finds where the longest end of what was read stands in texts that may grow.

The class of that name is the extension's (csrc/suffix_automaton.h); without it its twin below does the same, slower.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

__all__ = ["PythonSuffixAutomaton", "SuffixAutomaton"]


@dataclass
class _State:
    """Strings that end at the same places. length: of the longest; link: the state of its longest suffix elsewhere.

    text, end: the first place where they end. edges: states by token.
    """

    length: int
    link: int
    text: int
    end: int
    edges: dict[int, int] = field(default_factory=dict)


class PythonSuffixAutomaton:
    """Built online (Blumer et al., TCS 40, 1985), over several texts by starting each at the root.

    At most 2 states and 3 edges per token; a token costs amortised constant time, to enter and to read.
    """

    def __init__(self) -> None:
        self._states = [_State(0, -1, 0, 0)]
        self._last: list[int] = []
        self._sizes: list[int] = []
        self._state = self._read = 0

    @property
    def states(self) -> int:
        return len(self._states)

    def add(self) -> int:
        """A new, empty text; -> its number, from 0."""
        self._last.append(0)
        self._sizes.append(0)
        return len(self._last) - 1

    def extend(self, text: int, ids: array[int]) -> None:
        """Let a text grow by int32 ids. What was read before is forgotten: it may stand in the text now."""
        for token in ids:
            self._sizes[text] += 1
            self._last[text] = self._grow(self._last[text], token, text, self._sizes[text])
        self._state = self._read = 0

    def advance(self, ids: array[int]) -> None:
        """Read on."""
        for token in ids:
            target = self._states[self._state].edges.get(token)
            while target is None and self._state != 0:
                self._state = self._states[self._state].link
                self._read = self._states[self._state].length
                target = self._states[self._state].edges.get(token)
            if target is not None:
                self._state = target
                self._read += 1

    def match(self) -> tuple[int, int, int]:
        """(length, text, position): the token at `position` follows the longest end of what was read that a text goes
        on after.

        The place is the one that was entered first unless its text ends there. (0, -1, -1): there is none.
        """
        at, length = self._state, self._read
        while at != 0:
            state = self._states[at]
            length = min(length, state.length)
            if state.end < self._sizes[state.text]:
                return length, state.text, state.end
            if state.edges:
                longer = self._states[state.edges[min(state.edges)]]
                return length, longer.text, longer.end - 1
            at = state.link
        return 0, -1, -1

    def _grow(self, last: int, token: int, text: int, end: int) -> int:
        """The state of the string of `last` with `token` behind it, which ends at `end` of `text`."""
        states = self._states
        if token in states[last].edges:
            return self._split(last, token)
        fresh = len(states)
        states.append(_State(states[last].length + 1, 0, text, end))
        state = last
        while state != -1 and token not in states[state].edges:
            states[state].edges[token] = fresh
            state = states[state].link
        if state != -1:
            states[fresh].link = self._split(state, token)
        return fresh

    def _split(self, state: int, token: int) -> int:
        """The state whose longest string is that of `state` with `token` behind it, split off from longer ones."""
        states = self._states
        target, length = states[state].edges[token], states[state].length + 1
        whole = states[target]
        if whole.length == length:
            return target
        shorter = len(states)
        states.append(_State(length, whole.link, whole.text, whole.end, dict(whole.edges)))
        whole.link = shorter
        while state != -1 and states[state].edges.get(token) == target:
            states[state].edges[token] = shorter
            state = states[state].link
        return shorter


if TYPE_CHECKING:
    SuffixAutomaton = PythonSuffixAutomaton
else:
    try:
        from .._C import SuffixAutomaton
    except ImportError:
        SuffixAutomaton = PythonSuffixAutomaton

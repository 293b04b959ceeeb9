"""The suffix automaton and its twin against a search by brute force."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from palimpsest.engine.suffix_automaton import PythonSuffixAutomaton, SuffixAutomaton

KINDS = {SuffixAutomaton, PythonSuffixAutomaton}
IDS = st.lists(st.integers(0, 2), max_size=12).map(lambda ids: array("i", ids))
PIECES = st.lists(st.tuples(st.integers(0, 2), IDS), max_size=8)


def occurrences(texts, suffix):
    """(text, position) of every token that follows `suffix`."""
    ends = ((t, i + len(suffix)) for t, text in enumerate(texts) for i in range(len(text)))
    return [(t, end) for t, end in ends if end < len(texts[t]) and texts[t][end - len(suffix) : end] == suffix]


def longest(texts, read):
    return max((n for n in range(1, len(read) + 1) if occurrences(texts, read[-n:])), default=0)


@given(PIECES, PIECES, IDS, IDS)
def test_finds_the_longest_end_of_what_was_read(first, second, read, then):
    automata = [kind() for kind in KINDS]
    texts = [array("i") for _ in range(3)]
    for automaton in automata:
        assert [automaton.add() for _ in texts] == [0, 1, 2]
    said = read + then
    for pieces in (first, second):  # the second time the texts grow after something was read, which forgets it
        for number, ids in [*pieces, (0, array("i"))]:
            texts[number].extend(ids)
            for automaton in automata:
                automaton.extend(number, ids)
        for automaton in automata:
            automaton.advance(read)
            automaton.advance(then)
        (length, number, position), *others = [automaton.match() for automaton in automata]
        assert all(other == (length, number, position) for other in others)
        assert length == longest(texts, said)
        assert length == 0 or (number, position) in occurrences(texts, said[-length:])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_names_the_place_that_was_entered_first(ids, length):
    text = array("i", ids)
    for kind in KINDS:
        automaton = kind()
        automaton.extend(automaton.add(), text)
        automaton.advance(text[-length:])
        found, _, position = automaton.match()
        if found == length <= len(text):
            assert position == min(end for _, end in occurrences([text], text[-length:]))


@pytest.mark.parametrize("kind", KINDS)
def test_grows_linearly(kind):
    automaton = kind()
    number, size = automaton.add(), 3000
    automaton.extend(number, array("i", [0] * size + [1] + [0, 1] * size))
    states = automaton.states
    assert states <= 2 * (3 * size + 1)
    automaton.extend(automaton.add(), array("i", [0] * size + [1] + [0, 1] * size))
    assert automaton.states == states  # what is known takes no room


@pytest.mark.skipif(len(KINDS) == 1, reason="the extension is not built")
def test_refuses_what_is_no_array_of_int32():
    automaton = SuffixAutomaton()
    automaton.add()
    for wrong in (array("q", [1]), memoryview(array("i", [1, 2, 3, 4]))[::2]):
        with pytest.raises(ValueError, match="int32"):
            automaton.extend(0, wrong)
    with pytest.raises(IndexError):
        automaton.extend(1, array("i", [1]))

"""Page accounting and the exact prefix index, by example and by random operations against a plain model of them."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from palimpsest.engine.kv_cache import OutOfPages, PagePool


def ids(*values: int) -> array[int]:
    return array("i", values)


def fill(pool: PagePool, tokens: array[int]) -> list[int]:
    """Take what is resident of `tokens`, allocate the rest and publish every full page; -> the table."""
    match = pool.match(tokens, len(tokens))
    pool.acquire(match.pages)
    table = match.pages + pool.allocate(pool.pages_for(len(tokens)) - len(match.pages))
    parent = match.nodes[-1] if match.nodes else pool.root
    for i in range(len(match.pages), len(tokens) // pool.page_size):
        page_ids = tokens[i * pool.page_size : (i + 1) * pool.page_size].tobytes()
        parent, table[i] = pool.publish(parent, page_ids, table[i])
    return table


def test_a_released_prefix_is_found_whole_and_in_part() -> None:
    pool = PagePool(8, 4)
    table = fill(pool, ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    pool.release(table)
    match = pool.match(ids(1, 2, 3, 4, 5, 6, 0, 0), 8)
    assert (match.pages, match.source, match.partial) == ([table[0]], table[1], 2)
    assert pool.match(ids(1, 2, 3, 4, 5, 6, 7, 8), 7).partial == 3, "the limit holds inside a page"
    assert pool.match(ids(2, 2, 3, 4), 4).pages == []
    pool.check([])


def test_the_page_that_matches_longest_is_the_one_copied_from() -> None:
    pool = PagePool(8, 4)
    for tokens in (ids(1, 2, 9, 9), ids(1, 2, 3, 9), ids(1, 8, 8, 8)):
        pool.release(fill(pool, tokens))
    match = pool.match(ids(1, 2, 3, 4), 4)
    assert match.partial == 3
    assert match.source == pool.match(ids(1, 2, 3, 9), 4).pages[0]


def test_eviction_takes_the_longest_idle_sequence_tail_first() -> None:
    pool = PagePool(4, 2)
    old, new = fill(pool, ids(1, 1, 2, 2)), fill(pool, ids(3, 3, 4, 4))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.match(ids(1, 1, 2, 2), 4).pages == [old[0]], "the head of the older sequence outlives its tail"
    assert pool.allocate(1) == [old[0]]
    assert pool.match(ids(3, 3, 4, 4), 4).pages == new


def test_a_page_computed_twice_is_kept_once() -> None:
    pool = PagePool(4, 2)
    first, second = pool.allocate(1), pool.allocate(1)
    node, page = pool.publish(pool.root, ids(5, 6).tobytes(), first[0])
    again, kept = pool.publish(pool.root, ids(5, 6).tobytes(), second[0])
    assert (again, kept) == (node, page) == (node, first[0])
    pool.check([first, [kept]])
    assert pool.available == 3


def test_forgetting_empties_the_index_and_old_nodes_never_match() -> None:
    pool = PagePool(4, 2)
    root = pool.root
    table = fill(pool, ids(1, 1, 2, 2))
    with pytest.raises(RuntimeError, match="hold pages"):
        pool.forget()
    pool.release(table)
    pool.forget()
    assert pool.match(ids(1, 1, 2, 2), 4).pages == []
    assert pool.available == 4
    assert pool.root != root
    pool.check([])


def test_allocating_too_much_changes_nothing() -> None:
    pool = PagePool(3, 2)
    table = pool.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 available"):
        pool.allocate(2)
    pool.check([table])


@pytest.mark.parametrize("damage", ["lost", "doubled", "orphan"])
def test_check_names_what_is_broken(damage: str) -> None:
    pool = PagePool(4, 2)
    table = fill(pool, ids(1, 1, 2, 2))
    if damage == "lost":
        pool._free.pop()
    elif damage == "doubled":
        pool._free.append(table[0])
    else:
        pool._drop(pool._nodes.pop(table[0]))
    with pytest.raises(RuntimeError, match="page accounting"):
        pool.check([table])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["fill", "release", "forget"]), st.lists(st.integers(0, 2), max_size=14)), max_size=40
    )
)
def test_random_operations_keep_every_count(operations: list[tuple[str, list[int]]]) -> None:
    pool = PagePool(12, 2)
    tables: list[tuple[array[int], list[int]]] = []
    for name, values in operations:
        tokens = array("i", values)
        if name == "fill":
            match = pool.match(tokens, len(tokens))
            missing = pool.shortfall(match, len(tokens))
            if missing > 0:
                with pytest.raises(OutOfPages):
                    pool.acquire(match.pages)
                    try:
                        pool.allocate(pool.pages_for(len(tokens)) - len(match.pages))
                    finally:
                        pool.release(match.pages)
            else:
                tables.append((tokens, fill(pool, tokens)))
        elif name == "release" and tables:
            tokens, table = tables.pop(len(values) % len(tables))
            pool.release(table)
            full = len(tokens) // 2
            assert pool.match(tokens, len(tokens)).pages == table[:full]
        elif name == "forget" and not tables:
            pool.forget()
        pool.check(table for _, table in tables)

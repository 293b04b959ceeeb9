"""PagePool: who owns each page of KV, and the exact prefix index over pages that hold known tokens. No tensors.

A page is free (nothing in it), live (in the table of at least one sequence) or idle (in no table, but its content is
known and may be wanted again). The index is a tree: a node is a full page of token ids behind its parent node, so a
lookup compares ids and can't be fooled by a hash. A sequence that holds a node's page holds its ancestors' pages too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Match", "OutOfPages", "PagePool", "shared_ids"]

ID_BYTES = array("i").itemsize


class OutOfPages(Exception):
    """More pages were asked for than are free or idle; the scheduler preempts and asks again."""


@dataclass(frozen=True)
class Match:
    """What is resident of a token sequence: whole pages and their nodes, then `partial` tokens of page `source`."""

    pages: list[int]
    nodes: list[int]
    source: int | None
    partial: int


@dataclass(frozen=True)
class _Node:
    id: int
    parent: int
    ids: bytes
    page: int


class PagePool:
    """`num_pages` pages of `page_size` token slots, handed out and taken back; never touches what is in them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._next_node = 1
        self.root = 0
        self.reset()

    def reset(self) -> None:
        """Free every page, whoever held it, and empty the index."""
        # A stack, so that the page released last is taken first: it is warm, and untouched memory stays untouched.
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._references = [0] * self.num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._nodes: dict[int, _Node] = {}
        self._children: dict[int, dict[bytes, _Node]] = {}
        self._sorted: dict[int, list[bytes]] = {}  # the keys of each node's children
        # A new root, so that a node number kept from before can never match.
        self.root, self._next_node = self._next_node, self._next_node + 1

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps partly."""
        return -(-tokens // self.page_size)

    def match(self, tokens: array[int], limit: int) -> Match:
        """Find the longest resident prefix of tokens[:limit]. Changes nothing; valid until the next call that does."""
        pages: list[int] = []
        nodes: list[int] = []
        parent, start = self.root, 0
        while start + self.page_size <= limit:
            node = self._children.get(parent, {}).get(tokens[start : start + self.page_size].tobytes())
            if node is None:
                break
            pages.append(node.page)
            nodes.append(node.id)
            parent, start = node.id, start + self.page_size
        source, partial = self._partial(parent, tokens[start : min(start + self.page_size, limit)].tobytes())
        return Match(pages, nodes, source, partial)

    def _partial(self, parent: int, wanted: bytes) -> tuple[int | None, int]:
        """The child of `parent` that shares the most leading ids with `wanted`, and how many those are.

        In sorted order that is one of the two between which `wanted` would stand.
        """
        keys = self._sorted.get(parent, [])
        at = bisect_left(keys, wanted)
        shared, ids = max(((shared_ids(ids, wanted), ids) for ids in keys[max(at - 1, 0) : at + 1]), default=(0, b""))
        return (self._children[parent][ids].page, shared) if shared else (None, 0)

    def shortfall(self, match: Match, tokens: int) -> int:
        """Pages missing (0 or less: none) to give a sequence of `tokens` tokens what `match` lacks."""
        woken = sum(page in self._idle for page in match.pages)
        return self.pages_for(tokens) - len(match.pages) - (self.available - woken)

    def acquire(self, pages: Iterable[int]) -> None:
        """Take resident pages into one more table."""
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages with unknown content; evicts idle pages when the free ones don't suffice.

        Raises OutOfPages, changing nothing, when free and idle pages together are too few.
        """
        if count > self.available:
            raise OutOfPages(f"{count} pages asked for, {self.available} available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _evict(self) -> int:
        """Forget the page that has been idle longest.

        `release` lays a table's pages down last page first, so a node is always idle at least as long as its parent:
        whole sequences go tail first and no node loses its parent. Least recently used alone would cut heads off.
        """
        page, _ = self._idle.popitem(last=False)
        node = self._nodes.pop(page)
        self._drop(node)
        return page

    def _drop(self, node: _Node) -> None:
        siblings, keys = self._children[node.parent], self._sorted[node.parent]
        del siblings[node.ids], keys[bisect_left(keys, node.ids)]
        if not siblings:
            del self._children[node.parent], self._sorted[node.parent]

    def publish(self, parent: int, ids: bytes, page: int) -> tuple[int, int]:
        """Enter a live page, full of committed tokens `ids` behind node `parent`, into the index; -> (node, page).

        If the index already knows these tokens, the caller's page is let go and the known one takes its place.
        """
        known = self._children.get(parent, {}).get(ids)
        if known is not None:
            if known.page != page:
                self.acquire([known.page])
                self.release([page])
            return known.id, known.page
        node = _Node(self._next_node, parent, ids, page)
        self._next_node += 1
        self._nodes[page] = node
        self._children.setdefault(parent, {})[ids] = node
        insort(self._sorted.setdefault(parent, []), ids)
        return node.id, page

    def release(self, pages: Sequence[int]) -> None:
        """Give back one table's pages (in order); known content stays resident until it is evicted."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._nodes:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Empty the index after a weight update. No page may be live."""
        if any(self._references):
            raise RuntimeError("the index can't be emptied while sequences hold pages")
        self.reset()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare every count with the tables that are out; RuntimeError names the first broken invariant."""
        held = Counter(page for table in tables for page in table)
        for page, count in enumerate(self._references):
            _hold(held[page] == count, f"page {page} is in {held[page]} tables but counted {count} times")
        free, idle, live = set(self._free), set(self._idle), set(held)
        _hold(len(free) == len(self._free), "a page is free twice")
        _hold(not (free & idle or free & live or idle & live), "a page has two owners")
        _hold(len(free) + len(idle) + len(live) == self.num_pages, "free + idle + live differs from the total")
        _hold(idle <= set(self._nodes), "an idle page is not in the index")
        _hold(not free & set(self._nodes), "a free page is in the index")
        ids = {node.id for node in self._nodes.values()} | {self.root}
        for page, node in self._nodes.items():
            _hold(node.page == page, f"node {node.id} names page {node.page}, not {page}")
            _hold(node.parent in ids, f"node {node.id} has lost its parent {node.parent}")
            _hold(self._children.get(node.parent, {}).get(node.ids) is node, f"node {node.id} can't be found")
        ordered = {parent: sorted(children) for parent, children in self._children.items()}
        _hold(ordered == self._sorted, "the sorted keys differ from the children")
        entries = sum(len(children) for children in self._children.values())
        _hold(entries == len(self._nodes), "the index holds a node without a page")


def shared_ids(left: bytes, right: bytes) -> int:
    """How many leading token ids two byte strings of int32 share."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // ID_BYTES
    low, high = 0, length // ID_BYTES  # invariant: the first `low` ids agree, the first `high` don't
    while high - low > 1:
        middle = (low + high) // 2
        if left[: middle * ID_BYTES] == right[: middle * ID_BYTES]:
            low = middle
        else:
            high = middle
    return low


def _hold(condition: bool, broken: str) -> None:
    if not condition:
        raise RuntimeError(f"page accounting: {broken}")

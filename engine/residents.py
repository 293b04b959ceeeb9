"""Residents: the sequences that the scheduler has taken in, which of them run, and the pages that they hold.

A prompt is admitted when pages for the whole of it are there, and when no running one is about to fill pages that it
could share. When a running sequence needs a page and none is left, the sequence admitted last gives up its pages and is
computed again later; the oldest one always goes on, so all finish. Open sequences run in places and pages that closed
ones leave. Pages that a finished sequence keeps, for a prompt that carries its KV on, are the first to be taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .carried import RECOMPUTED
from .errors import RequestError
from .kv_cache import PagePool, shared_ids
from .plan import Plan
from .sequence import Sequence, Status
from .step import PageCopy

__all__ = ["Residents"]


class Residents:
    """Who waits, who runs and who has finished but keeps its pages, each in the order in which they came to that.

    max_sequences: most that run at once.
    """

    def __init__(self, pool: PagePool, max_sequences: int) -> None:
        self.pool, self.max_sequences = pool, max_sequences
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.kept: list[Sequence] = []

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence in any state and free its pages; without effect on a finished one."""
        if sequence.finished:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._drop_carried(sequence)
        if sequence.keeps_kv and sequence.pages and reason in ("stop", "length"):
            self.kept.append(sequence)
        else:
            self._release(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def let_go(self, source: Sequence) -> None:
        """Give back the pages that a finished sequence keeps, if it does; prompts that wait for them do without."""
        if source not in self.kept:
            return
        self.kept.remove(source)
        self._release(source)
        for sequence in self.waiting:
            if sequence.carried is not None and sequence.carried.source is source:
                sequence.carried = None

    def let_go_all(self) -> None:
        """Give back all pages that finished sequences keep."""
        for source in list(self.kept):
            self.let_go(source)

    def check(self) -> None:
        """RuntimeError if any page is lost, doubled or wrongly counted."""
        self.pool.check(sequence.pages for sequence in (*self.running, *self.kept))
        if any(sequence.pages for sequence in self.waiting):
            raise RuntimeError("a waiting sequence holds pages")

    def _take_over(self, sequence: Sequence) -> None:
        """Settle what a new sequence carries. Nothing, where its source has lost its pages or too few tokens move."""
        carried = sequence.carried
        if carried is None:
            return
        carried.check(sequence.tokens, sequence.params, sequence.is_open)
        if carried.source not in self.kept and carried.source.pages:
            raise RequestError(f"sequence {carried.source.id}, whose KV is to be carried, belongs to another engine")
        others = (other.carried for other in (*self.waiting, *self.running))
        if any(other is not None and other.source is carried.source for other in others):
            raise RequestError(f"the KV of sequence {carried.source.id} is carried on by another prompt already")
        if carried.source not in self.kept or carried.length <= RECOMPUTED:
            self._drop_carried(sequence)

    def _shares_with_running(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to fill pages that this one could take instead of computing them too.

        It is never waited for in vain: what is running and has pending tokens goes on, or loses its place.
        """
        size, limit = self.pool.page_size, _shareable(sequence)
        first, wanted = sequence.tokens[:size], sequence.tokens[:limit].tobytes()
        coming = 0
        for other in self.running:
            if other.tokens[:size] == first and other.pending > 0 and not other.decoding:
                shared = shared_ids(wanted, other.tokens[: min(limit, other.exact)].tobytes()) // size
                coming = max(coming, shared if shared > other.computed // size else 0)
        return coming > 0 and coming > len(self.pool.match(sequence.tokens, limit).pages)

    def _start(self, sequence: Sequence, plan: Plan) -> bool:
        """Admit one sequence if the pages for all its tokens are there, taking those that are resident.

        A closed one takes place and pages of open ones where it must.
        """
        total = len(sequence.tokens)
        match = self.pool.match(sequence.tokens, _shareable(sequence))
        while len(self.running) >= self.max_sequences or self.pool.shortfall(match, total) > 0:
            if self.pool.shortfall(match, total) <= 0 or not self._reclaim(plan):
                victim = self._last_open()
                if sequence.is_open or victim is None:
                    return False
                self._preempt(victim, plan)
            match = self.pool.match(sequence.tokens, _shareable(sequence))
        self.pool.acquire(match.pages)
        fresh = self.pool.allocate(self.pool.pages_for(total) - len(match.pages))
        if match.source is not None:
            plan.copies.append(PageCopy(match.source, fresh[0]))
        sequence.pages, sequence.chain = match.pages + fresh, match.nodes
        sequence.computed = len(match.pages) * self.pool.page_size + match.partial
        if sequence.furthest == 0:
            sequence.counters.cached_tokens = sequence.computed
        sequence.furthest = max(sequence.furthest, sequence.computed)
        if sequence.carried is not None:
            plan.moves[sequence] = sequence.carried.move(sequence.pages)
            sequence.pass_carried()
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.status = Status.RUNNING
        return True

    def _house(self, sequence: Sequence, length: int, plan: Plan) -> bool:
        """Give a running sequence the pages for `length` tokens, others' where it must; False if it lost its own."""
        missing = self.pool.pages_for(length) - len(sequence.pages)
        while missing > self.pool.available:
            if self._reclaim(plan):
                continue
            victim = self._last_open() or self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.pages.extend(self.pool.allocate(max(missing, 0)))
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Take a running sequence's pages and put it at the head of the queue, to be computed again."""
        plan.drop(sequence)
        self.running.remove(sequence)
        self._release(sequence)
        self._drop_carried(sequence)
        sequence.computed = 0
        sequence.status = Status.WAITING
        sequence.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def _last_open(self) -> Sequence | None:
        """The open sequence that was admitted last."""
        return next((sequence for sequence in reversed(self.running) if sequence.is_open), None)

    def _reclaim(self, plan: Plan) -> bool:
        """Take back the pages kept last, if there are some that this step does not read; -> whether it did."""
        read = {sequence.carried.source for sequence in plan.moves if sequence.carried is not None}
        source = next((source for source in reversed(self.kept) if source not in read), None)
        if source is not None:
            self.let_go(source)
        return source is not None

    def _drop_carried(self, sequence: Sequence) -> None:
        """Forget what a sequence carries: what is computed from here on is exact."""
        if sequence.carried is not None:
            self.let_go(sequence.carried.source)
            sequence.carried = None

    def _rewind(self, sequence: Sequence) -> None:
        """Let the page of the last token be computed again: the response is drawn from that token's row."""
        whole = (len(sequence.tokens) - 1) // self.pool.page_size
        self.pool.release(sequence.pages[whole:])
        del sequence.pages[whole:], sequence.chain[whole:]
        sequence.computed = whole * self.pool.page_size

    def _begin_again(self, sequences: Iterable[Sequence]) -> None:
        """No page holds anything any more: let these sequences wait, and all else go."""
        self.pool.reset()
        for source in self.kept:
            source.pages, source.chain = [], []
        self.kept.clear()
        self.running.clear()
        self.waiting.clear()
        for sequence in sequences:
            sequence.pages, sequence.chain, sequence.computed, sequence.carried = [], [], 0, None
            sequence.status = Status.WAITING
            self.waiting.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.chain = [], []

    def _publish(self, sequence: Sequence) -> None:
        """Enter the pages that have become full into the prefix index, as far as they are exact."""
        size = self.pool.page_size
        for i in range(len(sequence.chain), min(sequence.computed, sequence.exact) // size):
            parent = sequence.chain[-1] if sequence.chain else self.pool.root
            ids = sequence.tokens[i * size : (i + 1) * size].tobytes()
            node, sequence.pages[i] = self.pool.publish(parent, ids, sequence.pages[i])
            sequence.chain.append(node)


def _shareable(sequence: Sequence) -> int:
    """How many leading tokens may come from resident pages.

    Not the last one of a closed sequence, as the response is drawn from its row, nor any whose row owes a score.
    """
    return min(len(sequence.tokens) - (not sequence.is_open), sequence.first_unscored, sequence.exact)

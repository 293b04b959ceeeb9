"""RankWatch: how ranks learn that one of them has failed, so that none waits for it.

A rank that fails says so in the store that torchrun keeps for all of them. One that is killed says nothing: each rank
counts up a number there, and watches that of the next. A rank that learns of a failure ends, if need be in the middle
of what it does, as a rank that waits for a dead one can be in code that cannot be interrupted.
"""

from __future__ import annotations

import os
import sys
import threading

from torch.distributed.distributed_c10d import Store

__all__ = ["RankWatch"]

INTERVAL = 0.5  # seconds between two looks
SILENT = 60  # looks without a sign of life after which a rank counts as dead; pauses of the own process are no looks
GRACE = 10.0  # seconds in which a rank may end by itself, with its traceback
FAILURE = "failure"


class RankWatch:
    """failure: what happened to another rank, or None."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """store: of this watch alone; two threads of a rank cannot wait on one connection."""
        self.failure: str | None = None
        self._store, self._rank, self._size = store, rank, size
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one ends, and why. The first failure of all is the one that counts."""
        if self._closed.is_set():
            return
        if self.failure is None:
            self._stop()
            self._post(f"rank {self._rank} failed: {reason}")
            threading.Event().wait(3 * INTERVAL)  # once this process ends, so may the store, or torchrun the others

    def explain(self) -> str | None:
        """Once an exchange between ranks has failed: what happened to another, told or seen by its silence."""
        before = self._beats()
        self._closed.wait(4 * INTERVAL)
        if self.failure is None:
            after = self._beats()
            silent = [rank for rank in range(self._size) if before[rank] == after[rank] and rank != self._rank]
            if silent:
                names = " and ".join(f"rank {rank}" for rank in silent)
                self.failure = self._post(f"{names} ended without a word, as when killed or out of memory")
        return self.failure

    def close(self) -> None:
        """No longer watch, nor be watched."""
        if not self._closed.is_set():
            self._stop()
            self._beat("")

    def _stop(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        following = (self._rank + 1) % self._size
        heard, silence, looks = "", 0, 0
        while not self._closed.wait(INTERVAL):
            looks += 1
            try:
                self._beat(str(looks))
                failure = self._read(FAILURE)
                beat = self._read(f"beat{following}")
            except RuntimeError as error:
                return self._end(f"the store of torchrun or rank 0 is gone, as when they are killed: {error}")
            silence = silence + 1 if beat and beat == heard else 0
            heard = beat
            if silence > SILENT and not failure:
                failure = self._post(f"rank {following} has given no sign of life for {SILENT * INTERVAL:.0f} s")
            if failure:
                return self._end(failure)
        return None

    def _end(self, failure: str) -> None:
        self.failure = failure
        print(f"rank {self._rank} ends, as {failure}", file=sys.stderr, flush=True)
        if not self._closed.wait(GRACE):
            os._exit(1)

    def _post(self, failure: str) -> str:
        """Make this the failure of all ranks unless there is one; -> the one that counts."""
        try:
            return self._store.compare_set(FAILURE, "", failure).decode()
        except RuntimeError:
            return failure  # the store has gone first

    def _beats(self) -> list[str]:
        try:
            return [self._read(f"beat{rank}") for rank in range(self._size)]
        except RuntimeError:
            return [""] * self._size

    def _beat(self, value: str) -> None:
        self._store.set(f"beat{self._rank}", value)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

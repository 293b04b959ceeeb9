"""Termination: SIGTERM and Ctrl-C end a run where nothing is lost, so that it can be saved."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Terminated", "Termination"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO = 1.0  # seconds: make, timeout and torchrun pass on what the whole process group has got already


class Terminated(KeyboardInterrupt):
    """A signal asked the run to end. exit_code: what a shell expects of that: 143 for SIGTERM, 130 for Ctrl-C.

    As KeyboardInterrupt is, it is no Exception: what survives the mistakes of users' functions does not swallow it.
    """

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"{signal.Signals(number).name} received")


class Termination:
    """Waits for the signals while it is entered. A second one acts as if this were not there, unless it is an echo.

    requested: the number of the signal that came.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._came = 0.0
        self._breakable = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._restore()

    def check(self) -> None:
        """Raise Terminated if a signal came."""
        if self.requested is not None:
            raise Terminated(self.requested)

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """A block that a signal leaves at once, by Terminated; elsewhere it waits for `check`."""
        self._breakable = True
        try:
            self.check()
            yield
        finally:
            self._breakable = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._came = number, time.monotonic()
            if self._breakable:
                self._breakable = False
                raise Terminated(number)
        elif time.monotonic() - self._came >= ECHO:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

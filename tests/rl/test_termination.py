"""Termination: a signal ends a breakable block at once and waits elsewhere; a second one acts as ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from palimpsest.rl.termination import Terminated, Termination


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """A process in the background may have been started with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_breaks_what_may_be_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Termination() as termination:
        termination.check()
        with pytest.raises(Terminated, match="SIGTERM received") as caught, termination.breakable():
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("it went on")
        assert caught.value.exit_code == 143 and not isinstance(caught.value, Exception)
    assert signal.getsignal(signal.SIGTERM) is before
    with Termination() as termination:
        os.kill(os.getpid(), signal.SIGINT)  # not here: it waits
        os.kill(os.getpid(), signal.SIGTERM)  # so soon it is the same once more
        monkeypatch.setattr("palimpsest.rl.termination.ECHO", 0.0)
        with pytest.raises(KeyboardInterrupt) as second:  # a second one is Python's own
            os.kill(os.getpid(), signal.SIGINT)
        assert not isinstance(second.value, Terminated)
        with pytest.raises(Terminated, match="SIGINT"), termination.breakable():
            pytest.fail("it went in")
    assert signal.getsignal(signal.SIGTERM) is before

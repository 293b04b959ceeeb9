"""The process in which a user's reward function runs. Started by its path, it imports nothing of the package.

It is told a function, says whether that is there, then answers jobs until the other end of its socket closes.
"""

from __future__ import annotations

import importlib
import inspect
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["finite", "score"]

LARGEST = 1e18  # of a number: the squares of such ones still have a place in float32
GRACE = 5  # seconds after the time limit in which whoever started this process should have ended it


def finite(value: object) -> float:
    """A result as a number; True is 1, numbers of any library count. Raises an Exception for anything else, and for
    numbers beyond 1e18."""
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"it returned {value!r:.60}, no number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"it returned {value!r:.60}, no number") from error
    if not math.isfinite(number):
        raise ValueError(f"it returned {value!r:.60}, no finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"it returned {value!r:.60}; rewards are between -{LARGEST:g} and {LARGEST:g}")
    return number


def _takes_extra(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `extra`, or takes any."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions in C have no signature
        return False
    return "extra" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _load(module: str, name: str) -> Callable[..., Any]:
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{module}:{name} is {function!r:.60}, no function")
    return function  # type: ignore[no-any-return]


def score(
    function: Callable[..., Any], answer: str, references: Sequence[str], extra: Mapping[str, Any]
) -> tuple[str, Any]:
    """-> ("value", number), or the name of a failure and why."""
    try:
        given = function(answer, references, extra=extra) if _takes_extra(function) else function(answer, references)
    except (Exception, SystemExit) as error:
        return "raised", f"{type(error).__name__}: {error}"[:500]
    try:
        return "value", finite(given)
    except Exception as error:
        return "result", str(error)[:500]


def main(fd: int) -> None:
    """Load the function that the first message over the socket names, then score what each further one holds."""
    connection = Connection(fd)
    sys.path[:], module, name, timeout = connection.recv()
    try:
        function = _load(module, name)
    except (Exception, SystemExit) as error:
        connection.send(("raised", f"{type(error).__name__}: {error}"))
        return
    connection.send(("loaded", ""))
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # data of a row's own class, which is not to be had here
            connection.send(("raised", f"the problem can't be read: {type(error).__name__}: {error}"))
            continue
        # Ends a function that never returns even when nobody is left to end it, and though it may hold the GIL.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout + GRACE)
        outcome = score(function, *job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(outcome)


if __name__ == "__main__":
    main(int(sys.argv[1]))

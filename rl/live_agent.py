"""LiveAgent: an agent's function at work on one problem, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..engine.errors import WindowError
from .llm import LLM
from .reward_worker import finite
from .trajectory import Episode, Problem

__all__ = ["AgentFunction", "AgentResult", "LiveAgent"]

AgentResult = str | float
AgentFunction = Callable[[Problem, LLM], Awaitable[AgentResult]]


class LiveAgent:
    """Runs the function once; whatever that does, it ends.

    place: number of the run among those driven together. ended: whether `episode` may be taken. failure: name and
    cause of what went wrong, None if nothing did. waited: seconds that it has waited for anything but the model since
    its last call. task: the run, once begun.
    """

    def __init__(self, function: AgentFunction, problem: Problem, llm: LLM, place: int) -> None:
        self.llm, self.place = llm, place
        self.ended = False
        self.task: asyncio.Task[None] | None = None
        self.failure: tuple[str, str] | None = None
        self.waited = 0.0
        self._function, self._problem = function, problem
        self._result: AgentResult | None = None

    async def run(self) -> None:
        """Call the function."""
        try:
            result = await self._function(self._problem, self.llm)
            if not self.llm.turns:
                self.fail("no_call", "it returned without having asked the model anything")
            self._end(result)
        except WindowError as error:
            self.fail("window", str(error))
        except (Exception, SystemExit) as error:
            self.fail("raised", f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            self.fail("raised", "it was cancelled")

    def fail(self, name: str, why: str) -> None:
        """End it; what the function still does is of no account."""
        if not self.ended:
            self.ended, self.failure = True, (name, why)

    def episode(self) -> Episode:
        """What it leaves."""
        return Episode(self._result, self.llm.turns, self.llm.limits)

    def _end(self, result: object) -> None:
        try:
            value = str(result) if isinstance(result, str) else finite(result)
        except Exception as error:
            self.fail("result", str(error))
        if not self.ended:
            self.ended, self._result = True, value

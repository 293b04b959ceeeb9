"""AgentLoop: an event loop that runs agents side by side and steps the engine for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time

from ..engine.engine import Engine
from ..engine.errors import RequestError
from ..engine.reading import Request
from ..engine.sequence import Completion, Sequence
from ..engine.stream import require_delivery
from .live_agent import LiveAgent
from .llm import LLM

__all__ = ["AgentLoop"]

GRACE = 5.0  # seconds that cancelled agents get to put things away
TICK = 1.0  # seconds: how often agents that wait are looked at, and the most that one look adds to their waiting


class AgentLoop:
    """Runs only while it is asked to go on, so that whoever drives it may do other things in between."""

    def __init__(self, engine: Engine, timeout: float) -> None:
        """timeout: seconds that an agent may wait for anything but the model.

        Raises RequestError where an event loop runs already.
        """
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise RequestError(
                "agents run in an event loop of their own, and this thread runs one already (a notebook does); call "
                "from another thread, for instance with await asyncio.to_thread(...)"
            )
        self.engine = engine
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._agents: dict[LLM, LiveAgent] = {}
        self._calls: dict[Sequence, tuple[LLM, asyncio.Future[Completion]]] = {}

    def __len__(self) -> int:
        """How many agents are at work."""
        return len(self._agents)

    def start(self, agent: LiveAgent) -> None:
        """Begin to run an agent."""
        agent.task = self._loop.create_task(agent.run())
        agent.task.add_done_callback(lambda _: self._news.set())
        self._agents[agent.llm] = agent

    def advance(self) -> list[LiveAgent]:
        """Take one step of the engine, or wait for agents where none asks it anything; -> those that ended.

        Raises RequestError when a response ends in an error or is aborted by somebody else.
        """
        self._loop.run_until_complete(self._advance())
        ended = [agent for agent in self._agents.values() if agent.ended]
        for agent in ended:
            self._drop(agent)
        return ended

    async def respond(self, llm: LLM, request: Request, sample: int) -> Completion:
        """The engine's response. Leaving early aborts it."""
        if llm not in self._agents:
            raise RequestError("this agent has ended, so its llm takes no more calls; await all of them before")
        sequence = self.engine.add(request.segments, request.params, sample=sample, turn=request.index)
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._calls[sequence] = (llm, future)
        self._agents[llm].waited = 0.0
        self._news.set()
        try:
            return await future
        finally:
            self._calls.pop(sequence, None)
            with self.engine.aborting([sequence]):
                pass

    def close(self) -> None:
        """End everything."""
        for agent in list(self._agents.values()):
            agent.fail("closed", "nobody waits for it any more")
            self._drop(agent)
        try:
            self._loop.run_until_complete(self._put_away())
        finally:
            self._loop.close()

    async def _advance(self) -> None:
        started = time.perf_counter()
        await asyncio.sleep(0)  # agents that can go on make their calls, which then share a step
        if self._calls:
            for update in self.engine.step_for(self._calls):
                if update.completion is not None:
                    self._answer(update.sequence, update.completion)
            require_delivery([sequence for sequence in self._calls if sequence.finished])
        elif not any(agent.ended for agent in self._agents.values()):
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), min(TICK, self._timeout))
        await asyncio.sleep(0)
        self._look_after(min(time.perf_counter() - started, TICK))

    def _answer(self, sequence: Sequence, completion: Completion) -> None:
        _, future = self._calls.pop(sequence)
        if completion.finish_reason in ("abort", "error"):
            what = "was aborted" if completion.error is None else f"failed ({completion.error})"
            raise RequestError(f"a call of an agent {what} after {len(completion.token_ids)} tokens")
        if not future.done():
            future.set_result(completion)

    def _look_after(self, seconds: float) -> None:
        """Count the waiting of agents that wait for something else than the model."""
        asking = {llm for llm, _ in self._calls.values()}
        for agent in self._agents.values():
            if agent.llm not in asking:
                agent.waited += seconds
            if agent.waited > self._timeout:
                agent.fail("timeout", f"it waited for {self._timeout} s without asking the model anything")

    def _drop(self, agent: LiveAgent) -> None:
        del self._agents[agent.llm]
        if agent.task is not None:
            agent.task.cancel()
        for llm, future in list(self._calls.values()):
            if llm is agent.llm:
                future.cancel()

    async def _put_away(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)
        with self.engine.aborting(list(self._calls)):
            pass
        await self._loop.shutdown_asyncgens()

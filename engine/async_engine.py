"""AsyncEngine: the same engine for asyncio. One worker thread does all engine work; nothing blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from .config import SamplingParams
from .engine import Engine, Prompt, Update, params_for_each
from .sequence import Completion, Sequence

__all__ = ["AsyncEngine"]

T = TypeVar("T")


class AsyncEngine:
    """Asynchronous twins of Engine's methods. Wrap an engine once, then use it only through the wrapper.

    Requests of different tasks run in the same steps; steps run by themselves while any request is unfinished.
    Cancelling a task that waits for a request aborts that request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="palimpsest")
        self._queues: dict[Sequence, asyncio.Queue[Update | Exception]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def add(
        self, prompt: Prompt, params: SamplingParams | None = None, *, sample: int = 0, turn: int = 0
    ) -> Sequence:
        """Queue a prompt, as Engine.add; read its updates from `updates`."""
        adding = asyncio.ensure_future(self._call(partial(self.engine.add, prompt, params, sample=sample, turn=turn)))
        try:
            sequence = await asyncio.shield(adding)
        except asyncio.CancelledError:
            # The worker may have queued it already, and nobody will ever read it.
            adding.add_done_callback(self._abort_orphan)
            raise
        self._queues[sequence] = asyncio.Queue()
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        return sequence

    async def updates(self, sequence: Sequence) -> AsyncIterator[Update]:
        """Yield an added sequence's updates; the last one holds the completion. Leaving early aborts it.

        Raises what the engine raised if a step failed; every request that was under way then gets that error.
        """
        queue = self._queues[sequence]
        try:
            finished = False
            while not finished:
                update = await queue.get()
                if isinstance(update, Exception):
                    raise update
                finished = update.completion is not None
                yield update
        finally:
            del self._queues[sequence]
            self._worker.submit(self.engine.abort, sequence)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, sample: int = 0
    ) -> AsyncIterator[Update]:
        """Complete one prompt, yielding an update per token; as Engine.stream."""
        sequence = await self.add(prompt, params, sample=sample)
        async for update in self.updates(sequence):
            yield update

    async def generate(
        self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete a list of prompts; as Engine.generate."""
        each = params_for_each(prompts, params)
        sequences: list[Sequence] = []
        try:
            for i, (prompt, chosen) in enumerate(zip(prompts, each, strict=True)):
                sequences.append(await self.add(prompt, chosen, sample=i))
            return list(await asyncio.gather(*map(self._complete, sequences)))
        finally:
            for sequence in sequences:
                await self.abort(sequence)

    async def abort(self, sequence: Sequence) -> None:
        """End a sequence in any state; whoever reads its updates gets the completion with finish_reason "abort"."""
        await self._call(partial(self.engine.abort, sequence))
        if self._driver is None and self.engine.unfinished:
            self._driver = asyncio.create_task(self._drive())

    async def aclose(self) -> None:
        """End all requests and the worker thread."""
        for sequence in list(self._queues):
            await self.abort(sequence)
        if self._driver is not None:
            await self._driver
        self._worker.shutdown()

    async def _complete(self, sequence: Sequence) -> Completion:
        completion: Completion | None = None
        async for update in self.updates(sequence):
            completion = update.completion
        if completion is None:
            raise RuntimeError(f"sequence {sequence.id} ended without a completion")
        return completion

    async def _drive(self) -> None:
        """Step while there is anything to do, handing each update to its reader."""
        while self.engine.unfinished:
            try:
                updates = await self._call(self.engine.step)
            except Exception as error:  # a failed step must reach every reader, whatever it was
                for sequence, queue in self._queues.items():
                    queue.put_nowait(error)
                    self.engine.abort(sequence)
                break
            for update in updates:
                if update.sequence in self._queues:
                    self._queues[update.sequence].put_nowait(update)
        self._driver = None

    def _abort_orphan(self, adding: asyncio.Future[Sequence]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self._worker.submit(self.engine.abort, adding.result())

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

"""AsyncEngine: the same engine for asyncio. One worker thread does all engine work; nothing blocks the event loop."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from .carried import Carried
from .config import SamplingParams
from .draft import Drafter
from .engine import Engine
from .errors import ConfigError, RequestError
from .prompt import Prompt, pair_with_params
from .sequence import Completion, Sequence
from .stream import Update, without_error

__all__ = ["AsyncEngine"]

T = TypeVar("T")


class _News(NamedTuple):
    """An Update without its sequence."""

    token_ids: array[int]
    text: str
    text_tokens: int
    completion: Completion | None


class AsyncEngine:
    """Asynchronous twins of Engine's methods. Wrap an engine once, then use it only through the wrapper.

    Requests of different tasks run in the same steps, which run by themselves while there is work. Cancelling a task
    that waits for a request aborts that request. Weights are updated on the engine itself, while nothing is under way.
    """

    def __init__(self, engine: Engine) -> None:
        """Raises ConfigError for an engine of several ranks, as the order of its calls is not the same on all."""
        if engine.parallel is not None:
            raise ConfigError(
                f"this engine is one of {engine.parallel.size} ranks, which must get the same calls in the same order, "
                "and tasks run in any order; use the engine's own methods, or one rank"
            )
        self.engine = engine
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="palimpsest")
        # Weak: a sequence that nobody can read any more takes its queue along. So no queue may hold a sequence.
        self._queues: WeakKeyDictionary[Sequence, asyncio.Queue[_News | Exception]] = WeakKeyDictionary()
        self._being_read: WeakSet[Sequence] = WeakSet()
        self._aborts: set[asyncio.Future[None]] = set()  # the event loop itself keeps no reference to a task
        self._driver: asyncio.Task[None] | None = None
        self._closing = self._closed = False

    async def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        turn: int = 0,
        is_open: bool = False,
        drafter: Drafter | None = None,
        keep_kv: bool = False,
        carried: Carried | None = None,
    ) -> Sequence:
        """Queue a prompt, as Engine.add; read its updates from `updates`. From then on the drafter is the engine's."""
        self._refuse_when_closing()
        add = partial(
            self.engine.add,
            prompt,
            params,
            sample=sample,
            turn=turn,
            is_open=is_open,
            drafter=drafter,
            keep_kv=keep_kv,
            carried=carried,
        )
        adding = asyncio.ensure_future(self._call(add))
        try:
            sequence = await asyncio.shield(adding)
        except asyncio.CancelledError:
            # The worker may have queued it already, and nobody will ever read it.
            adding.add_done_callback(self._abort_orphan)
            raise
        self._refuse_when_closing()
        self._queues[sequence] = asyncio.Queue()
        self._wake()
        return sequence

    async def extend(self, sequence: Sequence, ids: Iterable[int]) -> None:
        """Append token ids to an open sequence's prompt, as Engine.extend."""
        await self._call(partial(self.engine.extend, sequence, ids))
        self._wake()

    async def close(self, sequence: Sequence, *, drafter: Drafter | None = None) -> None:
        """End an open sequence's prompt, as Engine.close."""
        await self._call(partial(self.engine.close, sequence, drafter=drafter))
        self._wake()

    async def abort(self, sequence: Sequence) -> None:
        """End a sequence in any state; whoever reads its updates gets the completion with finish_reason "abort"."""
        await self._call(partial(self.engine.abort, sequence))
        self._wake()

    async def updates(self, sequence: Sequence) -> AsyncGenerator[Update, None]:
        """Yield an added sequence's updates, once; the last one holds the completion. Leaving early aborts it.

        Raises RequestError if it ends in an error of its own, and what the engine raised if a whole step failed: every
        request that was under way then gets that error.
        """
        queue = self._queues.get(sequence)
        if queue is None or sequence in self._being_read:
            raise RequestError(f"sequence {sequence.id} was not added here, or its updates are read by somebody else")
        self._being_read.add(sequence)
        try:
            finished = False
            while not finished:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                update = Update(sequence, *news)
                if update.completion is not None:
                    without_error(update.completion, f"sequence {sequence.id}")
                    finished = True
                yield update
        finally:
            del self._queues[sequence]
            if not sequence.finished:
                self._abort_later(sequence)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, sample: int = 0
    ) -> AsyncIterator[Update]:
        """Complete one prompt, yielding an update per token; as Engine.stream."""
        sequence = await self.add(prompt, params, sample=sample)
        async with aclosing(self.updates(sequence)) as updates:
            async for update in updates:
                yield update

    async def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete a list of prompts; as Engine.generate."""
        sequences: list[Sequence] = []
        try:
            for i, (prompt, chosen) in enumerate(pair_with_params(prompts, params)):
                sequences.append(await self.add(prompt, chosen, sample=i))
            return list(await asyncio.gather(*map(self._complete, sequences)))
        finally:
            for sequence in sequences:
                if not sequence.finished:
                    self._abort_later(sequence)

    async def aclose(self) -> None:
        """End all requests and the worker thread. Readers still get their last updates; new requests are refused."""
        if self._closed:
            return
        self._closing = True
        # The worker takes its calls in order, so this comes after every request that is still being added.
        await self._call(self.engine.abort_all)
        self._wake()
        while self._driver is not None:
            await self._driver
            self._wake()
        self._closed = True
        self._worker.shutdown(wait=False)

    async def _complete(self, sequence: Sequence) -> Completion:
        completion: Completion | None = None
        async for update in self.updates(sequence):
            completion = update.completion
        if completion is None:
            raise RuntimeError(f"sequence {sequence.id} ended without a completion")
        return completion

    def _wake(self) -> None:
        """Let steps run if there is anything to do and nobody runs them."""
        if self._driver is None and self.engine.has_work:
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        """Step while there is anything to do, handing each update to its reader."""
        try:
            while self.engine.has_work:
                for update in await self._call(self.engine.step):
                    if update.sequence in self._queues:
                        self._queues[update.sequence].put_nowait(
                            _News(update.token_ids, update.text, update.text_tokens, update.completion)
                        )
        except Exception as error:  # whatever made a step fail must reach every reader
            for sequence, queue in list(self._queues.items()):
                queue.put_nowait(error)
                await self._call(partial(self.engine.abort, sequence))
        finally:
            self._driver = None
        self._wake()  # for what was added while the failed step was being told

    def _abort_later(self, sequence: Sequence) -> None:
        """Abort from places that can't wait."""
        if not self._closed:
            task = asyncio.ensure_future(self.abort(sequence))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def _abort_orphan(self, adding: asyncio.Future[Sequence]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self._abort_later(adding.result())  # a finished one too: it may keep its KV

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise RequestError("the AsyncEngine is closed; make a new one")

    async def _call(self, function: Callable[[], T]) -> T:
        if self._closed:
            self._refuse_when_closing()
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

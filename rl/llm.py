"""LLM: the model in the hands of an agent. Every call is a turn of its trajectory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..engine.config import SamplingParams
from ..engine.errors import RequestError
from ..engine.prompt import Prompt, prompt_ids, segments_of
from ..engine.reading import Request, Turn
from ..engine.sequence import Segment
from ..engine.tokenizer import Tokenizer
from .chat import Reply, chat_segments

if TYPE_CHECKING:
    from .agent_loop import AgentLoop

__all__ = ["LLM"]


class LLM:
    """One agent's access to the engine.

    Calls are numbered in the order in which they are made, and the number is part of the key of their random numbers:
    when the answers come, and what else the engine does, changes nothing. An agent that works on several things side by
    side, where that order may vary, gives its calls numbers of its own (`turn`).

    tokenizer: of the model.
    """

    def __init__(self, loop: AgentLoop, sampling: SamplingParams, sample: int) -> None:
        """Made by FunctionAgent. sample: the sample index of the random streams."""
        self.tokenizer: Tokenizer = loop.engine.tokenizer
        self._loop, self._sampling, self._sample = loop, sampling, sample
        self._numbers: set[int] = set()
        self._taken: dict[int, tuple[Turn, int]] = {}

    @property
    def turns(self) -> list[Turn]:
        """The calls that were answered, by number."""
        return [self._taken[index][0] for index in sorted(self._taken)]

    @property
    def limits(self) -> list[int]:
        """max_tokens of each of `turns`."""
        return [self._taken[index][1] for index in sorted(self._taken)]

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = None,
        stop: str | tuple[str, ...] | None = None,
        turn: int | None = None,
    ) -> Reply:
        """Answer a conversation of {"role", "content"}. A Reply as content stands there by its own ids.

        max_tokens, stop: in place of those of the agent's sampling. turn: number of the call, by default that after the
        last. Raises RequestError for messages that are none and a number that was there, WindowError for a conversation
        that doesn't fit, ConfigError for limits that are none.
        """
        prompt = chat_segments(messages, self.tokenizer)
        return await self.complete(prompt, max_tokens=max_tokens, stop=stop, turn=turn)

    async def complete(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | tuple[str, ...] | None = None,
        turn: int | None = None,
    ) -> Reply:
        """Go on with a prompt: ids, segments (as TokenTemplate.fill makes them) or text. The rest: see `chat`."""
        changes = {"max_tokens": max_tokens, "stop": stop}
        given = {name: value for name, value in changes.items() if value is not None}
        params = dataclasses.replace(self._sampling, **given)  # type: ignore[arg-type]
        ids = prompt_ids(prompt, self.tokenizer, self._loop.engine.model.config.vocab_size)
        segments = segments_of(prompt) or [Segment("prompt", ids)]
        request = Request("call", self._number(turn), segments, params)
        answered = Turn.of(request, await self._loop.respond(self, request, self._sample))
        self._taken[request.index] = (answered, params.max_tokens)
        return Reply(answered)

    def _number(self, turn: int | None) -> int:
        number = max(self._numbers, default=-1) + 1 if turn is None else turn
        if number in self._numbers:
            raise RequestError(f"this agent has made a call with turn={turn} already; give each another number")
        self._numbers.add(number)
        return number

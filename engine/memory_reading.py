"""MemoryReading: one reading of the MemAgent method as a state machine. It never touches the engine."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from .errors import RequestError
from .reading import Chunks, Reading, ReadingCounters, Request, Turn, TurnStarted
from .siblings import Siblings
from .templates import Slot
from .thinking import ThinkingCut, after_thinking

if TYPE_CHECKING:
    from .memory_agent import MemoryAgent

__all__ = ["MemoryReading", "memory_ids"]


class MemoryReading:
    """One reading: `next` says what to ask, `record` takes the turn that came of it.

    memory: int32 ids of the memory that holds now. counters: what it cost so far. chunk_tokens: tokens read per turn.
    """

    def __init__(self, agent: MemoryAgent, question: array[int], chunks: Chunks, siblings: Siblings) -> None:
        """Made by MemoryAgent.open. question: int32 ids. siblings: shared by the readings of a group."""
        self.siblings = siblings
        self._agent = agent
        self._question = question
        self._chunks = chunks
        self._chunk = array("i")
        self._turns: list[Turn] = []
        self._answer: str | None = None
        self._cut = ThinkingCut(agent.tokenizer)
        self.chunk_tokens = chunks.size
        self.memory = agent.first_memory
        self.counters = ReadingCounters()

    def next(self) -> Request | None:
        """The next turn's request, or None once the answer is there. Pulls one chunk; call it once per turn."""
        if self._answer is not None:
            return None
        self._chunk = next(self._chunks, array("i"))
        self._cut = ThinkingCut(self._agent.tokenizer)
        return self._request(self.counters.turns, self._chunk, self.memory)

    def following(self) -> Request:
        """The request after the update turn under way, with an empty memory. Looks one chunk ahead in the document."""
        return self._request(self.counters.turns + 1, self._chunks.peek(), array("i"))

    def memory_so_far(self, written: array[int]) -> array[int]:
        """What the running update turn has written of its memory; more may follow, or with thinking a new start.

        written: int32, the response so far as far as it belongs to its text (Update.text_tokens).
        """
        return self._cut.memory(written) if self._agent.config.strip_thinking else written

    def record(self, turn: Turn) -> None:
        """Go on with the turn that `next` asked for: its response becomes the memory, or the answer."""
        self.counters.add(turn)
        if self._agent.config.keep_turns:
            self._turns.append(turn)
        if turn.kind == "final":
            self._answer = turn.text
            return
        self.memory = memory_ids(turn)
        if self._agent.config.strip_thinking:
            self.memory = after_thinking(self.memory, self._agent.tokenizer)
        self.counters.document_tokens += len(self._chunk)
        self.counters.truncated_memories += turn.finish_reason == "length"
        self.counters.empty_memories += not self.memory

    @property
    def carries(self) -> bool:
        """Whether a memory's KV is carried from the turn that wrote it to the next."""
        return self._agent.config.memory_kv == "carried"

    @property
    def memory_text(self) -> str:
        return self._agent.tokenizer.decode(self.memory)

    def answered(self) -> Reading:
        """The finished reading. Raises RequestError while there are turns to take."""
        if self._answer is None:
            raise RequestError("this reading has no answer yet; MemoryAgent.run takes its turns")
        return Reading(self._answer, self.memory_text, self._turns, self.counters)

    def started(self, request: Request) -> TurnStarted:
        """The event that a request was handed to the engine."""
        return TurnStarted(
            kind=request.kind,
            index=request.index,
            prompt_tokens=len(request.prompt_ids),
            chunk_tokens=len(self._chunk),
            document_tokens=self.counters.document_tokens,
            tokens_ahead=self._chunks.tokens_ahead,
        )

    def _request(self, index: int, chunk: array[int], memory: array[int]) -> Request:
        """An update turn for a chunk, the final turn where there is none."""
        agent = self._agent
        values = {Slot.PROBLEM: self._question, Slot.MEMORY: memory, Slot.CHUNK: chunk}
        if chunk:
            return Request("update", index, agent.update_prompt.fill(values), agent.update_params)
        return Request("final", index, agent.final_prompt.fill(values), agent.final_params)


def memory_ids(turn: Turn) -> array[int]:
    """The memory that an update turn wrote, int32: its own ids, never re-tokenised, white space kept.

    They end before the first EOS or stop id, or with the last token wholly before the stop string. A special token that
    the model drew earlier stays, as in MemAgent's training: in the next prompt it is the control token that it was.
    """
    return turn.response_ids[: turn.text_tokens]

"""Outbox: responses under way as text, and the updates about them that nobody has taken yet."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator

from .detokenizer import TextStream
from .sequence import Completion, Sequence
from .stream import Update

__all__ = ["Outbox"]


class Outbox:
    """texts: of each sequence whose end was not told yet. updates: told and not taken, in order."""

    def __init__(self, finish: Callable[[Sequence, str], None]) -> None:
        """finish: ends a sequence that goes on, for a reason; Scheduler.finish."""
        self.texts: dict[Sequence, TextStream] = {}
        self.updates: list[Update] = []
        self._finish = finish

    def tell(self, sequence: Sequence) -> None:
        """Add an update with what is new of a response: as text, and up to the stop string that ends it here."""
        stream = self.texts[sequence]
        told = stream.count
        ids = _untold(sequence, stream)
        # The id that ended a response (EOS, a stop id) is not part of its text.
        text = "".join(_push(stream, ids[:-1] if sequence.finish_reason == "stop" else ids))
        if stream.stopped is not None:
            ids = ids[: stream.count - told]
            self._end_at_stop_string(sequence, stream.count)
        completion = None
        if sequence.finished:
            text += stream.finish()
            if stream.stopped is not None:  # the last token allowed may have completed the stop string
                sequence.finish_reason = "stop"
            del self.texts[sequence]
            completion = _completion(sequence, stream)
        self.updates.append(Update(sequence, ids, text, stream.tokens_before_stop, completion))

    def tell_rest(self) -> None:
        """Tell of every sequence of which something is untold."""
        for sequence, stream in list(self.texts.items()):
            if sequence.finished or _untold(sequence, stream):
                self.tell(sequence)

    def take(self) -> list[Update]:
        """All updates, which are the taker's from now on."""
        updates, self.updates = self.updates, []
        return updates

    def forget(self, sequence: Sequence) -> None:
        """Drop the updates of a sequence of which nobody will read."""
        self.updates = [update for update in self.updates if update.sequence is not sequence]

    def _end_at_stop_string(self, sequence: Sequence, length: int) -> None:
        """End a response with the token that completed a stop string; a draft may have brought more, or another end."""
        self._finish(sequence, "stop")
        sequence.error = None
        sequence.cut_response(length)


def _untold(sequence: Sequence, stream: TextStream) -> array[int]:
    """The ids of a response that no update has told yet."""
    return sequence.tokens[sequence.prompt_length + stream.count :]


def _push(stream: TextStream, ids: array[int]) -> Iterator[str]:
    """The new text of each id, up to the one that completes a stop string."""
    for token in ids:
        if stream.stopped is not None:
            return
        yield stream.push(token)


def _completion(sequence: Sequence, stream: TextStream) -> Completion:
    params = sequence.params
    return Completion(
        text=stream.text,
        token_ids=sequence.response,
        text_tokens=stream.tokens_before_stop,
        finish_reason=sequence.finish_reason or "",
        logprobs=sequence.logprobs,
        top_logprobs=sequence.top_logprobs if params.top_logprobs else None,
        prompt_logprobs=sequence.prompt_logprobs if params.prompt_logprobs else None,
        counters=sequence.counters,
        seconds=time.perf_counter() - sequence.started,
        error=sequence.error,
    )

"""An engine without a model, for tests of what drives engines: real tokenizer and detokeniser, scripted responses."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from palimpsest.engine.acceptance import StepCost
from palimpsest.engine.config import EngineConfig, SamplingParams
from palimpsest.engine.detokenizer import TextStream
from palimpsest.engine.sequence import Completion, Segment, Sequence, Status
from palimpsest.engine.tokenizer import Tokenizer


@dataclass
class Update:
    sequence: Sequence
    token_ids: array[int]
    text: str
    text_tokens: int
    completion: Completion | None


class ScriptedEngine:
    """One token per step for each sequence, from `respond(sequence)`: ids that end with an EOS or at max_tokens.

    pool_tokens: what its KV pool would hold; None for a whole window.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        respond: Callable[[Sequence], Iterable[int]],
        window: int = 4096,
        pool_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.drafts, self.step_cost = False, StepCost.of_weights(32)
        self.config = EngineConfig(open_prompt=False)
        self.window = window
        self.longest = window if pool_tokens is None else min(window, pool_tokens)
        self.model_path = "scripted"
        self.weights = "of the script"
        self.added: list[tuple[Sequence, list[Segment]]] = []
        self.aborted: list[Sequence] = []
        self._respond = respond
        self._live: dict[Sequence, tuple[list[int], TextStream]] = {}
        self._undelivered: list[Update] = []

    @property
    def unfinished(self) -> bool:
        return bool(self._live or self._undelivered)

    def add(
        self,
        prompt: list[Segment],
        params: SamplingParams,
        *,
        sample: int = 0,
        turn: int = 0,
        drafter: None = None,
        keep_kv: bool = False,
        carried: None = None,
    ) -> Sequence:
        ids = array("i", [token for segment in prompt for token in segment.ids])
        sequence = Sequence(len(self.added), ids, params, sample, turn, prompt_length=len(ids))
        self.added.append((sequence, prompt))
        self._live[sequence] = (list(self._respond(sequence)), TextStream(self.tokenizer.decode, params.stop))
        return sequence

    def step(self) -> list[Update]:
        updates, self._undelivered = self._undelivered, []
        return updates + [self._advance(sequence) for sequence in list(self._live)]

    def abort(self, sequence: Sequence) -> None:
        if not sequence.finished:
            self.aborted.append(sequence)
            self._undelivered.append(self._end(sequence, array("i"), "", "abort"))

    def step_for(self, own: list[Sequence]) -> list[Update]:
        mine: list[Update] = []
        for update in self.step():
            (mine if update.sequence in own else self._undelivered).append(update)
        return mine

    @contextmanager
    def aborting(self, sequences: list[Sequence]) -> Iterator[None]:
        try:
            yield
        finally:
            for sequence in sequences:
                self.abort(sequence)
            self._undelivered = [update for update in self._undelivered if update.sequence not in sequences]

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.model_path,
            "weights": self.weights,
            "tokenizer": self.tokenizer.fingerprint(),
            "window": self.window,
        }

    def _advance(self, sequence: Sequence) -> Update:
        script, stream = self._live[sequence]
        token = script.pop(0)
        ids = array("i", [token])
        sequence.tokens.append(token)
        sequence.logprobs.append(-float(token))
        if token in self.tokenizer.eos_ids or token in sequence.params.stop_ids:
            return self._end(sequence, ids, "", "stop")
        text = stream.push(token)
        if stream.stopped is not None:
            return self._end(sequence, ids, text, "stop")
        if sequence.response_length == sequence.params.max_tokens:
            return self._end(sequence, ids, text, "length")
        return Update(sequence, ids, text, stream.tokens_before_stop, None)

    def _end(self, sequence: Sequence, ids: array[int], text: str, reason: str) -> Update:
        _, stream = self._live.pop(sequence)
        text += stream.finish()
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        sequence.counters.prefilled_tokens = sequence.prompt_length
        sequence.counters.decode_steps = sequence.response_length
        seconds = time.perf_counter() - sequence.started
        completion = Completion(
            text=stream.text,
            token_ids=sequence.response,
            text_tokens=stream.tokens_before_stop,
            finish_reason=reason,
            logprobs=sequence.logprobs,
            top_logprobs=None,
            prompt_logprobs=None,
            counters=sequence.counters,
            seconds=seconds,
        )
        return Update(sequence, ids, text, stream.tokens_before_stop, completion)

"""An engine without a model, for tests of what drives engines: real tokenizer and detokeniser, scripted responses."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from palimpsest.engine.acceptance import StepCost
from palimpsest.engine.config import EngineConfig, SamplingParams
from palimpsest.engine.detokenizer import TextStream
from palimpsest.engine.outbox import Outbox
from palimpsest.engine.sequence import Segment, Sequence, Status
from palimpsest.engine.stream import Update
from palimpsest.engine.tokenizer import Tokenizer


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
        self._scripts: dict[Sequence, list[int]] = {}
        self._outbox = Outbox(self._finish)

    @property
    def unfinished(self) -> bool:
        return bool(self._scripts or self._outbox.updates)

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
        self._scripts[sequence] = list(self._respond(sequence))
        self._outbox.texts[sequence] = TextStream(self.tokenizer.decode, params.stop)
        return sequence

    def step(self) -> list[Update]:
        for sequence in list(self._scripts):
            self._advance(sequence)
        return self._outbox.take()

    def abort(self, sequence: Sequence) -> None:
        if not sequence.finished:
            self.aborted.append(sequence)
            self._finish(sequence, "abort")
            self._outbox.tell(sequence)

    def step_for(self, own: list[Sequence]) -> list[Update]:
        mine: list[Update] = []
        for update in self.step():
            (mine if update.sequence in own else self._outbox.updates).append(update)
        return mine

    @contextmanager
    def aborting(self, sequences: list[Sequence]) -> Iterator[None]:
        try:
            yield
        finally:
            for sequence in sequences:
                self.abort(sequence)
                self._outbox.forget(sequence)

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.model_path,
            "weights": self.weights,
            "tokenizer": self.tokenizer.fingerprint(),
            "window": self.window,
        }

    def _advance(self, sequence: Sequence) -> None:
        token = self._scripts[sequence].pop(0)
        sequence.tokens.append(token)
        sequence.logprobs.append(-float(token))
        if token in self.tokenizer.eos_ids or token in sequence.params.stop_ids:
            self._finish(sequence, "stop")
        elif sequence.response_length == sequence.params.max_tokens:
            self._finish(sequence, "length")
        self._outbox.tell(sequence)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if sequence.finished:
            return
        del self._scripts[sequence]
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        sequence.counters.prefilled_tokens = sequence.prompt_length
        sequence.counters.decode_steps = sequence.response_length

"""Segment, Sequence and Completion: token ids with their pages and sampling state. Nothing here knows of documents."""

from __future__ import annotations

import enum
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .config import SamplingParams
from .errors import RequestError

if TYPE_CHECKING:
    from .carried import Carried
    from .draft import Drafter

__all__ = ["Completion", "Counters", "DraftCounters", "Segment", "Sequence", "Status", "TokenLogprob", "joined"]


@dataclass(frozen=True)
class Segment:
    """A named piece of a prompt: "head", "problem", "memory", "chunk", "tail" and the like. ids: int32 token ids.

    Raises RequestError for ids of another type: pages, drafts and kernels read them where they lie.
    """

    name: str
    ids: array[int]

    def __post_init__(self) -> None:
        if not isinstance(self.ids, array) or self.ids.typecode != "i":
            kind = f"array({self.ids.typecode!r})" if isinstance(self.ids, array) else type(self.ids).__name__
            raise RequestError(f"the ids of segment {self.name!r} must be array('i', ids), got {kind}")


def joined(segments: Iterable[Segment]) -> array[int]:
    """The ids of some segments, one after the other."""
    ids = array("i")
    for segment in segments:
        ids.extend(segment.ids)
    return ids


class Status(enum.Enum):
    """Where a sequence stands. WAITING may hold no pages; RUNNING may; FINISHED does until its KV is carried on."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprob:
    """One of the likeliest tokens at a position, with its log-probability in nats."""

    token_id: int
    logprob: float


@dataclass
class DraftCounters:
    """What came of the drafts of one source: how many were verified, their tokens, and those that were drawn indeed."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def run_length(self) -> float:
        """Accepted tokens per draft, the mean."""
        return self.accepted / self.drafts if self.drafts else 0.0

    def add(self, proposed: int, accepted: int) -> None:
        self.drafts += 1
        self.proposed += proposed
        self.accepted += accepted

    def __add__(self, other: DraftCounters) -> DraftCounters:
        return DraftCounters(self.drafts + other.drafts, self.proposed + other.proposed, self.accepted + other.accepted)


@dataclass
class Counters:
    """What a response cost.

    prompt_tokens: length of the prompt. cached_tokens: of those, taken from resident pages at the first admission.
    prefilled_tokens: prompt tokens computed; prefilled_ahead: of those, while the prompt was open.
    recomputed_tokens: tokens computed though a page had held them before. decode_steps: steps after the one that read
    the end of the prompt. preemptions: how often its pages were taken away. drafts: by source, what came of drafts.
    carried_tokens: prompt tokens whose KV was moved here from another sequence (approximate, see carried.py).
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    prefilled_ahead: int = 0
    recomputed_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    carried_tokens: int = 0
    drafts: dict[str, DraftCounters] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A finished response.

    text: decoded without special tokens, cut before a stop string. token_ids: every id drawn, the ending one included.
    text_tokens: how many leading ids lie wholly before what ended the response (EOS, stop id, stop string; all at
    "length").
    finish_reason: "stop" (EOS, stop id, stop string), "length" (max_tokens or window), "abort" or "error".
    error: with finish_reason "error" what went wrong with this request alone, such as logits that are not finite.
    logprobs: per token, log-softmax of logits / temperature (of the logits at temperature 0), before all filters, in
    nats.
    top_logprobs: per token the likeliest ones, if asked for. prompt_logprobs: per prompt token from the raw logits,
    the first one None, if asked for. seconds: from `add`, or for an open prompt from `close`, to the end.
    """

    text: str
    token_ids: array[int]
    text_tokens: int
    finish_reason: str
    logprobs: list[float]
    top_logprobs: list[list[TokenLogprob]] | None
    prompt_logprobs: list[float | None] | None
    counters: Counters
    seconds: float
    error: str | None = None


@dataclass(eq=False)
class Sequence:
    """One sequence of tokens being computed. `tokens` = prompt then response; made by Engine.add, changed by the
    scheduler.

        0 ............ computed ............ len(tokens)
        KV in `pages`  |  still to compute

    furthest: the most tokens of it that pages ever held, here or in the prefix index.
    is_open: the prompt may still grow (Engine.extend); nothing is sampled before it is closed.
    sample, turn: with the seed they key the random stream.
    drafter: proposes what the response may be; None: every token takes a step.
    chain: the prefix index's node of each full page of `pages` that the index holds, in order.
    keeps_kv: its pages outlive it, for a prompt that carries them on. carried: KV that this prompt takes over.
    """

    id: int
    tokens: array[int]
    params: SamplingParams
    sample: int = 0
    turn: int = 0
    is_open: bool = False
    drafter: Drafter | None = None
    keeps_kv: bool = False
    carried: Carried | None = None
    prompt_length: int = 0
    computed: int = 0
    furthest: int = 0
    pages: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    started: float = field(default_factory=time.perf_counter)

    @property
    def response(self) -> array[int]:
        """The ids drawn so far, int32."""
        return self.tokens[self.prompt_length :]

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def decoding(self) -> bool:
        """Whether all that is left to compute is of the response."""
        return not self.is_open and self.computed >= self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens that could be computed now: those before carried ones first, in pieces of their own."""
        return (self.exact if self.before_carried else len(self.tokens)) - self.computed

    @property
    def exact(self) -> int:
        """How many leading tokens have, or will have, exact KV: what others may share."""
        return len(self.tokens) if self.carried is None else self.carried.first

    @property
    def before_carried(self) -> bool:
        """Whether carried tokens lie ahead."""
        return self.carried is not None and self.computed < self.carried.first

    @property
    def first_unscored(self) -> int:
        """Position of the first row whose prompt log-probability is still owed; past the end when none is."""
        if self.params.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_length:
            return len(self.prompt_logprobs) - 1
        return len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def pass_carried(self) -> None:
        """Go on behind the carried tokens where all before them is computed."""
        if self.carried is not None and self.computed == self.carried.first:
            self.computed = self.carried.end
            self.counters.carried_tokens = self.carried.end - self.carried.first

    def append_prompt(self, ids: Iterable[int]) -> None:
        """Let the prompt of an open sequence grow."""
        self.tokens.extend(ids)
        self.prompt_length = len(self.tokens)
        self.counters.prompt_tokens = self.prompt_length

    def cut_response(self, length: int) -> None:
        """Forget all of the response beyond its first `length` tokens."""
        del self.tokens[self.prompt_length + length :]
        del self.logprobs[length:], self.top_logprobs[length:]

"""Scheduler: what the next step computes. Pure Python, no tensors; it never calls the runner, nor the runner it.

Sequences in their response go first, with their drafts, then prefill pieces, then newly admitted prompts, all within
one token budget; residents.py says who gets places and pages. Open sequences are work ahead of time: they run on the
tokens that closed ones leave. Drafts get what pages are left in the end.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import eq

from .draft import Draft
from .errors import RequestError, WindowError
from .kv_cache import PagePool
from .plan import Plan
from .residents import Residents
from .sequence import DraftCounters, Sequence, Status
from .step import Span, SpanResult, Step

__all__ = ["Scheduler"]

# The order of the running sequences in a step.
RANKS = RESPONSE, PROMPT, OPEN_PROMPT = range(3)


class Scheduler(Residents):
    """The residents, and what each step computes for them.

    window: most tokens of prompt + response. eos_ids: ids that end a response unless its params ignore them.
    """

    def __init__(
        self, pool: PagePool, *, max_step_tokens: int, max_sequences: int, window: int, eos_ids: tuple[int, ...]
    ) -> None:
        super().__init__(pool, max_sequences)
        self.max_step_tokens, self.window, self.eos_ids = max_step_tokens, window, eos_ids

    @property
    def has_work(self) -> bool:
        """Whether the next step would compute anything; only open sequences can be without work."""
        return any(sequence.pending > 0 for sequence in self.running) or any(map(_is_due, self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. RequestError if it could never run, even alone; WindowError if it is too long."""
        if not sequence.tokens and not sequence.is_open:
            raise RequestError("the prompt is empty; give at least one token (or open the sequence and extend it)")
        if sequence.is_open and sequence.params.prompt_logprobs:
            raise RequestError("prompt_logprobs can't be asked for an open sequence; add the whole prompt at once")
        self._require_room(sequence, len(sequence.tokens))
        self._take_over(sequence)
        sequence.append_prompt(())
        if sequence.params.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        self.waiting.append(sequence)

    def extend(self, sequence: Sequence, ids: Iterable[int]) -> None:
        """Let an open sequence's prompt grow. RequestError if it is closed or finished, WindowError if it is full."""
        self._require_open(sequence)
        ids = array("i", ids)
        self._require_room(sequence, len(sequence.tokens) + len(ids))
        sequence.append_prompt(ids)

    def close(self, sequence: Sequence) -> None:
        """End an open sequence's prompt: from now on its response is drawn."""
        self._require_open(sequence)
        if not sequence.tokens:
            raise RequestError(
                "an open sequence can't be closed while its prompt is empty; extend it first, or abort it"
            )
        sequence.is_open = False
        sequence.started = time.perf_counter()
        if sequence.computed == len(sequence.tokens):
            self._rewind(sequence)

    def schedule(self) -> Step:
        """Decide the next step, moving sequences between waiting and running. Commit it before the next call."""
        plan = Plan(self.max_step_tokens)
        for rank in RANKS:
            for sequence in list(self.running):
                if sequence.status is Status.RUNNING and _rank(sequence) == rank:
                    self._continue(sequence, plan)
            if rank == RESPONSE:
                self._draft_responses(plan)
        self._admit(plan)
        if not plan.lengths and self.has_work:
            self._make_way(plan)
        self._house_drafts(plan)
        return plan.step()

    def settle(self, step: Step) -> None:
        """Enter what is known of a step as soon as it is under way: the tokens of spans without a draft are committed,
        full pages known. Between `schedule` and `commit`; who reads the pages does so in a later step.
        """
        for span in step.spans:
            if not span.draft:
                self._advance(span)

    def commit(self, step: Step, results: Seq[SpanResult]) -> None:
        """Enter the results of a step that `settle` has seen: responses become longer or finished, what of a draft was
        drawn is committed.
        """
        for span, result in zip(step.spans, results, strict=True):
            if not span.wanted:
                continue
            sequence = span.sequence
            sequence.prompt_logprobs.extend(result.prompt_logprobs)
            reason = self._append(sequence, result)
            if result.error is not None and reason is None:
                sequence.error, reason = result.error, "error"
            elif span.draft:
                self._advance(span)
            if reason is not None:
                self.finish(sequence, reason)

    def recover(self, sequences: Iterable[Sequence]) -> None:
        """After a step that failed anywhere: all unfinished sequences wait again, in order, and no page holds anything.

        A token whose log-probability was not entered yet is drawn again.
        """
        self._begin_again(sorted((s for s in sequences if not s.finished), key=lambda s: s.id))
        for sequence in list(self.waiting):
            sequence.cut_response(len(sequence.logprobs))
            reason = self._ending(sequence)
            if reason is not None:
                self.finish(sequence, reason)

    def _require_open(self, sequence: Sequence) -> None:
        if sequence.finished:
            raise RequestError(f"sequence {sequence.id} has finished ({sequence.finish_reason}); add a new one")
        if not sequence.is_open:
            raise RequestError(f"sequence {sequence.id} is closed; only a sequence added with is_open=True can grow")

    def _require_room(self, sequence: Sequence, prompt: int) -> None:
        if prompt >= self.window:
            raise WindowError(
                f"the prompt has {prompt} tokens and the window holds {self.window} with at least one of the response; "
                "shorten the prompt or raise EngineConfig.max_context"
            )
        longest = min(prompt + sequence.params.max_tokens, self.window)
        capacity = self.pool.num_pages * self.pool.page_size
        if longest > capacity:
            raise WindowError(
                f"prompt and response may reach {longest} tokens and the KV pool holds {capacity}; "
                "lower max_tokens, or raise EngineConfig.kv_bytes or kv_share"
            )

    def _continue(self, sequence: Sequence, plan: Plan) -> None:
        """Give a running sequence as much of its pending tokens as the budget allows."""
        length = max(min(sequence.pending, plan.budget), 0)
        if not self._house(sequence, sequence.computed + length, plan):
            return
        if sequence.decoding:
            plan.take(sequence, length)
        else:
            self._prefill(sequence, plan)

    def _prefill(self, sequence: Sequence, plan: Plan) -> None:
        """Take a prefill piece; the last one brings a draft. If there is no room for both, the piece before is cut.

        So the step that reads the end of a prompt may give the whole response.
        """
        pending = sequence.pending
        draft = None
        if 0 < pending <= plan.budget:
            draft = self._propose(sequence, plan.budget - 1 if pending == 1 else self.max_step_tokens - 1)
        if draft is None:
            plan.take(sequence, min(pending, plan.budget))
        elif pending + len(draft.ids) > plan.budget:
            plan.take(sequence, pending - 1)
        else:
            plan.take(sequence, pending)
            plan.add(sequence, draft)

    def _draft_responses(self, plan: Plan) -> None:
        """Draft for the sequences in their response, once each of them has its token of the budget."""
        width = len(plan.lengths)
        for sequence, length in plan.lengths.items():
            draft = self._propose(sequence, plan.budget, width) if length == sequence.pending else None
            if draft is not None:
                plan.add(sequence, draft)

    def _propose(self, sequence: Sequence, most: int, width: int = 1) -> Draft | None:
        """A draft of at most `most` tokens, and such that the token after it still belongs to the response.

        width: sequences in their response that share the step.
        """
        if sequence.drafter is None or sequence.is_open or sequence.before_carried:
            return None
        left = min(sequence.params.max_tokens - sequence.response_length, self.window - len(sequence.tokens))
        most = min(most, left - 1)
        draft = sequence.drafter.propose(sequence.response, most, width) if most > 0 else None
        return None if draft is None else draft.head(most)

    def _house_drafts(self, plan: Plan) -> None:
        """Give the drafts pages of those that nothing else wants in this step, and cut what finds no place."""
        for sequence, draft in list(plan.drafts.items()):
            end = sequence.computed + plan.lengths[sequence]
            room = (len(sequence.pages) + self.pool.available) * self.pool.page_size - end
            housed = draft.head(room)
            if housed is None:
                del plan.drafts[sequence]
                continue
            plan.drafts[sequence] = housed
            missing = self.pool.pages_for(end + len(housed.ids)) - len(sequence.pages)
            sequence.pages.extend(self.pool.allocate(max(missing, 0)))

    def _admit(self, plan: Plan) -> None:
        """Start waiting sequences while budget, places and pages last: closed ones in order, then open ones."""
        for sequence in sorted(self.waiting, key=lambda sequence: sequence.is_open):
            if not _is_due(sequence):
                continue
            if plan.budget <= 0:
                return
            if self._shares_with_running(sequence):
                continue
            if not self._start(sequence, plan):
                return
            self._prefill(sequence, plan)

    def _make_way(self, plan: Plan) -> None:
        """Nothing can run because open sequences that wait for input hold the pages or places: take them back, last
        first.

        They go to the end of the queue: at its head they would be admitted again, before the one that they make way
        for.
        """
        while self.running and not plan.lengths:
            self._preempt(self.running[-1], plan)
            self.waiting.rotate(-1)
            self._admit(plan)

    def _advance(self, span: Span) -> None:
        """Enter what a span computed: its tokens, and of its draft those that were drawn indeed."""
        self._count(span)
        sequence, end = span.sequence, span.start + len(span.ids)
        accepted = sum(map(eq, span.draft, sequence.tokens[end : end + len(span.draft)]))
        sequence.computed = end + accepted
        if sequence.carried is not None:
            self.let_go(sequence.carried.source)
            sequence.pass_carried()
        sequence.furthest = max(sequence.furthest, sequence.computed)
        self._publish(sequence)
        if span.draft:
            self._record(span, accepted)

    def _record(self, span: Span, accepted: int) -> None:
        """Tell everybody what came of a draft, and give back the pages of what was not drawn."""
        sequence = span.sequence
        sequence.counters.drafts.setdefault(span.source, DraftCounters()).add(len(span.draft), accepted)
        if sequence.drafter is not None:
            sequence.drafter.record(Draft(span.draft, span.source), accepted)
        needed = self.pool.pages_for(len(sequence.tokens))
        self.pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def _count(self, span: Span) -> None:
        sequence, end = span.sequence, span.start + len(span.ids)
        again = max(min(end, sequence.furthest) - span.start, 0)
        sequence.counters.recomputed_tokens += again
        new = range(span.start + again, end)
        prefilled = max(min(new.stop, sequence.prompt_length) - new.start, 0)
        sequence.counters.prefilled_tokens += prefilled
        sequence.counters.prefilled_ahead += prefilled * sequence.is_open
        if new.stop > max(new.start, sequence.prompt_length):
            sequence.counters.decode_steps += 1

    def _append(self, sequence: Sequence, result: SpanResult) -> str | None:
        """Let a response grow by what was drawn, up to the token that ends it; -> the reason if one does."""
        for i, token in enumerate(result.token_ids):
            sequence.tokens.append(token)
            if sequence.params.top_logprobs:
                sequence.top_logprobs.append(result.top[i])
            sequence.logprobs.append(result.logprobs[i])
            reason = self._ending(sequence)
            if reason is not None:
                return reason
        return None

    def _ending(self, sequence: Sequence) -> str | None:
        """Why a response is over with its last token, if it is."""
        params, length = sequence.params, sequence.response_length
        last = sequence.tokens[-1] if length else None
        if last in params.stop_ids or (last in self.eos_ids and not params.ignore_eos):
            return "stop"
        if length and (length >= params.max_tokens or len(sequence.tokens) >= self.window):
            return "length"
        return None


def _is_due(sequence: Sequence) -> bool:
    """Whether a waiting sequence should be admitted.

    An open one whose tokens were all computed before, and that gave its pages up since, waits until it grows or closes:
    two such could take each other's pages for ever.
    """
    return sequence.pending > 0 and not (sequence.is_open and sequence.furthest >= len(sequence.tokens))


def _rank(sequence: Sequence) -> int:
    """A running sequence's place in the order of a step."""
    return RESPONSE if sequence.decoding else OPEN_PROMPT if sequence.is_open else PROMPT

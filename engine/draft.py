"""Draft and Drafter: tokens that may follow a response, proposed so that one step verifies many of them.

A draft never changes what is drawn, only how many steps that takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .acceptance import PROBE_EVERY, Acceptance
from .sequence import Segment
from .suffix_automaton import SuffixAutomaton

__all__ = ["Draft", "Drafter"]

REWRITTEN = "memory"  # the segment that the response is expected to repeat from its start
LOOKED_UP = ("chunk",)  # segments that it may copy from
PROMPT, SIBLING, RESPONSE = "prompt", "sibling", "response"

START = 4  # faith in the first place: as if so many tokens had been right
FAITH = 8  # most of it that outlasts a wrong token, which halves it
REACH = 8  # tokens proposed per token of faith
TAIL = 64  # tokens of the response that are read again after a text has grown


@dataclass(frozen=True)
class Draft:
    """Proposed ids (int32, of the model's vocabulary) and where they come from: "memory" and the like."""

    ids: array[int]
    source: str

    def head(self, most: int) -> Draft | None:
        """Its first `most` tokens, None if there are none."""
        if not self.ids or most <= 0:
            return None
        return self if len(self.ids) <= most else Draft(self.ids[:most], self.source)


@dataclass
class _Text:
    """A text that the response may repeat. after: index behind the last of its tokens that was proposed and right."""

    source: str
    ids: array[int]
    after: int = 0


class Drafter:
    """Proposes what may follow one response: the text behind the place where the response is thought to be.

    The place moves on with each token. A token that differs is taken for a replaced one, until the longest end of the
    response that stands elsewhere is longer than the faith in the place.
    """

    def __init__(self, texts: Mapping[str, array[int]], acceptance: Acceptance, *, repeats: bool) -> None:
        """texts: by source, the most promising first. repeats: the response should repeat the first from its start."""
        self._own = len(texts)  # the place in `texts` of the response so far, which may go round in circles
        self._texts = [*(_Text(source, ids) for source, ids in texts.items()), _Text(RESPONSE, array("i"))]
        self._acceptance, self._repeats = acceptance, repeats
        self._siblings: dict[int, int] = {}  # the place of a writer's text in `texts`
        self._restart()

    @classmethod
    def for_prompt(cls, prompt: Iterable[int] | Iterable[Segment], acceptance: Acceptance | None = None) -> Drafter:
        """The drafter of a prompt, given as segments or ids.

        A prompt with a memory and a chunk is expected to give the memory again, with things from the chunk; any other
        one may be quoted. acceptance: that of the turns before, None for a fresh one.
        """
        parts: list[Any] = list(prompt)
        segments = {part.name: part.ids for part in parts if isinstance(part, Segment)}
        if REWRITTEN in segments and all(name in segments for name in LOOKED_UP):
            texts = {name: segments[name] for name in (REWRITTEN, *LOOKED_UP)}
        else:
            texts = {PROMPT: _flat(parts)}
        return cls(texts, Acceptance() if acceptance is None else acceptance, repeats=REWRITTEN in texts)

    def extend(self, writer: int, ids: array[int]) -> None:
        """Sibling number `writer` has written these further ids (int32) of its memory."""
        if writer not in self._siblings:
            self._siblings[writer] = len(self._texts)
            self._texts.append(_Text(SIBLING, array("i")))
            if self._automaton is not None:
                self._automaton.add()
        number = self._siblings[writer]
        self._texts[number].ids.extend(ids)
        if self._automaton is not None:
            self._grow(self._automaton, number, ids)

    def propose(self, response: array[int], limit: int, width: int = 1) -> Draft | None:
        """At most `limit` ids that may follow the response so far (int32); the same ones when it is asked again.

        width: sequences in their response that share the step.
        """
        self._follow(response)
        if self._strayed or self._place >= len(self._texts[self._text].ids):
            self._look_around()
        text = self._texts[self._text]
        opening = self._repeats and not response
        ids = self._following(limit if opening else min(limit, REACH * self._faith))
        if not ids:
            return None
        silence = len(response) - self._drafted
        length = self._acceptance.length(text.source, len(ids), opening=opening, silence=silence, width=width)
        return Draft(ids[:length], text.source) if length else None

    def record(self, draft: Draft, accepted: int) -> None:
        """Learn that the first `accepted` ids of a draft, or of the head of it that there was room for, were drawn."""
        self._acceptance.record(draft.source, len(draft.ids), accepted)
        self._drafted = len(self._seen) + accepted + 1

    def _restart(self) -> None:
        self._seen = self._texts[self._own].ids = array("i")
        self._text = self._place = 0
        self._faith = START if self._repeats else 0
        self._strayed = not self._repeats
        self._drafted = -PROBE_EVERY
        self._automaton: SuffixAutomaton | None = None
        for text in self._texts:
            text.after = 0

    def _follow(self, response: array[int]) -> None:
        """Move the place on with the tokens that came; a response that lost some is followed from its start."""
        if response[: len(self._seen)] != self._seen:
            self._restart()
        text, new = self._texts[self._text], response[len(self._seen) :]
        for token in new:
            if self._place < len(text.ids) and text.ids[self._place] == token:
                self._faith += 1
                text.after = self._place + 1
            else:
                self._faith = min(self._faith, FAITH) // 2
                self._strayed = True
            self._place += 1
            self._seen.append(token)
        if self._automaton is not None and new:
            self._grow(self._automaton, self._own, new)

    def _following(self, most: int) -> array[int]:
        """At most so many ids from the place on; behind the end of the response the same again."""
        ids = self._texts[self._text].ids[self._place : self._place + most]
        if self._text == self._own and ids:
            ids *= -(-most // len(ids))
        return ids[:most]

    def _grow(self, automaton: SuffixAutomaton, number: int, ids: array[int]) -> None:
        """Let the automaton know how a text goes on."""
        automaton.extend(number, ids)
        automaton.advance(self._seen[-TAIL:])

    def _look_around(self) -> None:
        """Go to where the longest end of the response stands, if that says more than the faith in the present place."""
        if self._automaton is None:
            self._automaton = SuffixAutomaton()
            for text in self._texts:
                self._grow(self._automaton, self._automaton.add(), text.ids)
        length, number, place = self._automaton.match()
        if self._place >= len(self._texts[self._text].ids):
            self._faith = 0
        if length <= self._faith:
            return
        text = self._texts[number]
        behind = _end_of(self._seen[-length:], text.ids, text.after)
        self._text, self._faith = number, length
        self._place = behind if place < behind < len(text.ids) else place


def _flat(parts: Iterable[int] | Iterable[Segment]) -> array[int]:
    ids = array("i")
    for part in parts:
        ids.extend(part.ids if isinstance(part, Segment) else (part,))
    return ids


def _end_of(pattern: array[int], ids: array[int], after: int) -> int:
    """Where `pattern` first ends in `ids`, at `after` or behind it; -1 if nowhere."""
    text, wanted, size = ids.tobytes(), pattern.tobytes(), ids.itemsize
    at = text.find(wanted, max(after - len(pattern), 0) * size)
    while at % size and at >= 0:
        at = text.find(wanted, at + 1)
    return at // size + len(pattern) if at >= 0 else -1

"""What of a response is memory when the model thinks first: the ids behind the last </think>."""

from __future__ import annotations

from array import array
from bisect import bisect_left

from .tokenizer import Tokenizer

__all__ = ["ThinkingCut", "after_thinking"]

THINK_END = "</think>"


def after_thinking(ids: array[int], tokenizer: Tokenizer) -> array[int]:
    """The ids wholly after the last </think>; all of them without one. A token that the tag's end shares is left out.

    The tag is looked for in the text, since many vocabularies spell it with its neighbours: "</", "think", ">\\n\\n".
    """
    return ids[_start(ids, tokenizer) :]


class ThinkingCut:
    """Where the memory starts in a response that still grows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._seen = 0
        self._start = 0

    def memory(self, ids: array[int]) -> array[int]:
        """What the ids (int32) of the response so far hold of the memory: nothing before the first tag."""
        new = self._tokenizer.decode(ids[self._seen :], skip_special=False)
        self._seen = len(ids)
        if THINK_END[-1] in new:  # only such a token can complete a tag
            self._start = _start(ids, self._tokenizer)
        return ids[self._start :] if self._start else array("i")


def _start(ids: array[int], tokenizer: Tokenizer) -> int:
    """Index of the first id wholly after the last tag, 0 without one."""

    def tags(length: int) -> int:
        return tokenizer.decode(ids[:length], skip_special=False).count(THINK_END)

    return bisect_left(range(len(ids) + 1), tags(len(ids)), key=tags)

"""TextStream: the text of one response while its tokens arrive, and the place where a stop string ends it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from .errors import RequestError

__all__ = ["TextStream"]

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no UTF-8, so also for a character still incomplete
WINDOW = 16  # tokens decoded at once before the window is cut


class TextStream:
    """Turns token ids into text piece by piece; what it has shown it never takes back.

        decode(ids) = | shown | held | incomplete |

    Two things are held back: characters whose last bytes are still to come, and a tail that may become a stop string.

    Only a window of the last few tokens is decoded at a time. It is cut at a token border where decoding both sides
    apart gives the same text: with a byte-level vocabulary this proves that no character crosses the border. Where no
    such border is near (a decoder that drops leading spaces) the window grows, and the text stays right.

    decode: ids to text, special tokens left out. stop: non-empty strings; of several the one completed first
    counts, and of those that one token completes the one that starts first.
    min_tokens: a stop string counts only when token number min_tokens or a later one completes it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.stopped: str | None = None
        self._decode = decode
        self._stop = stop
        self._min_tokens = min_tokens
        self._window: list[int] = []
        self._limit = WINDOW
        self._base = 0  # characters of the text before the window
        self._settled = 0  # characters of the text that no later token changes
        self._ends = array("q")  # characters of the text up to and including each token
        self._shown: list[str] = []
        self._shown_length = 0
        self._held = ""  # settled, not shown: a proper head of a stop string

    @property
    def text(self) -> str:
        """The settled text so far, cut before the stop string; after `finish` the whole text."""
        return "".join(self._shown) + self._held

    @property
    def count(self) -> int:
        """How many tokens were pushed."""
        return len(self._ends)

    @property
    def tokens_before_stop(self) -> int:
        """How many leading tokens lie wholly before the stop string, or before the place where one may yet start.

        All of them after `finish` when there is none.
        """
        count = len(self._ends)
        while self._stop and count > 0 and self._ends[count - 1] > self._shown_length:
            count -= 1
        return count

    def push(self, token_id: int) -> str:
        """Add a token; returns the new text that is safe to show. Raises RequestError after a stop string."""
        if self.stopped is not None:
            raise RequestError(f"the response has ended at the stop string {self.stopped!r}; it takes no more tokens")
        self._window.append(token_id)
        text = self._decode(self._window)
        self._ends.append(self._base + len(text))
        border = self._border(text) if len(self._window) >= self._limit else 0
        sure = len(self._decode(self._window[:border])) if border else 0
        shown = self._settle(text, max(sure, len(text.rstrip(REPLACEMENT))))
        if border:
            self._base += sure
            del self._window[:border]
        return shown

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens come."""
        if self.stopped is not None:
            return ""
        text = self._decode(self._window)
        shown = self._settle(text, len(text))
        if self.stopped is None:
            shown += self._show(self._held)
            self._held = ""
        return shown

    def _border(self, text: str) -> int:
        """The number of tokens that can leave the window, whose text is `text`; 0 puts the next try off.

        A character has at most three inner byte borders: of four token borders in a row one is clean.
        """
        middle = len(self._window) // 2
        for border in range(middle, middle + 4):
            tail = self._decode(self._window[border:])
            if tail != "" and self._decode(self._window[:border]) + tail == text:
                self._limit = WINDOW
                return border
        self._limit *= 2
        return 0

    def _settle(self, text: str, length: int) -> str:
        """Take the window's `text` as final up to `length`; returns what of it is safe to show."""
        fresh = text[self._settled - self._base : length]
        if fresh == "":
            return ""
        self._settled += len(fresh)
        known = self._held + fresh
        self._held = ""
        start = self._find_stop(known)
        if self.stopped is None:
            start = len(known) - self._length_at_risk(known)
            self._held = known[start:]
        return self._show(known[:start])

    def _find_stop(self, known: str) -> int:
        """Where the earliest stop string starts in `known`, the text not shown; sets `stopped` if there is one.

        None can start before `known`: it would have been held back.
        """
        if len(self._ends) < self._min_tokens:
            return 0
        floor = self._ends[self._min_tokens - 2] - self._shown_length if self._min_tokens >= 2 else 0
        best = len(known)
        for string in self._stop:
            start = known.find(string, max(0, floor - len(string) + 1))
            if 0 <= start < best:
                best, self.stopped = start, string
        return best

    def _length_at_risk(self, known: str) -> int:
        """Length of the longest tail of `known` that is a proper head of a stop string."""
        longest = 0
        for string in self._stop:
            for length in range(min(len(string) - 1, len(known)), longest, -1):
                if known.endswith(string[:length]):
                    longest = length
                    break
        return longest

    def _show(self, text: str) -> str:
        self._shown.append(text)
        self._shown_length += len(text)
        return text

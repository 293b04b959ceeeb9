"""Rewards: how right an answer is. A function of (answer, references) -> number; functions that fail are survived."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import MappingProxyType
from typing import Any

from ..engine.config import _require_int, _require_number
from ..engine.errors import ConfigError
from .failures import Failures
from .reward_pool import Outcome, RewardPool
from .reward_worker import score

__all__ = ["REWARDS", "Reward", "Score", "Scorer", "boxed_exact", "em", "f1", "sub_em", "wait_for_any"]

Reward = Callable[..., float]  # of (answer, references), and extra if it has such a parameter

NOTHING: Mapping[str, Any] = MappingProxyType({})
LONGEST_TIMEOUT = 1e6  # seconds

BOXED_TAIL = 300  # characters of an answer that MemAgent's verifier looks at
MATH_FORM = (  # in this order; both sides have been lowered
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
    ("\\%", ""),
    (" .", " 0."),
    ("{.", "{0."),
    (" ", ""),
)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def boxed_exact(answer: str, references: Sequence[str]) -> float:
    r"""1 if what the last \boxed{...} of the answer's last 300 characters holds is one of the references, else 0.

    MemAgent's training verifier (arXiv 2507.02259, code): lower case, `\boxed x` too, and before any other; both sides
    lose spaces and some LaTeX that changes no value. Punctuation and articles stay, and 1/2 is not 0.5.
    """
    boxed = _last_boxed(answer[-BOXED_TAIL:].lower())
    if boxed is None:
        return 0.0
    given = _math_form(boxed)
    return float(any(_math_form(reference.lower()) == given for reference in references))


def em(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references after SQuAD's normalisation (arXiv 1606.05250, evaluation script)."""
    given = _squad_form(answer)
    return float(any(_squad_form(reference) == given for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """The best F1 of the answer's words with those of a reference, as SQuAD's evaluation script has it."""
    return max(
        (_f1(_squad_form(answer).split(), _squad_form(reference).split()) for reference in references), default=0.0
    )


def sub_em(answer: str, references: Sequence[str]) -> float:
    """1 if a reference stands in the answer, both in SQuAD's form. One way only: a fragment of a reference is wrong."""
    given = _squad_form(answer)
    forms = (_squad_form(reference) for reference in references)
    return float(any(form in given for form in forms if form))


REWARDS: Mapping[str, Reward] = MappingProxyType({"boxed_exact": boxed_exact, "em": em, "f1": f1, "sub_em": sub_em})


class Scorer:
    """Applies a reward; whatever it does, the result is a finite float.

    failures: answers that count 0, by name. "raised": the function did, or ended itself. "result": it returned no
    finite number. "timeout", "died": of the process of a function given by its name.
    """

    def __init__(self, reward: str | Reward, *, timeout: float = 60.0, workers: int = 2) -> None:
        """reward: a name from REWARDS; a function of (answer, references), which runs in this process; or the name of
        one as "module:function", which runs in processes of its own, so that it may hang or crash. A function with a
        parameter `extra` is also given the problem's extra mapping by that name.

        timeout, workers: for functions in processes of their own, seconds for one answer and how many processes.
        Raises ConfigError for anything else, and for a function that can't be found or called.
        """
        _require_number("Scorer", "timeout", timeout, 0.0, LONGEST_TIMEOUT, open_low=True)
        _require_int("Scorer", "workers", workers, 1)
        self._pool = RewardPool(reward, timeout, workers) if isinstance(reward, str) and ":" in reward else None
        if isinstance(reward, str) and reward in REWARDS:
            reward = REWARDS[reward]
        if self._pool is None and not callable(reward):
            raise ConfigError(
                f"reward must be one of {', '.join(REWARDS)}, a function or 'module:function'; got {reward!r}"
            )
        self._reward = reward
        self.failures = Failures("the reward function", "such answers count 0")

    def __call__(self, answer: str, references: Sequence[str], extra: Mapping[str, Any] = NOTHING) -> float:
        """Numbers of any library count as they are, True as 1; a text never does."""
        return self.submit(answer, references, extra).value()

    def submit(self, answer: str, references: Sequence[str], extra: Mapping[str, Any] = NOTHING) -> Score:
        """Begin to score an answer; built-in rewards and functions in this process are done at once."""
        if self._pool is not None:
            return Score(self._pool.submit(answer, references, extra), self.failures)
        future: Future[Outcome] = Future()
        future.set_result(score(self._reward, answer, references, extra))  # type: ignore[arg-type]
        return Score(future, self.failures)

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._pool is not None:
            self._pool.close()


class Score:
    """A reward that may still be in the making. outcome: what comes of it."""

    def __init__(self, outcome: Future[Outcome], failures: Failures) -> None:
        self.outcome, self._failures = outcome, failures

    @property
    def done(self) -> bool:
        return self.outcome.done()

    def value(self) -> float:
        """The reward, waited for; a failure counts 0 and is noted, so ask once."""
        name, given = self.outcome.result()
        if name == "value":
            return float(given)
        self._failures.note(name, given)
        return 0.0

    def cancel(self) -> None:
        """Nobody asks for it any more."""
        self.outcome.cancel()


def wait_for_any(scores: Sequence[Score]) -> None:
    """Wait until one that wasn't there is done."""
    wait([score.outcome for score in scores if not score.done], return_when=FIRST_COMPLETED)


def _last_boxed(text: str) -> str | None:
    r"""What the last \boxed holds; None without one, or when its brace is never closed."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    opening = start + len("\\boxed")
    if start < 0 or not text.startswith("{", opening):
        return None
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[opening + 1 : i]
    return None


def _math_form(text: str) -> str:
    for old, new in MATH_FORM:
        text = text.replace(old, new)
    return text


def _squad_form(text: str) -> str:
    """Lower case, without punctuation, articles and double spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", text).split())


def _f1(given: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0

"""Rewards: how right an answer is. A function of (answer, references) -> number; functions that fail are survived."""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ..engine.errors import ConfigError

__all__ = ["REWARDS", "Reward", "Scorer", "boxed_exact", "em", "f1", "sub_em"]

Reward = Callable[[str, Sequence[str]], float]

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

    failures: answers that it raised for, or returned no finite number for; they count 0. first_failure: why, which is
    also warned of.
    """

    def __init__(self, reward: str | Reward) -> None:
        """reward: a name from REWARDS or a function. Raises ConfigError for anything else."""
        if isinstance(reward, str) and reward in REWARDS:
            reward = REWARDS[reward]
        if not callable(reward):
            raise ConfigError(f"reward must be one of {', '.join(REWARDS)}, or a function; got {reward!r}")
        self._reward = reward
        self.failures = 0
        self.first_failure: str | None = None

    def __call__(self, answer: str, references: Sequence[str]) -> float:
        """Numbers of any library count as they are, True as 1."""
        try:
            given = self._reward(answer, references)
            value = float(given)
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {error}")
        return value if math.isfinite(value) else self._failed(f"it returned {given!r}")

    def _failed(self, why: str) -> float:
        self.failures += 1
        if self.first_failure is None:
            self.first_failure = why
            warnings.warn(f"the reward function failed: {why}; such answers count 0", stacklevel=4)
        return 0.0


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

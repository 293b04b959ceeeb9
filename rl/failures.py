"""Failures: what went wrong in a user's function, counted by name; the run goes on."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["Failures"]


class Failures:
    """counts: how often, by name. first: why, the first time of each name, which is also warned of."""

    def __init__(self, whose: str, consequence: str) -> None:
        """For the warning. whose: "the reward function". consequence: "such answers count 0"."""
        self._whose, self._consequence = whose, consequence
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def note(self, name: str, why: str) -> None:
        """Count one."""
        self.counts[name] += 1
        if name not in self.first:
            self.first[name] = why
            warnings.warn(f"{self._whose} failed ({name}): {why}; {self._consequence}", stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """Both, as plain JSON values."""
        return {"counts": dict(self.counts), "first": dict(self.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.counts, self.first = Counter(state["counts"]), dict(state["first"])

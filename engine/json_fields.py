"""Fields: the keys of a file that somebody else wrote, each checked for type and range as it is read."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from .errors import CheckpointError, PalimpsestError

__all__ = ["Fields", "parse_object"]


def parse_object(content: bytes, place: str, remedy: str) -> dict[str, Any]:
    """The object that JSON text in UTF-8 holds; `place` names it. Raises CheckpointError for anything else."""
    try:
        values = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{place} must hold a JSON object, not {type(values).__name__}; {remedy}")
    return values


class Fields:
    """A mapping read key by key. A key whose value is null counts as absent.

    Every reader returns its default for an absent key, and raises when there is no default or the value is not what the
    reader is for; the message names key, place and remedy.
    """

    def __init__(self, values: object, place: str, remedy: str, error: type[PalimpsestError] = CheckpointError) -> None:
        """place: what a message calls the mapping. remedy: what to do when it is wrong. error: what is raised."""
        self.place, self.remedy, self.error = place, remedy, error
        if not isinstance(values, Mapping):
            raise self.failure(f"{place} must be a mapping of names to values, got {reprlib.repr(values)}")
        self.values = {key: value for key, value in values.items() if value is not None}

    def failure(self, message: str) -> PalimpsestError:
        """The exception that says so and names the remedy."""
        return self.error(f"{message}; {self.remedy}")

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 62) -> int:
        """A whole number in [low, high]; 3.0 and true are none."""
        value = self._value(key, default)
        if not _is_integer(value) or not low <= value <= high:
            raise self._wrong(key, f"a whole number from {low} to {high}")
        return int(value)

    def number(
        self, key: str, default: float | None = None, *, low: float, high: float, open_low: bool = False
    ) -> int | float:
        """A finite number in [low, high], or in (low, high] with `open_low`; an int stays one."""
        value: int | float = self._value(key, default)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not low <= value <= high or (open_low and value == low):
            raise self._wrong(key, f"a number {'above' if open_low else 'from'} {low:g} to {high:g}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """A list of strings."""
        value = self._value(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings")
        return value

    def integers(self, key: str, default: list[int] | None = None) -> list[int]:
        """A list of whole numbers from 0."""
        value = self._value(key, default)
        if not isinstance(value, list) or not all(_is_integer(item) and item >= 0 for item in value):
            raise self._wrong(key, "a list of whole numbers from 0")
        return value

    def part(self, key: str) -> Fields:
        """The mapping under a key, an empty one when the key is absent."""
        return Fields(self._value(key, {}), f"{key!r} in {self.place}", self.remedy, self.error)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise self.failure(f"{self.place} has no {key!r}")
        return value

    def _wrong(self, key: str, allowed: str) -> PalimpsestError:
        return self.failure(f"{key!r} in {self.place} must be {allowed}, got {reprlib.repr(self.values.get(key))}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

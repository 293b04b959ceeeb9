"""Prompt: what a request may be given as, and its token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from .config import SamplingParams
from .errors import RequestError
from .sequence import Segment, joined
from .tokenizer import Tokenizer

__all__ = ["Prompt", "pair_with_params", "prompt_ids", "segments_of"]

Prompt = str | Iterable[int] | Seq[Segment]


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, vocabulary: int) -> array[int]:
    """Token ids of any kind of prompt, int32. Raises RequestError for ids outside the vocabulary and other things."""
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is a str, token ids or segments, got {prompt!r}")
    if isinstance(prompt, array) and prompt.typecode == "i":
        ids = prompt[:]
    else:
        parts = list(prompt)
        segments = [part for part in parts if isinstance(part, Segment)]
        if segments and len(segments) < len(parts):
            raise RequestError("a prompt mixes segments with other things; give a str, token ids or segments only")
        ids = joined(segments) if segments else _as_ids(parts)
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise RequestError(f"token id {wrong} is outside the vocabulary of {vocabulary}")
    return ids


def segments_of(prompt: Prompt) -> list[Segment]:
    """A prompt's segments; none where it was given as text or ids."""
    return [part for part in prompt if isinstance(part, Segment)] if isinstance(prompt, (list, tuple)) else []


def pair_with_params(
    prompts: Iterable[Prompt], params: SamplingParams | Seq[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Each prompt of a list with its SamplingParams. RequestError for a single prompt, or numbers that differ."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise RequestError(f"generate takes a list of prompts, got {prompts!r}; put a single one into a list")
    each = list(prompts)
    if each and isinstance(each[0], int):
        raise RequestError("generate takes a list of prompts; put a single one into a list: generate([prompt])")
    chosen = [params] * len(each) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(chosen) != len(each):
        raise RequestError(f"{len(each)} prompts but {len(chosen)} SamplingParams; give one, or one per prompt")
    return list(zip(each, chosen, strict=True))


def _as_ids(parts: list[Any]) -> array[int]:
    try:
        return array("i", parts)
    except (TypeError, OverflowError) as error:
        raise RequestError(
            f"a prompt is a str, token ids or segments; these are not 32-bit token ids ({error})"
        ) from error

"""tokenizer.json with a part taken out: the tokenizers of plain text and of pieces are made from the whole one.

A definition is the content of a tokenizer.json as the library `tokenizers` itself writes it, with every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["without_added_tokens", "without_prefix"]


def without_added_tokens(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer.json with no added token, neither in its list nor in the model's vocabulary.

    The vocabulary matters: a word-level model, or a BPE that takes whole words first (ignore_merges), finds them there.
    """
    model = dict(definition["model"])
    removed = {token["content"] for token in definition.get("added_tokens") or []} - {model.get("unk_token")}
    model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in removed}
    if model["type"] == "BPE":
        model["merges"] = [merge for merge in model["merges"] if removed.isdisjoint(_tokens_of(merge))]
    return {**definition, "added_tokens": [], "post_processor": None, "model": model}


def _tokens_of(merge: str | list[str]) -> tuple[str, ...]:
    """The two parts of a merge, in either of its spellings, and their product."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return *parts, "".join(parts)


def without_prefix(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer.json without the space that it would put before every text: pieces of a text must not get it.

    Tokenizers made from SentencePiece models do so (Prepend or Metaspace), and some byte-level ones.
    """
    return {
        **definition,
        "normalizer": _without_prepend(definition["normalizer"]),
        "pre_tokenizer": _without_leading_space(definition["pre_tokenizer"]),
    }


def _without_prepend(step: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] != "Sequence":
        return dict(step)
    inner = [_without_prepend(part) for part in step["normalizers"]]
    return {**step, "normalizers": [part for part in inner if part is not None]}


def _without_leading_space(step: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if step is None:
        return None
    if step["type"] == "Sequence":
        return {**step, "pretokenizers": [_without_leading_space(part) for part in step["pretokenizers"]]}
    off: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
    }
    return {**step, **off.get(step["type"], {})}

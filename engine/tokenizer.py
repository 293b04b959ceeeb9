"""Tokenizer: text to ids and back over the `tokenizers` library; plain text never becomes a control token."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from .checkpoint import read_json
from .errors import CheckpointError, RequestError

__all__ = ["LLAMA3_PATTERN", "QWEN2_PATTERN", "Tokenizer"]

BLOCK = 1 << 16  # characters that encode_pieces gathers before it looks for a place to cut

# The splits of Qwen 2 to 3 and of Llama 3. In no alternative does anything but a letter follow a letter, nor anything
# but a number a number.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


class Tokenizer:
    """The tokenizer of a Hugging Face folder. Ids are int32 arrays; nothing is ever truncated or padded."""

    def __init__(
        self, definition: str, settings: Mapping[str, Any], chat_template: str | None, eos_ids: tuple[int, ...]
    ):
        """definition: content of tokenizer.json. settings: of tokenizer_config.json. Users call `load`."""
        self.eos_ids = eos_ids
        self._definition = definition
        self._settings = settings
        self._chat_template = chat_template
        self._full = _build(definition)
        parts = json.loads(definition)
        self._plain = _build(json.dumps(_without_added_tokens(parts), ensure_ascii=False))
        self._words_end_pieces = _words_end_pieces(parts)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it.

        Raises CheckpointError when a file is absent or damaged, or when the model is neither BPE nor word-level.
        """
        place = Path(folder)
        file = place / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{file} is absent; write it once with "
                f"transformers.AutoTokenizer.from_pretrained({str(place)!r}).save_pretrained({str(place)!r})"
            )
        kind = (read_json(file).get("model") or {}).get("type")
        if kind not in ("BPE", "WordLevel"):
            raise CheckpointError(f"{file} has a model of type {kind!r}; supported are BPE and WordLevel")
        settings = _optional_json(place / "tokenizer_config.json")
        tokenizer = cls(file.read_text(encoding="utf-8"), settings, _chat_template(place, settings), ())
        tokenizer.eos_ids = _eos_ids(place, settings, tokenizer)
        return tokenizer

    @property
    def vocabulary_size(self) -> int:
        """Tokens of the tokenizer, the added ones included; a model's embedding may have more rows."""
        return int(self._full.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> array[int]:
        """Plain text -> ids. Text that spells a special token becomes ordinary tokens; nothing is added.

        All added tokens count as special here: those that a chat template uses are not always flagged so.
        """
        ids = array("i")
        for part in self.encode_pieces((text,)):
            ids.extend(part)
        return ids

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[array[int]]:
        """Stream a text given in pieces: the concatenation is encode("".join(pieces)), however the pieces are cut.

        Memory is bounded by the longest stretch between two places where the pre-tokenizer is certain to split: after a
        letter or number that white space, punctuation or a symbol follows. No alternative of the patterns of GPT-2,
        SmolLM, Llama 3 and Qwen contains such a pair and none looks behind, so the matches on either side are those of
        the whole text; and NFC composes nothing across it. With any other pre-tokenizer or normalizer the text is held
        whole.
        """
        for part in _certain_parts(pieces) if self._words_end_pieces else ("".join(pieces),):
            yield _ids(self._plain, part, add_special=False)

    def encode_prompt(self, text: str) -> array[int]:
        """A whole prompt -> ids as `tokenizer(text)` of transformers: special tokens recognised, BOS if it adds one."""
        return _ids(self._full, text, add_special=True)

    def encode_template(self, text: str) -> array[int]:
        """A piece of a rendered chat template -> ids: special tokens recognised, nothing added."""
        return _ids(self._full, text, add_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Ids -> text, without clean-up of spaces. Bytes that are no UTF-8 become U+FFFD; unknown ids are left out."""
        return str(self._full.decode(list(ids), skip_special_tokens=skip_special))

    def chat(self, messages: list[dict[str, str]]) -> str:
        """Render messages ({"role", "content"}) with the model's chat template and its generation prompt.

        Raises RequestError when the model has no chat template or the template refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template; put a chat_template.jinja in its folder or use a chat model"
            )
        import jinja2
        from transformers.utils.chat_template_utils import (
            render_jinja_template,
        )  # slow to import, and only chats need it

        arguments: dict[str, Any] = {"chat_template": self._chat_template, "add_generation_prompt": True}
        arguments |= _special_tokens(self._settings)
        try:
            rendered = render_jinja_template([messages], **arguments)[0][0]
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages ({error}); change them as it says") from error
        return str(rendered)

    def id_of(self, token: str) -> int | None:
        """The id of one token, spelled as in the vocabulary; None when there is none."""
        number = self._full.token_to_id(token)
        return None if number is None else int(number)

    def fingerprint(self) -> str:
        """SHA-256 of tokenizer.json, in hexadecimal digits."""
        return hashlib.sha256(self._definition.encode()).hexdigest()


def _build(definition: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"tokenizer.json is damaged or too new ({error}); take it from its publisher again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _ids(tokenizer: tokenizers.Tokenizer, text: str, *, add_special: bool) -> array[int]:
    try:
        return array("i", tokenizer.encode(text, add_special_tokens=add_special).ids)
    except TypeError as error:  # what the library says of a lone surrogate, too
        message = f"the text must be a str of valid Unicode, got {text[:40]!r}...; decode files with errors='replace'"
        raise RequestError(message) from error


def _without_added_tokens(definition: Mapping[str, Any]) -> dict[str, Any]:
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


def _words_end_pieces(definition: Mapping[str, Any]) -> bool:
    """Whether a letter or number and a following character of another kind are always in different pieces."""
    if definition.get("normalizer") not in (None, {"type": "NFC"}):
        return False
    steps = definition.get("pre_tokenizer") or {}
    splits = False
    for step in steps.get("pretokenizers", [steps]):
        kind = step.get("type")
        if kind == "ByteLevel" and not step["add_prefix_space"]:
            splits |= step.get("use_regex", True)
        elif kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            splits |= step["pattern"].get("Regex") in (QWEN2_PATTERN, LLAMA3_PATTERN)
        elif kind != "Digits":
            return False
    return splits


def _certain_parts(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a stream of text at places that `_is_certain` allows, at most once per block."""
    held: list[str] = []
    for block in _blocks(pieces):
        cut = next((i for i in range(len(block) - 1, 0, -1) if _is_certain(block[i - 1], block[i])), None)
        if cut is None:
            held.append(block)
        else:
            yield "".join((*held, block[:cut]))
            held = [block[cut:]]
    yield "".join(held)


def _blocks(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in blocks of at least BLOCK characters and at most twice as many; the last one may be shorter."""
    gathered: list[str] = []
    count = 0
    for piece in pieces:
        for start in range(0, len(piece), BLOCK):
            gathered.append(piece[start : start + BLOCK])
            count += len(gathered[-1])
            if count >= BLOCK:
                yield "".join(gathered)
                gathered, count = [], 0
    yield "".join(gathered)


def _is_certain(left: str, right: str) -> bool:
    """Whether `left` is a letter or number and `right` white space, punctuation or a symbol, in every Unicode version.

    Unicode 3.2 and Python's must agree, since the pattern engine has tables of its own age. Both must stay as they are
    under NFC: U+0958, say, becomes a letter and a mark, and a mark forms one piece with the punctuation after it.
    """
    kinds = [{unicodedata.category(c)[0], unicodedata.ucd_3_2_0.category(c)[0]} for c in (left, right)]
    return (
        (kinds[0] == {"L"} or kinds[0] == {"N"})
        and (kinds[1] <= {"Z", "P", "S"} or right in "\n\r\t")
        and unicodedata.is_normalized("NFC", left)
        and unicodedata.is_normalized("NFC", right)
    )


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja (transformers 5) or tokenizer_config.json (4: a text, or a list of named ones)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((each["template"] for each in template if each.get("name") == "default"), None)
    return template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, which chat templates may name; each is a text or a mapping with "content"."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    found = {name: settings[name] for name in names if settings.get(name) is not None}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}


def _eos_ids(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json knows best (Qwen and Llama 3 end on several ids), then config.json, then the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        ids = _optional_json(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))
    own = tokenizer.id_of(_special_tokens(settings).get("eos_token", ""))
    return () if own is None else (own,)

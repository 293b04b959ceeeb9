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
from .json_fields import Fields
from .tokenizer_definition import without_added_tokens, without_prefix

__all__ = ["LLAMA3_PATTERN", "QWEN2_PATTERN", "Tokenizer"]

AGAIN = "take it from its publisher again"
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
        self, definition: str, special: Mapping[str, str], chat_template: str | None, eos_ids: tuple[int, ...]
    ):
        """definition: content of tokenizer.json. special: bos_token, eos_token and so on. Users call `load`."""
        self.eos_ids = eos_ids
        self._definition = definition
        self._special = special
        self._chat_template = chat_template
        self._whole = _build(definition)
        try:
            whole = json.loads(self._whole.to_str())  # the library's own spelling: every key is there
            parts = without_prefix(whole)
            self._pieces = self._whole if parts == whole else _build(json.dumps(parts, ensure_ascii=False))
            self._plain = _build(json.dumps(without_added_tokens(parts), ensure_ascii=False))
            self._words_end_pieces = _words_end_pieces(parts)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"tokenizer.json is damaged ({error!r}); {AGAIN}") from error
        _refuse_prefix(self._plain)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it.

        Raises CheckpointError when a file is absent or damaged, when the model is neither BPE nor word-level, and when
        pieces of a text cannot be encoded apart.
        """
        place = Path(folder)
        file = place / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{file} is absent; write it once with "
                f"transformers.AutoTokenizer.from_pretrained({str(place)!r}).save_pretrained({str(place)!r})"
            )
        kind = Fields(read_json(file), str(file), AGAIN).part("model").text("type", "unknown")
        if kind not in ("BPE", "WordLevel"):
            raise CheckpointError(f"{file} has a model of type {kind!r}; supported are BPE and WordLevel")
        settings = _optional(place / "tokenizer_config.json")
        special = _special_tokens(settings)
        tokenizer = cls(file.read_text(encoding="utf-8"), special, _chat_template(place, settings), ())
        tokenizer.eos_ids = _eos_ids(place, special, tokenizer)
        return tokenizer

    def check_ids(self, vocabulary: int) -> None:
        """Raises CheckpointError unless every id, those that end a response included, is below `vocabulary`, the number
        of rows of the model's embedding."""
        for end in self.eos_ids:
            if end >= vocabulary:
                raise CheckpointError(
                    f"eos_token_id {end} is outside the model's vocabulary of {vocabulary}; correct "
                    "generation_config.json or config.json"
                )
        token, number = max(self._whole.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        if number >= vocabulary:
            raise CheckpointError(
                f"the tokenizer's token {token!r} has id {number}, outside the model's vocabulary of {vocabulary}; "
                "check that tokenizer.json and weights belong together, or take the token out of tokenizer.json"
            )

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
        return _ids(self._whole, text, add_special=True)

    def encode_template(self, text: str) -> array[int]:
        """A piece of a rendered chat template -> ids: special tokens recognised, nothing added."""
        return _ids(self._pieces, text, add_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Ids -> text, without clean-up of spaces. Bytes that are no UTF-8 become U+FFFD; unknown ids are left out.

        skip_special: leave special tokens out; False shows a prompt as the model reads it.
        """
        return str(self._whole.decode(list(ids), skip_special_tokens=skip_special))

    def chat(self, messages: list[dict[str, str]]) -> str:
        """Render messages ({"role", "content"}) with the model's chat template and its generation prompt.

        Raises RequestError when the model has no chat template or the template refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template; put a chat_template.jinja in its folder or use a chat model"
            )
        from transformers.utils.chat_template_utils import (
            render_jinja_template,
        )  # slow to import, and only chats need it

        arguments: dict[str, Any] = {"chat_template": self._chat_template, "add_generation_prompt": True}
        arguments |= self._special
        try:
            rendered = render_jinja_template([messages], **arguments)[0][0]
        except Exception as error:  # a template is a program of its publisher's and may raise anything
            raise RequestError(f"the chat template refused the messages ({error}); change them as it says") from error
        return str(rendered)

    def id_of(self, token: str) -> int | None:
        """The id of one token, spelled as in the vocabulary; None when there is none."""
        number = self._whole.token_to_id(token)
        return None if number is None else int(number)

    def fingerprint(self) -> str:
        """SHA-256 of tokenizer.json, in hexadecimal digits."""
        return hashlib.sha256(self._definition.encode()).hexdigest()


def _build(definition: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"tokenizer.json is damaged or too new ({error}); {AGAIN}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _ids(tokenizer: tokenizers.Tokenizer, text: str, *, add_special: bool) -> array[int]:
    try:
        return array("i", tokenizer.encode(text, add_special_tokens=add_special).ids)
    except TypeError as error:  # what the library says of a lone surrogate, too
        message = f"the text must be a str of valid Unicode, got {text[:40]!r}...; decode files with errors='replace'"
        raise RequestError(message) from error
    except Exception as error:  # of a text that the vocabulary cannot express; the library raises nothing narrower
        raise RequestError(f"the tokenizer cannot encode {text[:40]!r}... ({error}); use another model") from error


def _refuse_prefix(tokenizer: tokenizers.Tokenizer) -> None:
    """Raises CheckpointError for a tokenizer that adds something to a text in a way that we do not know."""
    text = "x"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    if text.lower() != "x":
        raise CheckpointError(
            f"tokenizer.json turns the text 'x' into {text!r}: pieces of a prompt cannot be encoded apart; take the "
            "step that adds something out of its normalizer or pre_tokenizer, or use another model"
        )


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


def _optional(file: Path) -> Fields:
    return Fields(read_json(file) if file.is_file() else {}, str(file), AGAIN)


def _chat_template(folder: Path, settings: Fields) -> str | None:
    """From chat_template.jinja (transformers 5) or tokenizer_config.json (4: a text, or a list of named ones)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); {AGAIN}") from error
    named = settings.values.get("chat_template")
    if not isinstance(named, list):
        return settings.text("chat_template", "") or None
    for number, each in enumerate(named):
        template = Fields(each, f"chat_template {number} in {settings.place}", AGAIN)
        if template.text("name") == "default":
            return template.text("template")
    return None


def _special_tokens(settings: Fields) -> dict[str, str]:
    """bos_token, eos_token and so on, which chat templates may name; each is a text or a mapping with "content"."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    return {name: _token_text(settings, name) for name in names if name in settings.values}


def _token_text(settings: Fields, name: str) -> str:
    if isinstance(settings.values[name], dict):
        return settings.part(name).text("content")
    return settings.text(name)


def _eos_ids(folder: Path, special: Mapping[str, str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json knows best (Qwen and Llama 3 end on several ids), then config.json, then the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        values = _optional(folder / name)
        given = values.values.get("eos_token_id")
        if given is not None:
            ids = values.integers("eos_token_id") if isinstance(given, list) else [values.integer("eos_token_id")]
            return tuple(dict.fromkeys(ids))
    own = tokenizer.id_of(special.get("eos_token", ""))
    return () if own is None else (own,)

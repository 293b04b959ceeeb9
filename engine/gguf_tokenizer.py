"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder: byte-level BPE of known kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import CheckpointError
from .json_fields import Fields
from .tokenizer import LLAMA3_PATTERN, QWEN2_PATTERN

__all__ = ["tokenizer_files"]

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # ggml's token types
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # end of sequence, of turn, of message: each ends a response
KINDS = ("gpt-2", "smollm", "qwen2", "llama-bpe")


def tokenizer_files(metadata: Fields) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Contents of tokenizer.json, tokenizer_config.json and generation_config.json from metadata ("tokenizer.*").

    Raises CheckpointError for a model other than byte-level BPE ("gpt2"), for an unknown pre-tokenizer and for tokens,
    merges and ids that do not fit together.
    """
    model, kind = metadata.text("tokenizer.ggml.model", ""), metadata.text("tokenizer.ggml.pre", "")
    if model != "gpt2" or kind not in KINDS:
        raise CheckpointError(
            f"the GGUF file's tokenizer (model {model!r}, pre-tokenizer {kind!r}) is not supported; supported are "
            f"byte-level BPE (model 'gpt2') with {', '.join(KINDS)}: use the Hugging Face folder of this model"
        )
    tokens, types = metadata.texts("tokenizer.ggml.tokens"), metadata.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise metadata.failure(f"{metadata.place} has {len(tokens)} tokens, but {len(types)} types of tokens")
    ids = {name: _token_id(metadata, word, len(tokens)) for name, word in SPECIAL.items()}
    special = {name: tokens[number] for name, number in ids.items() if number is not None}
    ends = dict.fromkeys(_token_id(metadata, word, len(tokens)) for word in ENDS)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the one class that takes tokenizer.json as it is
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.text("tokenizer.chat_template", "") or None,
        **special,
    }
    generation = {"eos_token_id": [number for number in ends if number is not None]}
    definition = _definition(metadata, kind, tokens, types, special.get("bos_token"))
    return definition, settings, generation if generation["eos_token_id"] else {}


def _token_id(metadata: Fields, word: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{word}_token_id"
    return metadata.integer(key, high=count - 1) if key in metadata.values else None


def _definition(metadata: Fields, kind: str, tokens: list[str], types: list[int], bos: str | None) -> str:
    """The content of tokenizer.json."""
    vocabulary = {
        token: number for number, (token, sort) in enumerate(zip(tokens, types, strict=True)) if sort != UNUSED
    }
    merges = [_merge(text, metadata) for text in metadata.texts("tokenizer.ggml.merges")]
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token", kind == "llama-bpe")
    try:
        # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
        tokenizer.normalizer = normalizers.NFC() if kind == "qwen2" else None
        tokenizer.pre_tokenizer = _pre_tokenizer(kind)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = _post_processor(bos if add_bos else None, vocabulary)
        return _with_added_tokens(tokenizer, tokens, types)
    except Exception as error:  # the library raises nothing narrower
        raise metadata.failure(f"the tokenizer in {metadata.place} is damaged ({error!r})") from error


def _merge(text: str, metadata: Fields) -> tuple[str, str]:
    parts = text.split(" ")
    if len(parts) != 2:
        raise metadata.failure(f"the merge {text!r} in {metadata.place} must be two tokens and a space between them")
    return parts[0], parts[1]


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    """The splits that llama.cpp (src/llama-vocab.cpp) names by `kind`, in the terms of `tokenizers`."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "gpt-2":
        return plain
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    words = Regex(QWEN2_PATTERN if kind == "qwen2" else LLAMA3_PATTERN)
    after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), after])


def _post_processor(bos: str | None, vocabulary: Mapping[str, int]) -> processors.PostProcessor:
    """Prepend the BOS, if there is one to prepend."""
    if bos is not None:
        return processors.TemplateProcessing(f"{bos} $A", None, [(bos, vocabulary[bos])])
    return processors.ByteLevel(trim_offsets=False)


def _with_added_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> str:
    """tokenizer.json with control tokens added as special ones and user-defined tokens as ordinary ones.

    They are in the vocabulary already, so that each keeps its id.
    """
    for token, sort in zip(tokens, types, strict=True):
        if sort in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=sort == CONTROL)])
    return str(tokenizer.to_str())

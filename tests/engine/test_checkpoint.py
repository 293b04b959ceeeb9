"""Checkpoints: what transformers wrote is read bit for bit, what we write it reads, and damage is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest.engine import checkpoint, tensor_files
from palimpsest.engine.errors import CheckpointError
from palimpsest.tests.tiny_models import make_model_folder
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_parameters": YARN}),
]


def parameters_of(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize(("kind", "fields"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_and_save_agree_with_transformers(
    tmp_path: Path, kind: str, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    folder = make_model_folder(tmp_path / "theirs", kind, **fields)
    loaded = checkpoint.load(folder, dtype)
    assert_equal(loaded.parameters, parameters_of(folder, dtype))
    ours = tmp_path / "ours"
    checkpoint.save(ours, loaded.config, loaded.parameters, loaded.folder)
    assert_equal(parameters_of(ours, dtype), loaded.parameters)
    again = checkpoint.load(ours, dtype)
    assert again.config == loaded.config
    assert_equal(again.parameters, loaded.parameters)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (ours / name).read_bytes() == (folder / name).read_bytes()
    special = json.loads((ours / "config.json").read_text())
    assert special["eos_token_id"] == json.loads((folder / "config.json").read_text())["eos_token_id"]


def test_logits_survive_the_round_trip(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "theirs", "qwen3", **CASES[2][1])
    loaded = checkpoint.load(folder, torch.float32)
    checkpoint.save(tmp_path / "ours", loaded.config, loaded.parameters, loaded.folder)
    ids = torch.arange(40)[None]
    logits = [AutoModelForCausalLM.from_pretrained(place)(ids).logits for place in (folder, tmp_path / "ours")]
    assert torch.equal(*logits)


def test_shards_of_theirs_and_ours(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "theirs")
    expected = parameters_of(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_equal(checkpoint.load(tmp_path / "sharded", torch.float32).parameters, expected)
    loaded = checkpoint.load(folder, torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in loaded.parameters.items()}
    (tmp_path / "ours").mkdir()
    checkpoint.write_json(tmp_path / "ours" / "config.json", loaded.config.to_hf())
    tensor_files.write_tensors(tmp_path / "ours", shapes, torch.float32, loaded.parameters.__getitem__, 50_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert_equal(parameters_of(tmp_path / "ours"), expected)
    assert_equal(checkpoint.load(tmp_path / "ours", torch.float32).parameters, expected)


def test_parameters_own_their_storage(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    loaded = checkpoint.load(folder, torch.float32)
    storages = set()
    for tensor in loaded.parameters.values():
        tensor.add_(1.0)
        storages.add(tensor.untyped_storage().data_ptr())
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert len(storages) == len(loaded.parameters)
    assert (folder / "model.safetensors").read_bytes() == before


def test_loading_holds_the_model_once(tmp_path: Path) -> None:
    """Peak memory while loading 154 MB: the result and at most about one tensor (6 MB)."""
    folder = make_model_folder(
        tmp_path / "m", hidden_size=768, intermediate_size=2048, num_hidden_layers=6, head_dim=128
    )
    size = (folder / "model.safetensors").stat().st_size
    code = (
        "import re, sys, torch\n"
        "from palimpsest.engine import checkpoint\n"
        "def peak():\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "open('/proc/self/clear_refs', 'w').write('5')  # the peak starts again from here\n"
        "before = peak()\n"
        "loaded = checkpoint.load(sys.argv[1], torch.float32)\n"
        "print(peak() - before)\n"
    )
    root = Path(__file__).parents[2] / ".typing"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=root, capture_output=True, text=True, check=True)
    assert 0.95 * size < int(done.stdout) < size + 12e6


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_head_of_a_tied_model(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in checkpoint.load(folder, torch.float32).parameters
    edit_tensors(folder, lambda t: t["lm_head.weight"][3, 5].add_(1e-3))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        checkpoint.load(folder, torch.float32)


def test_rotary_buffers_are_skipped(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    expected = checkpoint.load(folder, torch.float32).parameters
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_equal(checkpoint.load(folder, torch.float32).parameters, expected)


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the JSON header of the weights and leave the data as they are."""
    content = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    changed = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(changed).to_bytes(8, "little") + changed + content[end:])


def edit_entry(folder: Path, **fields: Any) -> None:
    edit_header(folder, lambda header: header["model.norm.weight"].update(fields))


def overlap(header: dict[str, Any]) -> None:
    """The norm of the model lies where the norm of the first layer lies."""
    header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


WEIGHTS = "model.safetensors"
DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")), r"'model\.norm\.weight' is missing"),
    (lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight")), r"lm_head.*tie_word_embeddings"),
    (lambda f: edit_tensors(f, lambda t: t.update({"model.norm.bias": torch.ones(48)})), r"'model\.norm\.bias'"),
    (
        lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.ones(47)})),
        r"norm\.weight.*\(47,\).*\(48,\)",
    ),
    (lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.ones(48).to(torch.int8)})), "I8"),
    (lambda f: truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 1), "truncated"),
    (lambda f: truncate(f / WEIGHTS, 1000), "truncated"),
    (lambda f: truncate(f / WEIGHTS, 0), "truncated"),
    (lambda f: (f / WEIGHTS).write_bytes((9).to_bytes(8, "little") + b"{broken}}" + bytes(9)), "header"),
    (lambda f: edit_entry(f, data_offsets=[-192, 0]), "data_offsets.*whole numbers"),
    (lambda f: edit_entry(f, data_offsets=[192, 0]), "data_offsets.*begin and an end"),
    (lambda f: edit_entry(f, data_offsets=[0.0, 192.0]), "data_offsets.*whole numbers"),
    (lambda f: edit_entry(f, data_offsets=[0]), "data_offsets.*begin and an end"),
    (
        lambda f: edit_header(f, overlap),
        r"damaged: tensor 'model\.(norm|layers\.0\.input_layernorm)\.weight' starts at",
    ),
    (lambda f: edit_header(f, lambda header: header.pop("lm_head.weight")), "damaged"),
    (lambda f: edit_entry(f, dtype=["F32"]), "dtype.*string"),
    (lambda f: edit_entry(f, shape=[48.0]), "shape.*whole numbers"),
    (lambda f: edit_entry(f, dtype="F16"), "192 bytes, not 96"),
    (lambda f: edit_header(f, lambda header: header.update({"model.norm.weight": 5})), "must be a mapping"),
    (lambda f: (f / WEIGHTS).write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5), "header"),
    (lambda f: (f / WEIGHTS).unlink(), "neither"),
    (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), r"pickles.*pytorch_model\.bin"),
    (lambda f: (f / "config.json").unlink(), r"config\.json is absent"),
    (lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), r"config\.json cannot be read"),
    (lambda f: edit_config(f, num_hidden_layers=3), r"model\.layers\.2"),
    (lambda f: edit_config(f, model_type="gpt2"), "gpt2"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], Any], named: str) -> None:
    folder = make_model_folder(tmp_path / "model")
    checkpoint.load(folder, torch.float32)
    damage(folder)
    with pytest.raises(CheckpointError, match=named):
        checkpoint.load(folder, torch.float32)


def test_absent_shard_and_wrong_index(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "theirs")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    first, last = min(values["weight_map"].values()), max(values["weight_map"].values())
    index.write_text(json.dumps(values | {"weight_map": values["weight_map"] | {"model.norm.weight": first}}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        checkpoint.load(tmp_path / "sharded", torch.float32)
    for places in ({"a": 5}, {"a": "../theirs/model.safetensors"}, {"a": "x" * 999}, 5):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match="index"):
            checkpoint.load(tmp_path / "sharded", torch.float32)
    index.write_text(json.dumps(values))
    (tmp_path / "sharded" / last).unlink()
    with pytest.raises(CheckpointError, match=last):
        checkpoint.load(tmp_path / "sharded", torch.float32)


def test_save_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = checkpoint.load(make_model_folder(tmp_path / "theirs"), torch.float32)
    target = tmp_path / "out" / "step-1"
    partial = dict(loaded.parameters)
    partial.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        checkpoint.save(target, loaded.config, partial, loaded.folder)

    def broken(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "copyfile", broken)
        with pytest.raises(CheckpointError, match=r"step-1 cannot be written.*disk full"):
            checkpoint.save(target, loaded.config, loaded.parameters, loaded.folder)
    assert list((tmp_path / "out").iterdir()) == []
    target.mkdir()
    checkpoint.save(target, loaded.config, loaded.parameters, loaded.folder)
    assert target.stat().st_mode == target.parent.stat().st_mode  # as any new folder, not for us alone
    with pytest.raises(CheckpointError, match="not an empty folder"):
        checkpoint.save(target, loaded.config, loaded.parameters, loaded.folder)


def test_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load(tmp_path / "nothing", torch.float32)

"""Quantisation: packing loses nothing, rounding is as good as it can be, and a quantised engine keeps its promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from palimpsest import ConfigError, Engine, EngineConfig, RequestError, SamplingParams
from palimpsest.engine import checkpoint, kv_rows
from palimpsest.engine.config import QUANTISED
from palimpsest.engine.errors import CheckpointError
from palimpsest.engine.layer_stack import LayerStack
from palimpsest.engine.model import Batch, Decoder, Linear
from palimpsest.engine.ops import Spans, select
from palimpsest.engine.packed_weight import PackedWeight
from palimpsest.engine.quant import QuantisedLinear, quantise, quantise_weight, replace_weights, round_weight
from palimpsest.engine.scaled_weight import ScaledWeight
from palimpsest.tests.engine.test_gguf import write_gguf
from palimpsest.tests.tiny_models import make_model_folder

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["The harbour has 27 lamps.", "Nobody knew", "The keeper said: count the lamps! " * 4]


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 150),
    kind=st.sampled_from([(8, 0), (8, 32), (8, 128), (4, 32), (4, 64)]),
    minima=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_packing_loses_nothing(rows: int, columns: int, kind: tuple[int, int], minima: bool) -> None:
    bits, group = kind
    groups = -(-columns // (group or columns))
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    scales, minimum = torch.randn(2, rows, groups).half()
    minima = minima and bits == 4
    packed = PackedWeight.pack(codes, scales, minimum if minima else None, bits, group)
    assert torch.equal(packed.codes()[:, :columns], codes)
    column_group = torch.arange(columns) // (group or columns)
    expected = (codes.float() - (0 if minima else 2 ** (bits - 1))) * scales.float()[:, column_group]
    assert torch.equal(packed.dequantise(), expected + minimum.float()[:, column_group] if minima else expected)


@pytest.mark.parametrize("kind", [kind for kind in QUANTISED if kind.startswith("int8")])
def test_int8_is_half_a_step_off_at_most(kind: str) -> None:
    weight = torch.randn(20, 200) * torch.logspace(-2, 2, 20).unsqueeze(1)
    packed = quantise_weight(weight, kind)
    step = packed.per_group(packed.scales).float().repeat_interleave(32, dim=1)[:, :200]
    assert ((packed.dequantise() - weight).abs() <= step * 0.54).all()  # 127 steps x 2^-12, from rounding the scale


@pytest.mark.parametrize(("kind", "size"), [("int4-g32", 32), ("int4-g128", 128)])
def test_int4_is_better_than_rounding_to_the_largest_value(kind: str, size: int) -> None:
    """llama.cpp's rule for Q4_0."""
    weight = torch.randn(64, 256)
    groups = weight.unflatten(1, (-1, size))
    step = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)) / -8
    plain = ((groups / step).round().clamp(-8, 7) * step).flatten(1)
    ours = quantise_weight(weight, kind).dequantise()
    assert (ours - weight).square().mean() < 0.94 * (plain - weight).square().mean()


def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_is_refused() -> None:
    weight = torch.randn(5, 64)
    weight[2] = 0
    for kind in ("int8", "int4"):
        assert not quantise_weight(weight, kind).dequantise()[2].any()
        for bad in (torch.nan, torch.inf, 1e9):
            damaged = weight.clone()
            damaged[1, 7] = bad
            with pytest.raises(CheckpointError, match="not finite"):
                quantise_weight(damaged, kind)


def test_fp8_is_the_nearest_code_and_the_largest_of_a_row_is_kept() -> None:
    weight = torch.randn(40, 64) * torch.logspace(-3, 3, 40).unsqueeze(1)
    weight[3] = 0
    rounded = round_weight(weight, "fp8")
    values = rounded.codes.float() * rounded.scales[:, None]
    # Three bits of fraction; below 2^-6 of scale the steps are 2^-9.
    assert ((values - weight).abs() <= weight.abs() / 16 * 1.001 + rounded.scales[:, None] * 2**-10).all()
    assert torch.allclose(values.abs().amax(dim=1), weight.abs().amax(dim=1)) and not values[3].any()
    with pytest.raises(CheckpointError, match="not finite"):
        round_weight(torch.full((2, 32), torch.nan), "fp8")


def test_fp8_kv_is_held_to_what_e4m3_can_be() -> None:
    rows = kv_rows.pack(torch.tensor([[500.0, -1e6, 3.1, 0.0, torch.nan]]), torch.float8_e4m3fn)
    read = kv_rows.unpack(rows, torch.float32)
    assert read[0, :4].tolist() == [448.0, -448.0, 3.0, 0.0] and read[0, 4].isnan()
    assert kv_rows.columns(64, rows.dtype) == 64


def test_int8_for_a_gpu_has_the_same_numbers() -> None:
    packed = quantise_weight(torch.randn(20, 50), "int8")
    rows = ScaledWeight.of_packed(packed)
    assert torch.equal(rows.codes.float() * rows.scales[:, None], packed.dequantise())


def load(folder: Path) -> Decoder:
    loaded = checkpoint.load(folder, torch.float32)
    return Decoder.from_parameters(
        loaded.config,
        select("reference", torch.float32, torch.float32, loaded.config.head_dim, 1),
        loaded.parameters,
        64,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_every_linear_layer_and_the_head_are_replaced(tmp_path: Path, tied: bool) -> None:
    model = load(make_model_folder(tmp_path, "qwen2", tie_word_embeddings=tied))
    original = load(tmp_path)
    quantise(model, "int4")
    assert not [module for module in model.modules() if isinstance(module, Linear)]
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(layers) == 7 * model.config.num_layers + 1
    assert [layer.weight.bits for layer in layers].count(8) == 1 and model.lm_head.weight.bits == 8
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight)
    hidden = torch.randn(3, model.config.hidden_size)
    query, plain = model.model.layers[1].self_attn.q_proj, original.model.layers[1].self_attn.q_proj
    assert torch.allclose(query.weight.dequantise(), plain.weight, atol=0.05)
    assert torch.equal(query.bias, plain.bias)
    assert torch.allclose(model.logits(hidden), original.logits(hidden), atol=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_packed_while_they_are_read_are_those_of_the_whole_model(tmp_path: Path, tied: bool) -> None:
    folder = make_model_folder(tmp_path, "qwen2", tie_word_embeddings=tied)
    model = load(folder)
    quantise(model, "int4")
    loaded = checkpoint.load(folder, torch.float32, "int4")
    assert loaded.parameters.keys() & loaded.packed.keys() == ({checkpoint.EMBEDDING} if tied else set())
    expected = model.state_dict()
    found = Engine(folder, EngineConfig(kv_bytes=1 << 22, weights="int4")).model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_unknown_kinds_and_names_are_refused(tmp_path: Path) -> None:
    model = load(make_model_folder(tmp_path))
    with pytest.raises(ConfigError, match=r"'int5'.*int8-g32"):
        quantise(model, "int5")
    with pytest.raises(ConfigError, match=r"weights must be one of native, int8, .*'int5'"):
        EngineConfig(weights="int5")
    packed = quantise_weight(torch.randn(4, 4), "int8")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        replace_weights(model, {"model.norm.weight": packed})


@pytest.mark.parametrize("weights", ["int8", "int4-g64"])
def test_a_quantised_engine_keeps_its_promises(tmp_path: Path, weights: str) -> None:
    """Batched = alone, chunked = whole: the same ids and the same log-probabilities bit for bit."""
    folder = make_model_folder(tmp_path, "qwen3")
    whole = Engine(folder, EngineConfig(kv_bytes=1 << 22, weights=weights))
    cut = Engine(folder, EngineConfig(kv_bytes=1 << 22, weights=weights, max_step_tokens=7, max_sequences=3))
    exact = whole.model.ops.linear.__module__.endswith(".cpu")
    together, pieces = whole.generate(PROMPTS, GREEDY), cut.generate(PROMPTS, GREEDY)
    for i, prompt in enumerate(PROMPTS):
        alone = Engine(folder, whole.config).generate([prompt], GREEDY)[0]
        for other in (together[i], pieces[i]):
            assert other.token_ids == alone.token_ids
            assert list(other.logprobs) == (list(alone.logprobs) if exact else pytest.approx(alone.logprobs, abs=1e-4))


@pytest.mark.parametrize("weights", ["int8-g32", "int4"])
def test_layers_in_one_call_are_op_by_op(tmp_path: Path, weights: str) -> None:
    pytest.importorskip("palimpsest._C", reason="the extension is not built")
    folder = make_model_folder(tmp_path, "qwen2", intermediate_size=300)
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 23, weights=weights, backend="cpu"))
    assert isinstance(engine.runner.run_layers, LayerStack)
    for count in (1, 9, 450):
        batch = batch_of(count)
        with torch.inference_mode():
            in_one_call = engine.runner.run_layers(batch)
            assert torch.equal(in_one_call, engine.model(batch, engine.runner.pages))


def batch_of(count: int) -> Batch:
    """One sequence from its start, in the first pages."""
    places = torch.arange(count)
    numbers = torch.arange(-(-count // 16), dtype=torch.int32)[None]
    ends = (torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32))
    return Batch(places % 300, places, places, Spans(*ends, numbers))


def test_quantised_weights_cannot_be_updated(tmp_path: Path) -> None:
    engine = Engine(make_model_folder(tmp_path), EngineConfig(kv_bytes=1 << 22, weights="int8"))
    with pytest.raises(RequestError, match=r"weights='int8'.*weights='native'"), engine.update():
        pass
    assert engine.weights_version == 0
    assert engine.describe()["weights_kind"] == "int8"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sort", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_a_file_are_taken_as_they_are(tmp_path: Path, sort: str, tied: bool) -> None:
    file = write_llama(tmp_path, sort, tied)
    engine = Engine(file, EngineConfig(kv_bytes=1 << 22, weights="file"))
    stored = checkpoint.load(file, torch.float32).parameters
    layers = {name: module for name, module in engine.model.named_modules() if isinstance(module, QuantisedLinear)}
    assert len(layers) == 15
    for name, layer in layers.items():
        expected = stored["model.embed_tokens.weight" if tied and name == "lm_head" else f"{name}.weight"]
        assert torch.equal(layer.weight.dequantise(), expected), name
        assert (layer.weight.bits, layer.weight.group) == (int(sort[1]), 32)
    assert torch.equal(engine.model.model.embed_tokens.weight, stored["model.embed_tokens.weight"])
    assert len(engine.generate(PROMPTS[:1], GREEDY)[0].token_ids) == 8


def test_floats_of_a_file_stay_and_other_blocks_become_int8(tmp_path: Path) -> None:
    (tmp_path / "floats").mkdir()
    floats = Engine(write_llama(tmp_path / "floats", "F16", False), EngineConfig(kv_bytes=1 << 22, weights="file"))
    assert not [module for module in floats.model.modules() if isinstance(module, QuantisedLinear)]
    file = write_llama(tmp_path, "Q6_K", True)
    loaded = checkpoint.load(file, torch.float32)
    packed = checkpoint.load(file, torch.float32, "file").packed
    assert len(packed) == 15
    for name, weight in packed.items():
        assert (weight.bits, weight.group) == (8, 32)
        largest = loaded.parameters[name].abs().max()
        assert torch.allclose(weight.dequantise(), loaded.parameters[name], atol=float(largest) / 200), name


def write_llama(folder: Path, sort: str, tied: bool) -> Path:
    """A GGUF file of the architecture whose query and key rows are stored in another order."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    hf = make_model_folder(folder / "hf", "llama", tokenizer="smollm", tie_word_embeddings=tied, **sizes)
    write_gguf(folder / "m.gguf", hf, "smollm", sort=GGMLQuantizationType[sort])
    return folder / "m.gguf"


def test_a_folder_has_no_integers_to_take(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights='file'.*is a folder.*int8"):
        Engine(make_model_folder(tmp_path), EngineConfig(kv_bytes=1 << 22, weights="file"))

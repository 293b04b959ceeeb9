"""LoRA: adapters change nothing until they are trained, compute the same in training and inference, and travel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from palimpsest.engine import lora
from palimpsest.engine.config import EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import CheckpointError, ConfigError
from palimpsest.engine.layer_stack import LayerStack
from palimpsest.engine.lora import LoraConfig
from palimpsest.tests.tiny_models import make_model_folder

SMALL = EngineConfig(kv_bytes=1 << 20, threads=1)
SAMPLED = SamplingParams(max_tokens=12, seed=3)
PROMPTS = ["The keeper said:", "The harbour town of Ostrel has"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen2", tie_word_embeddings=True)


def responses(engine: Engine) -> list[tuple[list[int], list[float]]]:
    return [(list(done.token_ids), done.logprobs) for done in engine.generate(PROMPTS, SAMPLED)]


def shake(engine: Engine) -> None:
    """Give every adapter an effect."""
    generator = torch.Generator().manual_seed(5)
    with engine.update(), torch.no_grad():
        for layer in lora.adapters(engine.model).values():
            layer.lora_B.normal_(0.0, 0.3, generator=generator)


def test_fresh_adapters_change_no_bit_and_trained_ones_do(folder: Path) -> None:
    engine = Engine(folder, SMALL)
    before, addresses = responses(engine), [p.data_ptr() for p in engine.model.parameters()]
    lora.add(engine, LoraConfig(rank=3, targets=("q_proj", "down_proj")))
    assert len(lora.adapters(engine.model)) == 4
    assert responses(engine) == before
    kept = [p.data_ptr() for name, p in engine.model.named_parameters() if "lora" not in name]
    assert sorted(kept) == sorted(addresses)
    shake(engine)
    assert responses(engine) != before
    with lora.disabled(engine.model):
        engine.runner.pages[0].key.fill_(torch.nan)
        engine.scheduler.pool.forget()  # a prefix computed with adapters is not this model's
        assert responses(engine) == before


def test_adapters_travel_in_the_layout_of_peft(folder: Path, tmp_path: Path) -> None:
    engine, other = Engine(folder, SMALL), Engine(folder, SMALL)
    lora.add(engine, LoraConfig(rank=4, alpha=6.0, targets=("v_proj", "up_proj"), seed=1))
    shake(engine)
    lora.save(engine.model, tmp_path / "adapter", base="tiny")
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["target_modules"]) == (4, 6.0, ["up_proj", "v_proj"])
    lora.load(other, tmp_path / "adapter")
    assert responses(other) == responses(engine)


def test_peft_computes_what_we_compute(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    engine = Engine(folder, SMALL)
    lora.add(engine, LoraConfig(rank=4, alpha=6.0))
    shake(engine)
    lora.save(engine.model, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "ours")
    ids = torch.tensor([engine.tokenizer.encode(PROMPTS[1])])
    expected = theirs(ids).logits[0].log_softmax(-1)[range(ids.shape[1] - 1), ids[0, 1:]]
    [done] = engine.generate([list(ids[0])], SamplingParams(max_tokens=1, prompt_logprobs=True))
    assert done.prompt_logprobs is not None
    torch.testing.assert_close(torch.tensor(done.prompt_logprobs[1:]), expected, atol=1e-4, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    again = Engine(folder, SMALL)
    lora.load(again, tmp_path / "theirs")
    assert responses(again) == responses(engine)


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    engine = Engine(folder, SMALL)
    with pytest.raises(ConfigError, match="targets must be among"):
        LoraConfig(targets=("lm_head",))
    with pytest.raises(ConfigError, match="no LoRA adapters"):
        lora.save(engine.model, tmp_path / "none")
    lora.add(engine, LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="already"):
        lora.add(engine, LoraConfig(rank=2))
    lora.save(engine.model, tmp_path / "two")
    wider = Engine(make_model_folder(tmp_path / "wider", "qwen2", intermediate_size=100), SMALL)
    with pytest.raises(CheckpointError, match="has shape"):
        lora.load(wider, tmp_path / "two")
    for change, words in (({"use_dora": True}, "use_dora"), ({"r": 0}, "rank"), ({"target_modules": ["x"]}, "'x'")):
        file = tmp_path / "two" / "adapter_config.json"
        kept = file.read_text()
        file.write_text(json.dumps(json.loads(kept) | change))
        with pytest.raises(CheckpointError, match=words):
            lora.load(Engine(folder, SMALL), tmp_path / "two")
        file.write_text(kept)


def test_merged_adapters_are_in_the_weights_and_in_nothing_else(folder: Path, tmp_path: Path) -> None:
    engine, merged = Engine(folder, SMALL), Engine(folder, SMALL)
    lora.add(engine, LoraConfig(rank=4, alpha=6.0, targets=("v_proj", "up_proj")))
    shake(engine)
    lora.save(engine.model, tmp_path / "adapter")
    lora.merge(merged, tmp_path / "adapter")
    assert not lora.adapters(merged.model) and merged.weights_version > 0
    assert LayerStack.fits(merged.model, merged.runner.pages) and not LayerStack.fits(engine.model, engine.runner.pages)
    for name, layer in lora.adapters(engine.model).items():
        exact = layer.weight.double() + 1.5 * (layer.lora_B.double() @ layer.lora_A.double())
        assert torch.equal(merged.model.get_parameter(f"{name}.weight"), exact.float())
    for (ids, logprobs), (own_ids, own) in zip(responses(engine), responses(merged), strict=True):
        assert ids == own_ids and own == pytest.approx(logprobs, abs=1e-4)
    lora.save(engine.model, tmp_path / "half", dtype=torch.bfloat16)
    lora.merge(Engine(folder, SMALL), tmp_path / "half")
    with pytest.raises(ConfigError, match="already"):
        lora.merge(engine, tmp_path / "adapter")


@pytest.mark.parametrize(("weights", "dtype"), [("int8", "float32"), ("int4-g32", "bfloat16")])
def test_adapters_are_merged_before_weights_are_quantised(
    folder: Path, tmp_path: Path, weights: str, dtype: str
) -> None:
    config = replace(SMALL, dtype=dtype)
    engine, merged = Engine(folder, config), Engine(folder, config)
    lora.add(engine, LoraConfig(rank=4, alpha=6.0))
    shake(engine)
    lora.save(engine.model, tmp_path / "adapter")
    lora.merge(merged, tmp_path / "adapter")
    merged.save(tmp_path / "merged")
    quantised, expected = (Engine(place, replace(config, weights=weights)) for place in (folder, tmp_path / "merged"))
    before = responses(quantised)
    lora.merge(quantised, tmp_path / "adapter")
    assert before != responses(quantised) == responses(expected)


def test_what_a_file_stores_is_not_merged_into(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, SMALL)
    monkeypatch.setattr(engine, "config", replace(SMALL, weights="file"))
    with pytest.raises(ConfigError, match="weights='file'"):
        lora.merge(engine, tmp_path / "adapter")

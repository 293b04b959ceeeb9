"""The engine against `transformers` on the same checkpoint: the same greedy ids, log-probabilities within 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest import Engine, EngineConfig, SamplingParams
from palimpsest.engine.checkpoint import load
from palimpsest.engine.defaults import embedded_model_path
from palimpsest.tests.tiny_models import make_model_folder

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR}),
    ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("qwen3", {"num_key_value_heads": 2}),
    ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN, "num_key_value_heads": 6}),
]


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy ids and their log-probabilities by whole forward passes of a `transformers` model."""
    ids, logprobs = list(prompt), []
    cache = None
    for _ in range(count):
        new = ids if cache is None else ids[-1:]
        with torch.inference_mode():
            out = model(torch.tensor([new]), cache=cache, use_cache=True)
        cache = out.past_key_values
        distribution = out.logits[0, -1].log_softmax(-1)
        ids.append(int(distribution.argmax()))
        logprobs.append(float(distribution[ids[-1]]))
    return ids[len(prompt) :], logprobs


def check_equality(engine: Engine, model: torch.nn.Module, lengths: list[int], count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    vocabulary = engine.model.config.vocab_size
    prompts = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, prompt_logprobs=True)
    for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
        ids, logprobs = greedy(model, prompt, count)
        assert list(completion.token_ids) == ids
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        if len(prompt) > 1:
            with torch.inference_mode():
                distribution = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
            expected = distribution.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
            assert completion.prompt_logprobs is not None
            assert completion.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("model_type", "overrides"), MODELS)
def test_tiny_models(tmp_path: Path, model_type: str, overrides: dict[str, Any], backend: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model_folder(tmp_path, model_type, **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 24, max_step_tokens=700, backend=backend))
    check_equality(engine, model, [1, 2, 17, 300, 3000], 12)


def test_yarn_from_the_engines_configuration_equals_yarn_in_the_models(tmp_path: Path) -> None:
    plain = make_model_folder(tmp_path / "plain", "qwen2", max_position_embeddings=1024)
    yarn = make_model_folder(tmp_path / "yarn", "qwen2", max_position_embeddings=4096, rope_parameters=YARN)
    scaling = {"rope_type": "yarn", "factor": 4.0}
    switched = Engine(plain, EngineConfig(kv_bytes=1 << 23, rope_scaling=scaling))
    configured = Engine(yarn, EngineConfig(kv_bytes=1 << 23))
    assert switched.window == configured.window == 4096
    prompt = [list(range(3, 403)) * 5]
    params = SamplingParams(temperature=0, max_tokens=8)
    assert switched.generate(prompt, params)[0].logprobs == configured.generate(prompt, params)[0].logprobs
    unscaled = Engine(plain, EngineConfig(kv_bytes=1 << 23))
    assert unscaled.window == 1024


@pytest.mark.slow
def test_smollm2() -> None:
    from transformers import AutoModelForCausalLM

    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(load(path, torch.float32).folder, dtype=torch.float32).eval()
    engine = Engine(path, EngineConfig(kv_bytes=1 << 29))
    check_equality(engine, model, [1, 200, 3000], 16)

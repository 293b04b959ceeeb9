"""Configurations check every value where they are made, and do not change afterwards."""

import copy
import dataclasses
import json
import pickle

import pytest
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams, from_mapping
from palimpsest.engine.errors import ConfigError
from palimpsest.engine.templates import FINAL_FORMS, TEMPLATES


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": 5}, "stop must be a list or tuple, got 5"),
        ({"stop": b"end"}, "stop must be a list or tuple, got b'end'"),
        ({"stop": ("a", "")}, "stop must hold non-empty strings, got ''"),
        ({"stop": (3,)}, "stop must hold non-empty strings, got 3"),
        ({"stop_ids": 5}, "stop_ids must be a list or tuple, got 5"),
        ({"stop_ids": (-1,)}, r"stop_ids\[0\] must be a whole number of at least 0, got -1"),
        ({"stop_ids": (True,)}, r"stop_ids\[0\] must be a whole number of at least 0, got True"),
        ({"logit_bias": [1]}, r"logit_bias must be a mapping, got \[1\]"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias key must be a whole number of at least 0, got '5'"),
        ({"logit_bias": {5: "1"}}, r"logit_bias\[5\] must be a number in"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"prompt_logprobs": 1}, "prompt_logprobs must be True or False, got 1"),
        ({"temperature": 1e-6}, r"temperature must be 0 \(greedy\) or at least 1e-05, got 1e-06"),
        ({"temperature": -1}, r"temperature must be a number in \[0.0, 100.0\], got -1"),
        ({"temperature": float("nan")}, "temperature must be a number in .* got nan"),
        ({"temperature": 10**400}, "temperature must be a number in"),
        ({"temperature": "0"}, "temperature must be a number in .* got '0'"),
        ({"top_p": 0}, r"top_p must be a number in \(0.0, 1.0\], got 0"),
        ({"top_k": 1.5}, "top_k must be a whole number of at least 0, got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens \(9\) must not exceed max_tokens \(8\)"),
        ({"seed": 2**64}, r"seed must be below 2\*\*64"),
        ({"top_logprobs": 1025}, "top_logprobs must be at most 1024"),
    ],
)
def test_sampling_params_refuse(values, message):
    with pytest.raises(ConfigError, match=r"SamplingParams\." + message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, float64, got 'float16'"),
        ({"dtype": ["float32"]}, "dtype must be one of"),
        ({"backend": "gpu"}, "backend must be one of"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be a mapping, got 'yarn'"),
        ({"rope_scaling": {"rope_type": "own"}}, r"rope_scaling\['rope_type'\] must be one of linear, llama3, yarn"),
        ({"threads": 10**12}, "threads must be at most 1024, got 1000000000000"),
        ({"threads": 0}, "threads must be a whole number of at least 1, got 0"),
        ({"kv_bytes": "4 GB"}, "kv_bytes must be a whole number of at least 1, got '4 GB'"),
        ({"kv_share": 0}, r"kv_share must be a number in \(0.0, 1.0\], got 0"),
        ({"max_sequences": 9, "max_step_tokens": 8}, r"max_sequences \(9\) must not exceed max_step_tokens \(8\)"),
    ],
)
def test_engine_config_refuses(values, message):
    with pytest.raises(ConfigError, match=r"EngineConfig\." + message):
        EngineConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens must be a whole number of at least 1, got 0"),
        ({"strip_thinking": "no"}, "strip_thinking must be True or False, got 'no'"),
        ({"memory_kv": "moved"}, "memory_kv must be one of exact, carried, got 'moved'"),
        ({"keep_turns": "false"}, "keep_turns must be True or False, got 'false'"),
        ({"sampling": {"temperature": 0}}, "sampling must be SamplingParams, got {'temperature': 0}"),
        ({"sampling": SamplingParams(top_logprobs=1)}, "sampling must leave out top_logprobs"),
        ({"sampling": SamplingParams(prompt_logprobs=True)}, "sampling must leave out top_logprobs"),
        (
            {"template": "boxed"},
            "template must be one of memory_first, chunk_first, a Template or the list of its parts; got 'boxed'",
        ),
        ({"template": FINAL_FORMS["boxed"]}, "template needs exactly the slots chunk, memory, problem"),
        (
            {"final_form": 3},
            "final_form must be one of boxed, boxed_trained, therefore, a Template or the list of its parts; got 3",
        ),
        ({"final_form": TEMPLATES["memory_first"]}, "final_form needs exactly the slots memory, problem"),
    ],
)
def test_agent_config_refuses(values, message):
    with pytest.raises(ConfigError, match=r"AgentConfig\." + message):
        AgentConfig(**values)


def test_sampling_params_can_be_hashed_copied_and_written():
    params = SamplingParams(logit_bias={5: 1.0, 3: -2.0}, stop=["a"], stop_ids=[7])
    same = SamplingParams(logit_bias={3: -2.0, 5: 1.0}, stop="a", stop_ids=(7,))
    assert params == same and hash(params) == hash(same)
    assert params != dataclasses.replace(params, logit_bias={5: 1.0})
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert json.loads(json.dumps(dataclasses.asdict(params)))["logit_bias"] == {"5": 1.0, "3": -2.0}


@pytest.mark.parametrize(
    "change",
    [
        lambda bias: bias.update({1: 1.0}),
        lambda bias: bias.pop(5),
        lambda bias: bias.clear(),
        lambda bias: bias.setdefault(1, 1.0),
        lambda bias: bias.popitem(),
        lambda bias: bias.__setitem__(5, 2.0),
        lambda bias: bias.__delitem__(5),
        lambda bias: bias.__ior__({1: 1.0}),
    ],
)
def test_a_bias_does_not_change(change):
    given = {5: 1.0}
    params = SamplingParams(logit_bias=given)
    with pytest.raises(TypeError, match="does not change"):
        change(params.logit_bias)
    given[6] = 1.0
    assert params.logit_bias == {5: 1.0}


def test_a_rope_scaling_does_not_change():
    given = {"rope_type": "yarn", "factor": 4.0}
    config = EngineConfig(rope_scaling=given)
    given["factor"] = 2.0
    assert config.rope_scaling == {"rope_type": "yarn", "factor": 4.0}


def test_the_lowest_temperature_is_taken():
    assert [SamplingParams(temperature=t).temperature for t in (0, 1e-5)] == [0, 1e-5]


def test_unknown_keys_of_a_mapping_are_refused():
    assert from_mapping(EngineConfig, {"page_size": 8}) == EngineConfig(page_size=8)
    with pytest.raises(ConfigError, match=r"EngineConfig has no key 'page_sise'; did you mean 'page_size'\?"):
        from_mapping(EngineConfig, {"page_sise": 8})
    with pytest.raises(ConfigError, match="EngineConfig has no key 3; known keys: dtype"):
        from_mapping(EngineConfig, {3: 8})

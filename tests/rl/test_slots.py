"""The slots task: documents from (seed, index), what their words say, the oracle's lessons, the model's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest.engine.config import AgentConfig, EngineConfig
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.engine.reference import rotate
from palimpsest.engine.tokenizer import Tokenizer
from palimpsest.rl.tasks.slots import KEYS, UNIT, VALUES, VARIANTS, Slots, SlotsConfig
from palimpsest.rl.tasks.slots_model import CHUNK_FIRST, FINAL, MEMORY_FIRST, write_model
from palimpsest.rl.tasks.slots_oracle import OracleConfig, SlotsOracle
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slots") / "model"
    write_model(path)
    return path


@pytest.fixture(scope="module")
def agent(folder: Path) -> MemoryAgent:
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, threads=1, max_context=256))
    config = AgentConfig(chunk_tokens=32, memory_tokens=6, answer_tokens=4, template=MEMORY_FIRST, final_form=FINAL)
    return MemoryAgent(engine, config)


def facts(words: list[str]) -> Iterator[tuple[str, str]]:
    """The pairs of a document: a key and the word after it."""
    rest = iter(words)
    for word in rest:
        if word in KEYS:
            yield word, next(rest)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("keys", [1, 2, 4])
def test_the_answer_is_what_a_careful_reader_finds(variant: str, keys: int) -> None:
    slots = Slots(SlotsConfig(seed=3, tokens=256, keys=keys, variant=variant))
    for index in range(20):
        problem = slots.problem(index)
        words = "".join(problem.document).split()
        asked = problem.question.split()
        assert len(words) == 256 and len(set(asked)) == keys
        known = dict.fromkeys(asked, "")
        written = 0
        for name, word in facts(words):
            for key in asked:
                if name == key or (variant == "two_hop" and name == known[key]):
                    known[key] = word
                    written += 1
        assert problem.answers == (" ".join(known.values()),)
        assert written == keys * (1 if variant == "plain" else 2)
        assert set(known.values()) <= set(VALUES)


def test_documents_depend_on_seed_and_index_alone() -> None:
    def text(config: SlotsConfig, index: int) -> str:
        return "".join(Slots(config).problem(index).document)

    config = SlotsConfig(seed=1, tokens=UNIT * 100)
    again = Slots(config).problem(5)
    assert text(config, 5) == "".join(again.document) == "".join(again.document)
    assert len({text(config, 5), text(config, 6), text(dataclasses.replace(config, seed=2), 5)}) == 3


def test_a_document_of_a_billion_tokens_begins_at_once() -> None:
    document = Slots(SlotsConfig(tokens=UNIT << 26)).problem(0).document
    assert len(list(islice(document, 3))) == 3


def test_every_word_is_one_token(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    problem = Slots(SlotsConfig(tokens=UNIT * 9000)).problem(0)
    parts = list(tokenizer.encode_pieces(problem.document))
    assert len(parts) > 1  # a long document is not held whole
    assert sum(map(len, parts)) == UNIT * 9000
    for text in (problem.question, f" {problem.answers[0]}", "No previous memory"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) == len(text.split())


def test_transformers_reads_the_folder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert theirs(" ka va").input_ids == list(Tokenizer.load(folder).encode(" ka va"))
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == 714_624


def test_the_heads_of_the_first_layer_begin_by_looking_back(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    query, key = (weights[f"model.layers.0.self_attn.{name}_proj.bias"].view(-1, 32) for name in "qk")
    angles = torch.outer(torch.arange(40.0), 10000.0 ** (-torch.arange(16) / 16))
    now, before = torch.full((1,), 39), torch.arange(40)
    queries = rotate(query[None], now, angles.cos(), angles.sin())[0]
    keys = rotate(key[None].expand(40, -1, -1), before, angles.cos(), angles.sin())[:, 0]
    probabilities = (queries @ keys.T / 32**0.5).softmax(-1)
    assert (39 - probabilities.argmax(-1)).tolist() == [0, 1, 2, 3] and probabilities.amax(-1).min() > 0.8


@pytest.mark.parametrize("template", [MEMORY_FIRST, CHUNK_FIRST])
def test_prompts_are_short(agent: MemoryAgent, template: object) -> None:
    config = dataclasses.replace(agent.config, template=template)
    assert MemoryAgent(agent.engine, config).update_prompt.fixed_tokens <= 30


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_unbiased_oracle_reads_as_a_careful_reader(agent: MemoryAgent, variant: str) -> None:
    oracle = SlotsOracle(agent, OracleConfig(variant=variant, chunk_tokens=(32, 32), noise=0.0, bias=0.0, wrong=0.3))
    told = replaced = 0
    for index in range(100):
        example = oracle.example(index)
        words = agent.tokenizer.decode(example.prompt_ids).replace("No", " No").split()
        asked, rest = words[1:3], words[4:]
        if "text" not in words:
            continue
        end = rest.index("text")
        known: dict[str, str] = dict(facts(rest[:end]))
        known = {key: known.get(key, "none") for key in asked}
        for name, word in facts(rest[end + 1 :]):
            for key in asked:
                if name in (key, known[key]):
                    replaced += known[key] in VALUES
                    known[key] = word
                    told += 1
        expected = "".join(f" {key} {word}" for key, word in known.items())
        assert agent.tokenizer.decode(example.response_ids) == expected
        assert example.response_ids[-1] in agent.tokenizer.eos_ids
    assert told > 20 and replaced > 5


def test_bias_drops_what_was_known(agent: MemoryAgent) -> None:
    def examples(bias: float) -> list[str]:
        oracle = SlotsOracle(agent, OracleConfig(chunk_tokens=(32, 32), noise=0.0, bias=bias))
        return [agent.tokenizer.decode(oracle.example(i).response_ids) for i in range(300)]

    changed = [pair for pair in zip(examples(0.0), examples(1.0), strict=True) if pair[0] != pair[1]]
    assert 300 * 0.85 * 2 / 9 * 0.5 < len(changed) < 300 * 0.85 * 2 / 9 * 1.5
    assert all(right.count("none") + 1 == wrong.count("none") for right, wrong in changed)


def test_bias_keeps_what_was_known_where_the_last_write_counts(agent: MemoryAgent) -> None:
    settings = OracleConfig(variant="last_write_wins", chunk_tokens=(32, 32), noise=0.0, finals=0.0)
    right, wrong = (SlotsOracle(agent, dataclasses.replace(settings, bias=bias)) for bias in (0.0, 1.0))
    kept = 0
    for index in range(100):
        prompt = agent.tokenizer.decode(right.example(index).prompt_ids)
        known = dict(facts(prompt.partition(" memory")[2].partition(" text")[0].split()))
        told, mistaken = (
            dict(facts(agent.tokenizer.decode(oracle.example(index).response_ids).split())) for oracle in (right, wrong)
        )
        assert mistaken == {key: known[key] if known.get(key, "none") != "none" else told[key] for key in told}
        kept += told != mistaken
    assert kept > 20


def test_a_shuffled_memory_has_another_order(agent: MemoryAgent) -> None:
    def orders(shuffled: float) -> list[bool]:
        """Of each memory that knows something: whether its keys stand as in the question. The response's always do."""
        config = OracleConfig(chunk_tokens=(32, 32), keys=(6, 6), noise=0.0, finals=0.0, shuffled=shuffled)
        found = []
        for example in map(SlotsOracle(agent, config).example, range(50)):
            words = agent.tokenizer.decode(example.prompt_ids).split()
            asked, known = words[1:7], words[8 : words.index("text")][::2]
            assert agent.tokenizer.decode(example.response_ids[:-1]).split()[::2] == asked
            if known[0] in KEYS:
                assert sorted(known) == sorted(asked)
                found.append(known == asked)
        return found

    assert len(orders(0.0)) > 30 and all(orders(0.0))
    assert len(orders(1.0)) > 30 and sum(orders(1.0)) < 3


@pytest.mark.parametrize("wrong", [{"tokens": 100}, {"keys": 5}, {"variant": "other"}, {"seed": -1}])
def test_mistakes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SlotsConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keys": [1, 2.5]}, r"keys must be \[least, most\], whole numbers of at least 1, got \[1, 2.5\]"),
        ({"keys": [None, 2]}, "keys must be"),
        ({"keys": [2, 1]}, "keys must be"),
        ({"chunk_tokens": [16, 32.0]}, "chunk_tokens must be .* at least 16"),
        ({"chunk_tokens": [0, 16]}, "chunk_tokens must be .* at least 16"),
        ({"chunk_tokens": [16, 40]}, "chunk_tokens must be multiples of 16"),
        ({"keys": [1, 7]}, "keys must be at most 6"),
        ({"keys": [1, 5], "variant": "two_hop"}, "keys must be at most 4"),
        ({"bias": 2}, "bias"),
    ],
)
def test_mistakes_about_the_oracle_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OracleConfig(**wrong)


def test_the_published_prompts_run(agent: MemoryAgent) -> None:
    published = MemoryAgent(agent.engine, AgentConfig(chunk_tokens=32, memory_tokens=6, answer_tokens=4))
    problem = Slots(SlotsConfig(tokens=64)).problem(0)
    turns = published.read(problem.document, problem.question).turns
    assert [turn.kind for turn in turns] == ["update", "update", "final"]
    assert " fl" in agent.tokenizer.decode(turns[0].prompt_ids) and len(turns[0].prompt_ids) < 200

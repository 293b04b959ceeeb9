"""The facts task: documents from (seed, index), what they tell and how often, what is held out, its oracle."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from palimpsest.engine.config import AgentConfig, EngineConfig
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.rl.tasks import wording
from palimpsest.rl.tasks.facts import BLOCK, NOTHING, VARIANTS, FactsConfig, FactsDocument, Story, write_block
from palimpsest.rl.tasks.facts_oracle import FactsOracle, FactsOracleConfig
from palimpsest.rl.tasks.facts_quiz import FactsQuiz, FactsQuizConfig, Sheet
from palimpsest.rl.tasks.wording import FILLERS, SPLITS, Wording
from palimpsest.tests.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> MemoryAgent:
    folder = make_model_folder(tmp_path_factory.mktemp("model"), "qwen2")
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, threads=1))
    return MemoryAgent(engine, AgentConfig(chunk_tokens=256, memory_tokens=64, answer_tokens=16))


def document(config: FactsConfig, index: int = 0) -> FactsDocument:
    found = config.source().problem(index).document
    assert isinstance(found, FactsDocument)
    return found


def shared(tokens: int) -> Iterator[FactsConfig]:
    for variant in VARIANTS:
        for split in SPLITS:
            yield FactsConfig(7, tokens, variant, split, "prose" if split == "train" else "mixed")


def test_documents_depend_on_seed_and_index_alone_and_any_block_on_none_before_it() -> None:
    config = FactsConfig(seed=1, tokens=BLOCK * 40)
    text = "".join(document(config, 5))
    assert text == "".join(document(config, 5)) == "".join(document(config, 5).block(i) for i in range(40))
    assert len({text, "".join(document(config, 6)), "".join(document(FactsConfig(2, BLOCK * 40), 5))}) == 3
    long = document(FactsConfig(tokens=BLOCK << 24))
    assert len(list(islice(long, 3))) == 3 and long.block((1 << 24) - 1)


def test_the_first_documents_are_what_they_were() -> None:
    """A change of words or of the drawing is a new task: figures of before say nothing about it."""
    problem = FactsConfig(seed=0, tokens=BLOCK).source().problem(0)
    assert (problem.question, problem.answers) == ("How tall is the north wall in Dunmen?", ("30 fathoms",))


@pytest.mark.parametrize("filler", [*FILLERS, "mixed"])
def test_the_answer_stands_once_in_any_filler(filler: str) -> None:
    for index in range(12):
        problem = FactsConfig(3, BLOCK * 12, "one_fact", "held_out", filler).source().problem(index)
        text = "".join(problem.document).casefold()
        assert text.count(problem.answers[0].casefold()) == 1


def test_stories_are_told_in_order_and_once() -> None:
    for config in shared(BLOCK * 12):
        for index in range(15):
            problem = config.source().problem(index)
            story, text = document(config, index).story, "".join(problem.document)
            assert text.casefold().count(problem.answers[0].casefold()) == 1
            assert problem.answers[0] not in problem.question
            places = [text.index(sentence) for sentence in story.sentences]
            assert places == sorted(places) and all(text.count(sentence) == 1 for sentence in story.sentences)
            assert problem.answers[0] in story.memory(len(places)) and story.memory(0) == NOTHING
            assert all(value in story.memory(1) for value in [story.answer_after(1)] if value)


def test_others_share_names_with_what_is_asked_for_but_never_tell_it() -> None:
    near = news = 0
    train = Wording("train")
    for index in range(60):
        rng = random.Random(index)
        story = Story(train, "one_fact", rng)
        others = [story.other(rng) for _ in range(10)]
        assert not any(story.answer.casefold() in sentence.casefold() for sentence in others)
        near += sum(any(words in sentence for words in story.asked.subject.values()) for sentence in others)
        news += sum(any(word in sentence for word in (" now ", "Now ", " has moved ")) for sentence in others)
    assert 150 < near < 550 and 15 < news < 150


def test_what_is_reserved_stands_in_no_filler() -> None:
    rng = random.Random(1)
    story = Story(Wording("train"), "one_fact", rng)
    text = "".join(write_block(story, [], "prose", rng) for _ in range(40))
    story.reserved = ("the ",)  # far more common than any value
    assert "the " in text and "the " not in "".join(write_block(story, [], "prose", rng) for _ in range(40)).casefold()


def test_a_two_hop_question_names_nobody() -> None:
    for index in range(30):
        config = FactsConfig(4, BLOCK * 4, "two_hop")
        problem, story = config.source().problem(index), document(config, index).story
        assert story.answer_after(1) is None and story.asked.value not in problem.question
        assert story.asked.value in story.sentences[1] and story.asked.subject["town"] in problem.question


def texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    else:
        for value in values.values() if isinstance(values, dict) else values:
            yield from texts(value)


def test_nothing_that_is_held_out_is_trained_on() -> None:
    folder = Path(wording.__file__).parent
    facts, filler = (json.loads((folder / name).read_text("utf-8")) for name in ("facts.json", "facts_filler.json"))
    for name in facts["train"]:
        assert not set(facts["train"][name]) & set(facts["held_out"].get(name, [])), name
    for form in facts["families"].values():
        assert form["note"].endswith("{value}.")  # after what a reader of the question knows already
        for part in ("tell", "again", "ask"):
            splits = form.get(part, {"train": [], "held_out": []})
            assert splits.keys() == set(SPLITS) and not set(splits["train"]) & set(splits["held_out"])
    assert not set(texts(filler["train"])) & set(texts(filler["held_out"]))
    train, held_out = Wording("train"), Wording("held_out")
    rng = random.Random(0)
    people = {train.draw("person", rng) for _ in range(3000)}
    assert not people & {held_out.draw("person", rng) for _ in range(3000)} and len(people) > 2500


def test_blocks_have_their_size() -> None:
    """In characters; wording.py holds how many of them are 64 tokens of the embedded model."""
    for filler in FILLERS:
        config = FactsConfig(0, BLOCK * 200, "one_fact", "held_out", filler)
        wanted = 200 * Wording("held_out").characters[filler]
        assert 0.9 < len("".join(document(config))) / wanted < 1.2, filler


def test_the_oracle_keeps_what_the_question_needs(agent: MemoryAgent) -> None:
    oracle = FactsOracle(agent, FactsOracleConfig(seed=1, blocks=(1, 2)))
    decode = agent.tokenizer.decode
    kinds = set()
    for index in range(40):
        example = oracle.example(index)
        assert example == oracle.example(index)
        prompt, response = decode(example.prompt_ids), decode(example.response_ids[:-1])
        assert example.response_ids[-1] == agent.tokenizer.eos_ids[0]
        memory = prompt.partition("<memory>\n")[2].partition("\n</memory>")[0]
        if "<section>" not in prompt:
            assert prompt.endswith("</memory>\n\nYour answer:\n\nassistant\n")
            answer = response.removeprefix("\\boxed{").removesuffix("}")
            assert response == f"\\boxed{{{answer}}}" and (answer in memory) == (answer != "unknown")
            kinds.add("final")
        else:
            chunk = prompt.partition("<section>\n")[2].partition("\n</section>")[0]
            kept = response == memory
            told = [word for word in response.rstrip(".").split() if word[0].isupper() and word in chunk]
            assert kept or told or response == NOTHING, (memory, response)
            kinds.add("kept" if kept else "new" if told else "nothing")
    assert kinds == {"final", "kept", "new", "nothing"}


def test_a_quiz_asks_about_one_chunk_what_it_tells_and_what_it_does_not(agent: MemoryAgent) -> None:
    config = FactsQuizConfig(seed=2, blocks=(2, 2), questions=6, singles=3)
    kinds = Counter[bool]()
    for number in range(8):
        sheet = Sheet(Wording("train"), config, random.Random(number))
        chunk = sheet.chunk.casefold()
        for value, (question, response) in zip(sheet.reserved, sheet.turns, strict=True):
            told = value in chunk
            assert value not in question.casefold() and chunk.count(value) == told
            assert response.casefold().endswith(f"{value}.") if told else response == NOTHING
            kinds[told] += 1
    assert min(kinds.values()) > 12
    examples = [FactsQuiz(agent, config).example(i) for i in range(2 * (6 + 3))]
    decoded = [agent.tokenizer.decode(example.prompt_ids) for example in examples]
    heads = [text.partition("\n</section>")[0] for text in decoded[:6]]
    assert len(set(heads)) == 1 and "<section>" in heads[0] and "<problem>" not in heads[0]
    assert heads[0] != decoded[9].partition("\n</section>")[0] and len(set(decoded)) == len(decoded)
    singles = [*examples[6:9], *examples[15:]]
    assert singles == [FactsOracle(agent, config.oracle).example(i) for i in range(6)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FactsConfig(variant="plain"), "variant"),
        (lambda: FactsConfig(tokens=10), "at least 64"),
        (lambda: FactsConfig(filler="music"), "filler"),
        (lambda: FactsConfig(split="test"), "split"),
        (lambda: FactsOracleConfig(blocks=(3, 1)), "blocks"),
        (lambda: FactsOracleConfig(variants=("plain",)), "variants"),
        (lambda: FactsOracleConfig(variants=()), "at least one"),
        (lambda: FactsOracleConfig(blocks=(0, 1)), "blocks"),
        (lambda: FactsQuizConfig(blocks=(1, 2, 3)), "blocks must be"),
        (lambda: FactsQuizConfig(questions=0), "questions"),
        (lambda: FactsQuizConfig(told=2.0), "told"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()

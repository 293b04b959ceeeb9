"""The bundled document is what its generator writes, is long enough, and holds the facts that facts.json lists."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo"


@pytest.fixture(scope="module")
def document() -> str:
    return (DEMO / "harbour.txt").read_bytes().decode("utf-8")


@pytest.fixture(scope="module")
def facts() -> list[dict[str, object]]:
    return json.loads((DEMO / "facts.json").read_text("utf-8"))


def generated(*arguments: str) -> bytes:
    return subprocess.run(
        [sys.executable, DEMO / "make_harbour.py", *arguments], check=True, capture_output=True
    ).stdout


@pytest.mark.parametrize(("arguments", "name"), [((), "harbour.txt"), (("--facts",), "facts.json")])
def test_generator_gives_the_committed_bytes(arguments: tuple[str, ...], name: str) -> None:
    assert generated(*arguments) == (DEMO / name).read_bytes()


def test_another_seed_tells_another_story(document: str) -> None:
    other = generated("--seed", "7").decode("utf-8")
    assert len(set(other.split("\n\n")) & set(document.split("\n\n"))) < 0.5 * document.count("\n\n")


def test_every_answer_stands_at_its_offset(document: str, facts: list[dict[str, object]]) -> None:
    for fact in facts:
        assert document.startswith(fact["answer"], fact["offset"]), fact


def test_facts_are_many_distinct_and_spread_over_the_document(document: str, facts: list[dict[str, object]]) -> None:
    assert len(facts) >= 30
    assert len({fact["question"] for fact in facts}) == len(facts)
    per_tenth = Counter(10 * fact["offset"] // len(document) for fact in facts)
    assert all(per_tenth[tenth] >= 3 for tenth in range(10)), per_tenth


def test_nothing_of_the_notation_is_left(document: str) -> None:
    assert not set("[]{}|=") & set(document)


def test_document_is_long_enough_and_varied(document: str) -> None:
    """At least 20,000 tokens of SmolLM2 need some 1.33 tokens a word here: 15,500 words is 20,600."""
    words = document.split()
    assert len(words) >= 15_500
    assert len({word.strip('.,;:"?').lower() for word in words}) >= 2_500
    sentences = Counter(document.replace("\n", " ").split(". "))
    assert sum(count for count in sentences.values() if count > 3) < 0.03 * sentences.total()


def test_the_demo_question_has_its_answers(facts: list[dict[str, object]]) -> None:
    question = (DEMO / "question.txt").read_text("utf-8").strip()
    assert question == "Which ship brought the great bell of St Brennick's to Thornhithe, and whose will paid for it?"
    asked = [fact["question"] for fact in facts]
    assert "Which ship brought the great bell of St Brennick's to Thornhithe?" in asked
    assert "Whose will paid for the great bell of St Brennick's?" in asked

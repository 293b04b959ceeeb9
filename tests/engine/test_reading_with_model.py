"""Readings on the real engine with a tiny random model: side by side = one by one, and kill -9 with --resume."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.engine.reading import TurnEnded
from palimpsest.tests.tiny_models import make_model_folder

QUESTION = "Who kept the lighthouse?"
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=11)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def engine(model):
    """In float64, so that no near-tie between two tokens turns on the order of a sum."""
    return Engine(
        model, EngineConfig(dtype="float64", backend="reference", threads=1, max_sequences=3, kv_bytes=1 << 22)
    )


def story(first, last):
    return "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(first, last))


def tokens(reading):
    return [(turn.prompt_ids, turn.response_ids) for turn in reading.turns]


def agent_with(engine, sampling):
    return MemoryAgent(engine, AgentConfig(chunk_tokens=60, memory_tokens=12, answer_tokens=8, sampling=sampling))


def test_side_by_side_is_one_by_one(engine):
    agent = agent_with(engine, SamplingParams(temperature=0.0))
    tasks = [(story(1800, 1800 + years), QUESTION) for years in (3, 9, 0, 5, 1)]
    together = agent.read_many(tasks)
    assert [len(reading.turns) > 1 for reading in together] == [True, True, False, True, True]
    for reading, task in zip(together, tasks, strict=True):
        assert tokens(agent.read(*task)) == tokens(reading)
    assert not engine.unfinished


def test_a_sampled_reading_does_not_depend_on_its_neighbours(engine):
    agent = agent_with(engine, SAMPLED)
    document = story(1800, 1806)
    crowd = agent.read_many([(story(1700, 1708), QUESTION), (document, QUESTION), (document, QUESTION)])
    alone = agent.read_many([("", QUESTION), ("", QUESTION), (document, QUESTION)])
    assert tokens(crowd[2]) == tokens(alone[2])
    assert tokens(crowd[1]) != tokens(crowd[2])  # equal tasks draw different numbers
    assert crowd[2].turns[0].response_ids != crowd[2].turns[1].response_ids


def test_a_seed_repeats_a_reading(engine):
    first, again = (agent_with(engine, SAMPLED).read(story(1800, 1806), QUESTION) for _ in range(2))
    assert tokens(first) == tokens(again)
    for turn, same in zip(first.turns, again.turns, strict=True):
        assert turn.logprobs == pytest.approx(same.logprobs, abs=1e-9)  # the second time some pages are cached


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_answer(model, tmp_path):
    """kill -9 of the real command while it reads; the resumed one prints what an undisturbed one prints."""
    (tmp_path / "story.txt").write_text(story(1800, 1860))
    limits = ["--chunk-tokens", "100", "--memory-tokens", "16", "--answer-tokens", "16", "--seed", "5"]
    command = [sys.executable, "-m", "palimpsest", "ask", str(tmp_path / "story.txt"), QUESTION, "--model", str(model)]
    command += [*limits, "--backend", "reference", "--threads", "1", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*options):
        done = subprocess.run([*command, *options], env=environment, capture_output=True, check=True, text=True)
        return json.loads(done.stdout)

    trace = tmp_path / "trace.jsonl"
    killed = subprocess.Popen([*command, "--trace", str(trace)], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (trace.exists() and trace.read_bytes().count(b"\n") > 4):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    written = trace.read_bytes().count(b"\n") - 1
    resumed, expected = run("--trace", str(trace), "--resume"), run()
    assert (resumed["answer"], resumed["memory"]) == (expected["answer"], expected["memory"])
    assert expected["counters"]["turns"] > written > 3


@pytest.mark.slow
def test_memory_stays_flat_over_300_000_tokens(model):
    """Resident memory from the fifth chunk to the last, with a document that is generated as it is read."""
    engine = Engine(model, EngineConfig(backend="reference", max_sequences=1, kv_bytes=1 << 23))
    config = AgentConfig(
        chunk_tokens=2000, memory_tokens=16, answer_tokens=8, sampling=SamplingParams(temperature=0.0), keep_turns=False
    )
    document = (story(year, year + 50) for year in itertools.count(1000, 50))
    process, resident = psutil.Process(), []
    for event in MemoryAgent(engine, config).stream(document, QUESTION):
        if isinstance(event, TurnEnded) and event.turn.kind == "update":
            resident.append(process.memory_info().rss)
            if event.document_tokens >= 300_000:
                break
    assert len(resident) == 150
    assert max(resident[4:]) <= 1.05 * resident[4]

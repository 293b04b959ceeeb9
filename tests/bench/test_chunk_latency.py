"""The benchmark of turns as a user runs it, on a tiny model and with peers that only pretend."""

import json
from array import array

import pytest
import torch
from palimpsest.bench import chunk_latency, limits, trained_agent
from palimpsest.bench.carrying import price
from palimpsest.bench.chunk_latency import Work
from palimpsest.bench.endurance import endurance
from palimpsest.bench.forced import forced, spoilt
from palimpsest.bench.ours import VARIANTS, Ours, tokens
from palimpsest.bench.readings import ForcedReading
from palimpsest.bench.turns import Turns
from palimpsest.cli import main
from palimpsest.engine import carried, lora, reading_file
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.lora import LoraConfig


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch):
    monkeypatch.setattr(limits, "READ_BYTES", 2**20)
    monkeypatch.setattr(limits, "REPEATS", 2000)


@pytest.fixture
def ours(tiny_model):
    return Ours(tiny_model, VARIANTS["float32"], sequences=4, longest=800, threads=1, drafts=True)


def test_every_part_as_a_user_runs_it(tiny_model, peers_folder, capsys, monkeypatch):
    for name, small in {
        "WORKS": (Work(20, 60, (100, 80, 0)),), "OPEN": Work(20, 60), "FIRST_TOKEN_WORK": Work(20, 60), "TURNS": 3,
        "CARRY": Work(20, 60),
        "GROUP": 3, "GROUP_MEMORY": 8, "GROUP_CHUNK": 40,
        "WORKLOAD": {"chunks": 2, "chunk": 50, "memory": 10, "answer": 4},
    }.items():  # fmt: skip
        monkeypatch.setattr(chunk_latency, name, small)
    folder = peers_folder({"arguments": ["1"]}, {"engine": "other", "dtype": "q8_0"})
    options = ["--rounds", "2", "--threads", "1", "--model", tiny_model, "--peers", str(folder)]
    assert main(["bench", "chunk_latency", *options]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    works = [one["work"] for one in found["rows"]]
    assert works == [
        *["turn20"] * 6, *["read20"] * 5, *["first20"] * 2, *["group3"] * 2, *["carry20"] * 4, *["workload"] * 2
    ]  # fmt: skip
    assert [one["engine"] for one in found["rows"] if one.get("divergence", 0) > 0] == [
        "memory first carried", "chunk first carried"
    ]  # fmt: skip
    targets = {target["name"]: target["value"] for target in found["targets"]}
    assert targets["read20.60.float32.needed_over_prefilled"] == 1.0
    assert targets["group3.40.float32.kv_bytes"] > 1.5
    assert targets["workload.50.float32.vs_best_peer"] > 0
    drafted = next(one["drafts"]["memory"] for one in found["rows"] if one["work"] == "workload")
    assert f"memory: {drafted['accepted']} of {drafted['proposed']} drafted tokens right" in printed
    assert "fake differs first in turn 0, token 0" in printed
    asked = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    assert [question["op"] for question in asked] == ["turn"] * 9 + ["quit"] * 2  # 2 chunks and the answer, 3 rounds


def test_a_trained_agent_reads_as_its_folder_says(tiny_model, peers_folder, tmp_path, capsys, monkeypatch):
    engine = Engine(tiny_model, EngineConfig(kv_bytes=1 << 20, threads=1))
    lora.add(engine, LoraConfig(rank=2))
    lora.save(engine.model, tmp_path / "adapter")
    reading_file.write(tmp_path / "adapter", AgentConfig(64, 10, 4))
    monkeypatch.setattr(trained_agent, "CHUNKS", 2)
    folder = peers_folder({"arguments": ["1"]})
    options = ["--rounds", "1", "--threads", "1", "--model", tiny_model, "--adapter", str(tmp_path / "adapter")]
    assert main(["bench", "chunk_latency", *options, "--peers", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    off, mine, peer = found["rows"]
    assert off["engine"].endswith("drafts off") and mine["context"] == 64 and peer["engine"].startswith("fake")
    assert 0 <= mine["undecoded"] <= 1 and mine["seconds_per_chunk"] > 0 and "drafts" in mine
    assert [target["name"] for target in found["targets"]] == ["agent.64.float32.vs_best_peer"]
    asked = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    turns = [question["n"] for question in asked if question["op"] == "turn"]
    assert len(turns) >= 6 and max(turns) <= 10
    assert main(["bench", "chunk_latency", *options, "--quick"]) == 2
    assert "leave --works, --quick" in capsys.readouterr().err


def test_quick_is_a_part_of_it(tiny_model, capsys):
    assert chunk_latency.main(["--quick", "--rounds", "1", "--threads", "1", "--model", tiny_model]) == 0
    assert {one["work"] for one in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]} == {"turn32", "read32"}


@pytest.mark.parametrize(
    ("works", "rows", "targets"),
    [
        ("turn32.128", 5, 3),
        ("turn32.128.100,turn32.128.one_pass", 2, 1),
        ("turn32.128.first_0", 1, 0),
        ("read32.128.80_closed,read32.128.100", 2, 0),
    ],
)
def test_works_choose_sections_and_rows(tiny_model, capsys, works, rows, targets):
    options = ["--quick", "--rounds", "1", "--threads", "1", "--model", tiny_model]
    assert chunk_latency.main(["--works", works, *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (len(found["rows"]), len(found["targets"])) == (rows, targets)
    assert {one["work"] for one in found["rows"]} == {works.split(".")[0]}
    assert chunk_latency.main(["--works", "turn32.128.99", *options]) == 2
    assert "there are turn32.128.off, turn32.128.one_pass, turn32.128.100" in capsys.readouterr().err


def test_a_forced_response_says_what_the_script_says(ours):
    said = array("i", [5, 6, 7, ours.engine.tokenizer.eos_ids[0]])
    params = SamplingParams(temperature=0, max_tokens=9)
    with forced({(1, 0): said}):
        free, scripted = ours.engine.generate([[9, 8], [9, 8]], params)
    assert scripted.token_ids == said
    assert free.token_ids == ours.engine.generate([[9, 8]], params)[0].token_ids


@pytest.mark.parametrize("right", [100, 95, 80, 50, 0])
def test_a_spoilt_memory_keeps_its_share_evenly(right):
    memory = array("i", tokens(200, 1, 500))
    kept = [a == b for a, b in zip(memory, spoilt(memory, right, 2, 500), strict=True)]
    assert sum(kept) == 2 * right
    assert max((kept[i : i + 20].count(True) for i in range(180)), default=0) <= right / 5 + 1


def test_turns_keep_nothing_resident_but_the_head(ours):
    turns = Turns(ours.engine, 40, 100)
    added = []
    add = ours.engine.add

    def adding(*args, **kwargs):
        added.append(add(*args, **kwargs))
        return added[-1]

    ours.engine.add = adding
    for way in (turns.plain, turns.surprised, lambda: turns.drafted(100), turns.one_pass):
        way()
    assert [sequence.counters.cached_tokens // 16 for sequence in added[1:]] == [7] * (len(added) - 1)
    steps = [sequence.counters.decode_steps for sequence in added]
    assert steps[0] == 40  # drafts off
    assert steps[2:] == [0, 0, 0, 0]  # all right, thrice, and one pass


def test_readings_take_turns_without_disturbing_each_other(ours):
    ways = [(0, False, False), (100, True, True), (80, True, False)]
    readings = [
        ForcedReading(ours.engine, memory=40, chunk=60, right=right, drafts=drafts, open_prompt=is_open, seed=100 * i)
        for i, (right, drafts, is_open) in enumerate(ways)
    ]
    for _ in range(4):
        for reading in readings:
            reading.turn()
    assert [reading.last.index for reading in readings] == [3, 3, 3]
    assert [len(reading.last.response_ids) for reading in readings] == [41, 41, 41]
    steps = [reading.last.decode_steps for reading in readings]
    assert steps[0] == 40
    assert steps[1] == 0
    assert 8 <= steps[2] <= 12
    for reading in readings:
        reading.close()
    assert not ours.engine.scheduler.unfinished


def test_endurance_compares_the_first_turns_with_the_last(ours, monkeypatch):
    monkeypatch.setattr("palimpsest.bench.endurance.STRETCH", 2)
    torch.set_num_threads(2)
    found = endurance(ours.engine, 5)
    assert torch.get_num_threads() == 2
    assert 0 < found.first_seconds < 60
    assert found.last_bytes >= found.first_bytes * 0.5 > 0


def test_what_is_not_moved_costs_nothing(ours, monkeypatch):
    config = AgentConfig(60, 40, 4, sampling=SamplingParams(temperature=0))
    paid = price(ours.engine, config, 3)
    assert 0 < paid.divergence < 1
    assert 0 < paid.agreement <= 1
    monkeypatch.setattr(carried, "RECOMPUTED", 1000)  # so that every memory is computed
    monkeypatch.setattr("palimpsest.engine.residents.RECOMPUTED", 1000)
    free = price(ours.engine, config, 3)
    assert (free.divergence, free.agreement, free.tokens) == (0.0, 1.0, paid.tokens)

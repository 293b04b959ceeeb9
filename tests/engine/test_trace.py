"""Traces: every turn is on disk when it is reported, and a cut trace leads to the same answer."""

import dataclasses
import json
import os

import pytest
from palimpsest.engine.config import AgentConfig, SamplingParams
from palimpsest.engine.errors import RequestError, TraceError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.engine.reading import Answered, Turn, TurnEnded, TurnStarted
from palimpsest.engine.templates import TEMPLATES, Template
from palimpsest.engine.tokenizer import Tokenizer
from palimpsest.engine.trace import traced
from palimpsest.tests.engine.scripted_engine import ScriptedEngine
from palimpsest.tests.tiny_models import make_tokenizer_folder

QUESTION = "Who kept the lighthouse?"
DOCUMENT = "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(1800, 1816))
CONFIG = AgentConfig(chunk_tokens=80, memory_tokens=40, answer_tokens=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "qwen2"))


def make_agent(tokenizer, config=CONFIG):
    """What it says depends on the whole prompt and on the turn, so that a wrong resumption shows in the answer."""

    def respond(sequence):
        return [*tokenizer.encode(f"{sum(sequence.tokens) * 31 + sequence.turn} lamps"), *tokenizer.eos_ids]

    return MemoryAgent(ScriptedEngine(tokenizer, respond), config)


def read(agent, path, document=DOCUMENT, question=QUESTION, **options):
    *_, last = traced(agent, document, question, path, **options)
    assert isinstance(last, Answered)
    return last.reading


@pytest.fixture
def whole(tokenizer, tmp_path):
    """A finished trace and its reading."""
    path = tmp_path / "whole.jsonl"
    return path, read(make_agent(tokenizer), path, document_sha256="abc")


def test_the_file_is_a_header_and_a_line_per_turn(whole, tokenizer):
    path, reading = whole
    header, *turns = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(header) == ["format", "document_sha256", "question", "model", "config"]
    assert header["format"] == 1
    assert (header["document_sha256"], header["question"]) == ("abc", QUESTION)
    assert header["model"]["tokenizer"] == tokenizer.fingerprint()
    assert header["config"]["chunk_tokens"] == 80
    assert len(turns) == len(reading.turns) > 4
    for line, turn in zip(turns, reading.turns, strict=True):
        values = {field.name: getattr(turn, field.name) for field in dataclasses.fields(Turn)}
        values |= {"prompt_ids": list(turn.prompt_ids), "response_ids": list(turn.response_ids)}
        assert line == values


def test_a_turn_is_in_the_file_when_it_is_reported(tokenizer, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    path = tmp_path / "trace.jsonl"
    for event in traced(make_agent(tokenizer), DOCUMENT, QUESTION, path):
        if isinstance(event, TurnEnded):
            assert synced[-1] == path.stat().st_size
            assert json.loads(path.read_text().splitlines()[-1])["index"] == event.turn.index


def cuts(path):
    """Lengths that a killed process can leave: in the header, between lines, in a line, before its line break."""
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
    return [0, 10, ends[0], ends[0] + 5, ends[2], ends[2] + 1000, ends[3] - 1, ends[-2], ends[-1] - 1, ends[-1]]


@pytest.mark.parametrize("cut", range(10))
def test_a_cut_trace_leads_to_the_same_answer(whole, tokenizer, cut):
    path, reading = whole
    complete = path.read_bytes()
    path.write_bytes(complete[: cuts(path)[cut]])
    agent = make_agent(tokenizer)
    kept = max(0, path.read_bytes().count(b"\n") - 1)
    resumed = read(agent, path, document=[DOCUMENT[:500], DOCUMENT[500:]], resume=True, document_sha256="abc")
    assert resumed.answer == reading.answer
    without_time = [dataclasses.replace(turn, seconds=0) for turn in reading.turns]
    assert [dataclasses.replace(turn, seconds=0) for turn in resumed.turns] == without_time
    assert resumed.counters.document_tokens == reading.counters.document_tokens
    assert [sequence.turn for sequence, _ in agent.engine.added] == list(range(kept, len(reading.turns)))
    lines = [json.loads(line) | {"seconds": 0} for line in path.read_bytes().splitlines()]
    assert lines == [json.loads(line) | {"seconds": 0} for line in complete.splitlines()]


def test_closing_the_stream_leaves_a_trace_to_resume(tokenizer, tmp_path):
    path = tmp_path / "trace.jsonl"
    events = traced(make_agent(tokenizer), DOCUMENT, QUESTION, path)
    while not (isinstance(event := next(events), TurnStarted) and event.index == 2):
        pass
    events.close()
    agent = make_agent(tokenizer)
    assert read(agent, path, resume=True).answer == make_agent(tokenizer).read(DOCUMENT, QUESTION).answer
    assert agent.engine.added[0][0].turn == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": "Why?"}, r"question was 'Who kept the lighthouse\?' and is now 'Why\?'"),
        ({"document_sha256": "def"}, "document_sha256 was 'abc' and is now 'def'"),
        ({"config": dataclasses.replace(CONFIG, chunk_tokens=81)}, r"config\.chunk_tokens was 80 and is now 81"),
        ({"config": dataclasses.replace(CONFIG, sampling=SamplingParams(seed=3))}, r"config\.sampling\.seed was 0 and"),
        ({"document": "Another" + DOCUMENT}, "turn 0 of .* had another prompt, .* 'chunk' on: the document differs"),
        ({"document": DOCUMENT + "More."}, "turn 4 of .* the document differs|has another length now"),
        ({"document": DOCUMENT[:300]}, "the document differs|has another length now"),
    ],
)
def test_a_trace_of_something_else_is_refused(whole, tokenizer, change, message):
    path, _ = whole
    before = path.read_bytes()
    agent = make_agent(tokenizer, change.pop("config", CONFIG))
    with pytest.raises(TraceError, match=message):
        read(agent, path, resume=True, **({"document_sha256": "abc"} | change))
    assert path.read_bytes() == before
    assert agent.engine.added == []


def test_an_own_template_is_part_of_the_configuration(tokenizer, tmp_path):
    path = tmp_path / "trace.jsonl"
    own = Template(("Mind the lamps. ", *TEMPLATES["memory_first"].parts))
    agent = make_agent(tokenizer, dataclasses.replace(CONFIG, template=own))
    answer = read(agent, path).answer
    assert read(agent, path, resume=True).answer == answer
    with pytest.raises(TraceError, match=r"config\.template was"):
        read(make_agent(tokenizer), path, resume=True)


def test_a_changed_chat_template_is_found_in_the_prompts(whole, tokenizer, monkeypatch):
    path, _ = whole
    chat = tokenizer.chat
    monkeypatch.setattr(tokenizer, "chat", lambda messages: chat(messages).replace("Qwen", "Qwen 2"))
    with pytest.raises(TraceError, match="segment 'head' on: the chat template is another one, or it writes the date"):
        read(make_agent(tokenizer), path, resume=True, document_sha256="abc")


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (0, b"palimpsest", "line 1 of .* is not JSON"),
        (0, b"[1]", "line 1 of .* is not a JSON object"),
        (0, b'{"format": 2}', "not a trace of format 1: its first line has format 2"),
        (2, b'{"kind": "upd', "line 3 of .* is not JSON"),
        (2, b'{"kind": "update"}', "line 3 of .* is not a turn"),
        (2, None, "turn 1 of this reading is update, that of .* is update 2"),
    ],
)
def test_a_damaged_trace_is_refused(whole, tokenizer, number, line, message):
    path, _ = whole
    lines = path.read_bytes().splitlines()
    lines[number : number + 1] = [] if line is None else [line]
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(TraceError, match=message):
        read(make_agent(tokenizer), path, resume=True, document_sha256="abc")


def test_a_file_in_the_way_and_a_missing_one_are_refused(whole, tokenizer, tmp_path):
    path, _ = whole
    before = path.read_bytes()
    with pytest.raises(TraceError, match=r"exists; resume it \(--resume\)"):
        read(make_agent(tokenizer), path)
    assert path.read_bytes() == before
    with pytest.raises(TraceError, match="No such file"):
        read(make_agent(tokenizer), tmp_path / "absent.jsonl", resume=True)
    with pytest.raises(TraceError, match="cannot write the trace"):
        read(make_agent(tokenizer), tmp_path / "absent" / "trace.jsonl")


@pytest.mark.parametrize("content", [b"my only copy", b'{"format": 1', b"a line\nmore", b'{"format": 1}\n'])
def test_a_file_that_is_no_trace_is_never_written_to(tokenizer, tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    if content == b'{"format": 1':  # what a kill in the middle of the first line leaves of a trace
        assert read(make_agent(tokenizer), path, resume=True).answer
        return
    with pytest.raises(TraceError, match=r"is no trace|is not JSON|belongs to another"):
        read(make_agent(tokenizer), path, resume=True)
    assert path.read_bytes() == content


@pytest.mark.parametrize("path", [None, 3, "a\0"])
def test_what_is_no_path_is_refused(tokenizer, path):
    for resume in (False, True):
        with pytest.raises(TraceError, match="a trace is named by a path"):
            read(make_agent(tokenizer), path, resume=resume)


def test_a_pipe_is_no_trace(tokenizer, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="no regular file"):
        read(make_agent(tokenizer), tmp_path / "pipe", resume=True)


def test_a_model_may_move_but_not_change(whole, tokenizer):
    path, reading = whole
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    changed = make_agent(tokenizer)
    changed.engine.weights = "of another model"
    with pytest.raises(TraceError, match=r"model\.weights was 'of the script' and is now 'of another model'"):
        read(changed, path, resume=True, document_sha256="abc")
    moved = make_agent(tokenizer)
    moved.engine.model_path = "/elsewhere"
    assert read(moved, path, resume=True, document_sha256="abc").answer == reading.answer


def test_a_chunk_size_that_the_pool_lowered_is_recorded(tokenizer, tmp_path):
    path = tmp_path / "trace.jsonl"
    agent = make_agent(tokenizer)
    agent.engine.longest = agent.update_prompt.fixed_tokens + len(tokenizer.encode(QUESTION)) + 2 * 40 + 70
    with pytest.warns(UserWarning, match="chunk_tokens=80 lowered to"):
        read(agent, path)
    with pytest.raises(TraceError, match=r"config\.chunk_tokens was 70 and is now 80"):
        read(make_agent(tokenizer), path, resume=True)


def test_a_full_disk_is_an_error_before_the_turn_is_reported(tokenizer, tmp_path, monkeypatch):
    events = traced(make_agent(tokenizer), DOCUMENT, QUESTION, tmp_path / "trace.jsonl")
    next(events)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraceError, match="No space left"):
        while not isinstance(next(events), TurnEnded):
            pass


def test_a_refused_question_leaves_no_file(tokenizer, tmp_path):
    with pytest.raises(RequestError, match="too small"):
        read(make_agent(tokenizer), tmp_path / "trace.jsonl", question="word " * 9000)
    assert list(tmp_path.iterdir()) == []

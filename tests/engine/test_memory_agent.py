"""The agent's loop on a scripted engine: which turns it takes, what it hands on, and how it ends."""

import dataclasses
import itertools
import json
from array import array

import pytest
from palimpsest.engine.config import AgentConfig, SamplingParams
from palimpsest.engine.errors import ConfigError, RequestError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.engine.reading import Answered, Chunks, TextProgress, TurnEnded, TurnStarted
from palimpsest.engine.thinking import after_thinking
from palimpsest.engine.tokenizer import Tokenizer
from palimpsest.tests.engine.scripted_engine import ScriptedEngine
from palimpsest.tests.tiny_models import make_tokenizer_folder

QUESTION = "Who kept the lighthouse?"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "qwen2"))


@pytest.fixture
def eos(tokenizer):
    return tokenizer.eos_ids[0]


def says(tokenizer, *texts):
    """A script: response i spells texts[i] and EOS; the last text goes on for ever."""
    return lambda sequence: [*tokenizer.encode(texts[min(sequence.turn, len(texts) - 1)]), tokenizer.eos_ids[0]]


def document_of(tokenizer, tokens):
    """A text of exactly so many tokens."""
    text = "x" * tokens
    assert len(tokenizer.encode(" ".join(text))) >= tokens
    ids = tokenizer.encode(" ".join(text))[:tokens]
    return tokenizer.decode(ids)


def prompts(engine):
    return [{segment.name: segment.ids for segment in segments} for _, segments in engine.added]


CONFIG = AgentConfig(chunk_tokens=10, memory_tokens=20, answer_tokens=30)


@pytest.mark.parametrize(("tokens", "chunks"), [(0, []), (1, [1]), (10, [10]), (11, [10, 1]), (30, [10, 10, 10])])
def test_chunks_cover_the_document_once(tokenizer, tokens, chunks):
    document = document_of(tokenizer, tokens)
    engine = ScriptedEngine(tokenizer, says(tokenizer, "memory"))
    reading = MemoryAgent(engine, CONFIG).read(document, QUESTION)
    *updates, final = prompts(engine)
    assert [len(prompt["chunk"]) for prompt in updates] == chunks
    assert sum((prompt["chunk"] for prompt in updates), array("i")) == tokenizer.encode(document)
    assert "chunk" not in final
    assert [turn.kind for turn in reading.turns] == ["update"] * len(chunks) + ["final"]
    assert [turn.index for turn in reading.turns] == list(range(len(chunks) + 1))
    assert reading.counters.document_tokens == tokens
    assert reading.counters.turns == len(chunks) + 1


def test_an_empty_document_is_answered_from_no_previous_memory(tokenizer):
    for document in ("", [], ["", ""]):
        engine = ScriptedEngine(tokenizer, says(tokenizer, "nobody knows"))
        reading = MemoryAgent(engine, CONFIG).read(document, QUESTION)
        (only,) = prompts(engine)
        assert tokenizer.decode(only["memory"]) == reading.memory == "No previous memory"
        assert reading.answer == "nobody knows"


def test_each_memory_is_the_response_before_in_its_own_tokens(tokenizer, eos):
    odd = array("i", [tokenizer.encode(letter)[0] for letter in "the "])
    assert tokenizer.encode(tokenizer.decode(odd)) != odd  # re-tokenised it would change
    engine = ScriptedEngine(tokenizer, lambda sequence: [*odd, eos])
    reading = MemoryAgent(engine, CONFIG).read(document_of(tokenizer, 25), QUESTION)
    assert [prompt["memory"] for prompt in prompts(engine)[1:]] == [odd] * 3
    assert reading.memory == tokenizer.decode(odd)
    assert reading.turns[0].response_ids == array("i", [*odd, eos])
    assert reading.turns[1].prompt_ids == engine.added[1][0].tokens[: engine.added[1][0].prompt_length]
    assert reading.turns[1].logprobs == [-float(token) for token in [*odd, eos]]


def test_limits_and_random_streams_of_the_turns(tokenizer):
    engine = ScriptedEngine(tokenizer, says(tokenizer, "memory"))
    sampling = SamplingParams(temperature=0.5, seed=7, max_tokens=3)
    MemoryAgent(engine, dataclasses.replace(CONFIG, sampling=sampling)).read(document_of(tokenizer, 20), QUESTION)
    assert [(s.turn, s.sample, s.params.max_tokens, s.params.seed) for s, _ in engine.added] == [
        (0, 0, 20, 7),
        (1, 0, 20, 7),
        (2, 0, 30, 7),
    ]


def test_a_memory_cut_at_its_limit_is_used_as_it_is_and_counted(tokenizer):
    engine = ScriptedEngine(tokenizer, says(tokenizer, "word " * 40))
    reading = MemoryAgent(engine, CONFIG).read(document_of(tokenizer, 20), QUESTION)
    assert [len(prompt["memory"]) for prompt in prompts(engine)[1:]] == [20, 20]
    assert reading.counters.truncated_memories == 2
    assert reading.turns[-1].finish_reason == "length"  # the answer was cut too, and is no memory


def test_an_empty_memory_is_an_empty_block_and_counted(tokenizer):
    engine = ScriptedEngine(tokenizer, says(tokenizer, ""))
    reading = MemoryAgent(engine, CONFIG).read(document_of(tokenizer, 10), QUESTION)
    final = tokenizer.decode(engine.added[-1][0].tokens)
    assert "<memory>\n\n</memory>" in final
    assert (reading.memory, reading.answer, reading.counters.empty_memories) == ("", "", 1)


def test_stop_strings_end_a_memory_at_the_last_whole_token_before(tokenizer):
    before = tokenizer.encode("The keeper\n")
    crossing = tokenizer.encode("END")
    config = dataclasses.replace(CONFIG, sampling=SamplingParams(stop=("ND",)))
    engine = ScriptedEngine(tokenizer, lambda sequence: [*before, *crossing, *tokenizer.encode(" more")])
    MemoryAgent(engine, config).read(document_of(tokenizer, 10), QUESTION)
    memory = prompts(engine)[1]["memory"]
    kept = [token for token in crossing if tokenizer.decode([token]) == "E"]
    assert memory == array("i", [*before, *kept])


def test_stop_ids_and_special_tokens_end_a_memory(tokenizer):
    stop_id = tokenizer.encode("!")[0]
    config = dataclasses.replace(CONFIG, sampling=SamplingParams(stop_ids=(stop_id,), stop=("never",)))
    engine = ScriptedEngine(tokenizer, lambda sequence: [*tokenizer.encode("kept "), stop_id])
    MemoryAgent(engine, config).read(document_of(tokenizer, 10), QUESTION)
    assert prompts(engine)[1]["memory"] == tokenizer.encode("kept ")


@pytest.fixture(scope="module")
def crossing_tokenizer(tmp_path_factory):
    """A vocabulary without a token for the tag, and merges across its ends, as Qwen2.5 has."""
    folder = make_tokenizer_folder(tmp_path_factory.mktemp("crossing"), "qwen2")
    definition = json.loads((folder / "tokenizer.json").read_text())
    model = definition["model"]
    for pair in ((".", "<"), (".<", "/"), (">", "Ċ"), (">Ċ", "Ċ")):  # Ċ is how a byte-level vocabulary writes \n
        model["merges"].insert(0, list(pair))
        model["vocab"].setdefault("".join(pair), len(model["vocab"]) + 9)
    model["merges"].sort(key=lambda merge: len("".join(merge)) if merge[0][0] in ".>" else 0)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("said", "memory"),
    [
        ("<think>a</think>b</think>\n kept ", "\n kept "),
        ("<think>a lamp.</think>\n\nkept 中🙂", "kept 中🙂"),
        ("no tag", "no tag"),
        ("<think>cut at its lim", "<think>cut at its lim"),
        ("all thought</think>", ""),
    ],
)
def test_thinking_is_stripped_on_request(crossing_tokenizer, said, memory):
    tokenizer, ids = crossing_tokenizer, crossing_tokenizer.encode(said)
    config = dataclasses.replace(CONFIG, memory_tokens=60)
    for strip, expected in ((True, memory.lstrip("\n")), (False, said)):
        engine = ScriptedEngine(tokenizer, lambda sequence: [*ids, *tokenizer.eos_ids])
        MemoryAgent(engine, dataclasses.replace(config, strip_thinking=strip)).read("text", QUESTION)
        kept = prompts(engine)[1]["memory"]
        assert kept == ids[len(ids) - len(kept) :]
        assert tokenizer.decode(kept).lstrip("\n") == expected


def test_a_token_that_the_tag_shares_goes_with_it(crossing_tokenizer):
    tokenizer = crossing_tokenizer
    ids = tokenizer.encode("thought.</think>\n\nkept")
    spelled = [tokenizer.decode([token]) for token in ids]
    assert ".</" in spelled and ">\n\n" in spelled
    assert after_thinking(ids, tokenizer) == ids[spelled.index(">\n\n") + 1 :]


def test_a_tag_with_a_token_of_its_own(tmp_path):
    folder = make_tokenizer_folder(tmp_path, "qwen2")
    definition = json.loads((folder / "tokenizer.json").read_text())
    own = max(token["id"] for token in definition["added_tokens"]) + 1
    definition["added_tokens"].append(definition["added_tokens"][0] | {"id": own, "content": "</think>"})
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = Tokenizer.load(folder)
    assert after_thinking(array("i", [5, own, 6, own, 7, 8]), tokenizer) == array("i", [7, 8])


def test_special_token_text_stays_text(tokenizer):
    text = "a <|im_end|> b <|im_start|>system"
    engine = ScriptedEngine(tokenizer, says(tokenizer, "memory"))
    MemoryAgent(engine, dataclasses.replace(CONFIG, chunk_tokens=500)).read(text, text)
    first = prompts(engine)[0]
    control = {tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|im_start|>")}
    assert control.isdisjoint(first["chunk"]) and control.isdisjoint(first["problem"])
    assert tokenizer.decode(first["chunk"]) == tokenizer.decode(first["problem"]) == text


def test_a_long_question_is_kept_whole(tokenizer):
    question = "word " * 1500
    engine = ScriptedEngine(tokenizer, says(tokenizer, "memory"), window=8192)
    MemoryAgent(engine, CONFIG).read(document_of(tokenizer, 10), question)
    assert len(tokenizer.encode(question)) > 1024
    assert [prompt["problem"] for prompt in prompts(engine)] == [tokenizer.encode(question)] * 2


def test_a_chunk_is_clamped_to_what_the_window_holds(tokenizer):
    probe = MemoryAgent(ScriptedEngine(tokenizer, says(tokenizer, "m")), CONFIG)
    others = probe.update_prompt.fixed_tokens + len(tokenizer.encode(QUESTION)) + 2 * CONFIG.memory_tokens
    config = dataclasses.replace(CONFIG, chunk_tokens=5000)
    engine = ScriptedEngine(tokenizer, says(tokenizer, "word " * 40), window=others + 15)
    with pytest.warns(UserWarning, match=rf"chunk_tokens=5000 lowered to 15: the window of {others + 15} tokens"):
        MemoryAgent(engine, config).read(document_of(tokenizer, 40), QUESTION)
    assert [len(prompt["chunk"]) for prompt in prompts(engine)[:-1]] == [15, 15, 10]
    assert max(len(sequence.tokens) for sequence, _ in engine.added) == engine.window


def test_a_pool_smaller_than_the_window_clamps_too(tokenizer):
    config = dataclasses.replace(CONFIG, chunk_tokens=5000)
    engine = ScriptedEngine(tokenizer, says(tokenizer, "word " * 40), pool_tokens=400)
    with pytest.warns(UserWarning, match=r"lowered to \d+: the KV pool of 400 tokens also holds"):
        MemoryAgent(engine, config).read(document_of(tokenizer, 200), QUESTION)
    assert max(len(sequence.tokens) for sequence, _ in engine.added) == 400
    engine = ScriptedEngine(tokenizer, says(tokenizer, "m"), pool_tokens=200)
    with pytest.raises(RequestError, match=r"the KV pool of 200 tokens is too small: .* raise kv_bytes or kv_share"):
        MemoryAgent(engine, config).read("text", QUESTION)


def test_a_window_without_room_is_refused_before_any_turn(tokenizer):
    engine = ScriptedEngine(tokenizer, says(tokenizer, "memory"), window=300)
    with pytest.raises(RequestError, match=r"window of 300 tokens is too small: with a question of \d+"):
        MemoryAgent(engine, dataclasses.replace(CONFIG, answer_tokens=250)).read("text", QUESTION)
    with pytest.raises(RequestError, match="needs at least"):
        MemoryAgent(engine, dataclasses.replace(CONFIG, memory_tokens=200)).read("text", QUESTION)
    assert engine.added == []


def test_events_tell_the_whole_reading(tokenizer):
    engine = ScriptedEngine(tokenizer, says(tokenizer, "first", "second", "the answer"))
    events = list(MemoryAgent(engine, CONFIG).stream(document_of(tokenizer, 13), QUESTION))
    started = [event for event in events if isinstance(event, TurnStarted)]
    assert [(e.kind, e.chunk_tokens, e.document_tokens) for e in started] == [
        ("update", 10, 0),
        ("update", 3, 10),
        ("final", 0, 13),
    ]
    assert [e.prompt_tokens for e in started] == [sequence.prompt_length for sequence, _ in engine.added]
    ended = [event for event in events if isinstance(event, TurnEnded)]
    assert [(e.memory, e.document_tokens) for e in ended] == [("first", 10), ("second", 13), ("second", 13)]
    for event in ended:
        progress = [e for e in events if isinstance(e, TextProgress) and e.index == event.turn.index]
        assert "".join(e.text for e in progress) == event.turn.text
        assert [e.tokens for e in progress] == sorted({e.tokens for e in progress})
    assert isinstance(events[-1], Answered)
    assert events[-1].reading.answer == "the answer"
    assert events[-1].reading.turns == [event.turn for event in ended]


def test_chunks_know_what_they_hold():
    chunks = Chunks([array("i", range(13)), array("i", range(2))], 10)
    assert [(len(chunk), chunks.tokens_ahead) for chunk in chunks] == [(10, 3), (5, 0)]


def test_documents_are_pulled_chunk_by_chunk(tokenizer):
    pulled = []

    def pieces():
        for number in range(40):
            pulled.append(number)
            yield "some words here. " * 1000

    engine = ScriptedEngine(tokenizer, says(tokenizer, "memory"))
    events = MemoryAgent(engine, dataclasses.replace(CONFIG, chunk_tokens=2000)).stream(pieces(), QUESTION)
    next(events)
    assert len(pulled) < 10
    events.close()
    whole = "".join(["some words here. " * 1000] * 2)
    agent = MemoryAgent(engine, dataclasses.replace(CONFIG, chunk_tokens=2000))
    in_pieces = agent.read((whole[i : i + 777] for i in range(0, len(whole), 777)), QUESTION)
    assert [t.prompt_ids for t in in_pieces.turns] == [t.prompt_ids for t in agent.read(whole, QUESTION).turns]


def test_without_keep_turns_only_counters_stay(tokenizer):
    engine = ScriptedEngine(tokenizer, says(tokenizer, "memory"))
    kept = MemoryAgent(engine, CONFIG).read(document_of(tokenizer, 30), QUESTION)
    bare = MemoryAgent(engine, dataclasses.replace(CONFIG, keep_turns=False)).read(document_of(tokenizer, 30), QUESTION)
    assert bare.turns == []
    assert (bare.answer, bare.memory) == (kept.answer, kept.memory)
    assert dataclasses.replace(bare.counters, seconds=0) == dataclasses.replace(kept.counters, seconds=0)
    assert kept.counters.prefilled_tokens == sum(turn.prefilled_tokens for turn in kept.turns) > 0
    assert kept.counters.decode_steps == sum(turn.decode_steps for turn in kept.turns) > 0


def test_readings_side_by_side_wait_for_nobody(tokenizer):
    """The short reading is over while the long one's first memory is still being written."""
    order = []

    def respond(sequence):
        order.append((sequence.sample, sequence.turn))
        return [*tokenizer.encode("x " * (60 if sequence.sample == 0 else 1)), *tokenizer.eos_ids]

    engine = ScriptedEngine(tokenizer, respond)
    agent = MemoryAgent(engine, dataclasses.replace(CONFIG, memory_tokens=200))
    long, short = agent.read_many([(document_of(tokenizer, 20), QUESTION), (document_of(tokenizer, 30), QUESTION)])
    assert order == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (0, 1), (0, 2)]
    assert (len(long.turns), len(short.turns)) == (3, 4)
    assert agent.read_many([]) == []


def test_streams_can_be_taken_in_turns(tokenizer):
    def answer(agent, document):
        return agent.read(document, QUESTION).answer

    def respond(sequence):
        return [*tokenizer.encode(f"{sum(sequence.tokens) * 7}"), *tokenizer.eos_ids]

    documents = [document_of(tokenizer, 31), document_of(tokenizer, 12)]
    alone = [answer(MemoryAgent(ScriptedEngine(tokenizer, respond), CONFIG), document) for document in documents]
    agent = MemoryAgent(ScriptedEngine(tokenizer, respond), CONFIG)
    streams = [[], []]
    for pair in itertools.zip_longest(*(agent.stream(document, QUESTION) for document in documents)):
        for events, event in zip(streams, pair, strict=True):
            events += [event] if event else []
    assert [events[-1].reading.answer for events in streams] == alone


def test_closing_a_stream_aborts_its_turn(tokenizer):
    engine = ScriptedEngine(tokenizer, says(tokenizer, "a long memory"))
    agent = MemoryAgent(engine, CONFIG)
    events = agent.stream(document_of(tokenizer, 20), QUESTION)
    while not isinstance(next(events), TextProgress):
        pass
    events.close()
    assert engine.aborted == [engine.added[0][0]]
    assert not engine.unfinished


def test_an_aborted_turn_is_an_error(tokenizer):
    engine = ScriptedEngine(tokenizer, says(tokenizer, "a long memory"))
    events = MemoryAgent(engine, CONFIG).stream(document_of(tokenizer, 20), QUESTION)
    while not isinstance(next(events), TextProgress):
        pass
    engine.abort(engine.added[0][0])
    with pytest.raises(RequestError, match=r"turn 0 \(update\) was aborted after 1 tokens"):
        list(events)


def test_an_error_in_one_reading_aborts_the_others(tokenizer):
    def respond(sequence):
        if sequence.sample == 1:
            raise RequestError("refused")
        return tokenizer.encode("memory")

    engine = ScriptedEngine(tokenizer, respond)
    with pytest.raises(RequestError, match="refused"):
        MemoryAgent(engine, CONFIG).read_many([("text", QUESTION), ("text", QUESTION)])
    assert engine.aborted == [engine.added[0][0]]


@pytest.mark.parametrize("document", [b"bytes", 3, None])
def test_a_document_is_text(tokenizer, document):
    agent = MemoryAgent(ScriptedEngine(tokenizer, says(tokenizer, "m")), CONFIG)
    with pytest.raises(RequestError, match="a document is a str or an iterable of str, got"):
        agent.read(document, QUESTION)
    with pytest.raises(RequestError, match="the question must be a str, got"):
        agent.read("text", document)


@pytest.mark.parametrize("piece", [b"bytes", 3, None, ["text"]])
def test_the_pieces_of_a_document_are_text(tokenizer, piece):
    agent = MemoryAgent(ScriptedEngine(tokenizer, says(tokenizer, "m")), CONFIG)
    with pytest.raises(RequestError, match="a document's pieces are str, got"):
        agent.read(["text", piece], QUESTION)


@pytest.mark.parametrize("task", ["ab", "abc", ("text",), 3, None])
def test_tasks_are_pairs(tokenizer, task):
    agent = MemoryAgent(ScriptedEngine(tokenizer, says(tokenizer, "m")), CONFIG)
    with pytest.raises(RequestError, match=r"a task is a pair \(document, question\), got"):
        agent.read_many([task])


def test_a_failed_turn_is_an_error(tokenizer, monkeypatch):
    engine = ScriptedEngine(tokenizer, says(tokenizer, "memory"))
    step = engine.step

    def failing():
        return [
            dataclasses.replace(
                update,
                completion=update.completion
                and dataclasses.replace(update.completion, finish_reason="error", error="logits are not finite"),
            )
            for update in step()
        ]

    monkeypatch.setattr(engine, "step", failing)
    with pytest.raises(RequestError, match=r"turn 0 \(update\) failed \(logits are not finite\)"):
        MemoryAgent(engine, CONFIG).read("text", QUESTION)


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    folder = make_tokenizer_folder(tmp_path, "qwen2")
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(ConfigError, match=r"no prompt can be made for this model: .* chat_template\.jinja"):
        MemoryAgent(ScriptedEngine(tokenizer, says(tokenizer, "m")), CONFIG)


def test_a_configuration_of_another_type_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"is an AgentConfig, got \{\}"):
        MemoryAgent(ScriptedEngine(tokenizer, says(tokenizer, "m")), {})

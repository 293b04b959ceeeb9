"""The benchmarks of speed as a user runs them, on a tiny model and with peers that only pretend."""

import json

import pytest
from palimpsest.bench import decode, limits, prefill
from palimpsest.bench.memory import resident
from palimpsest.bench.ours import VARIANTS, Ours, tokens
from palimpsest.cli import main


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch):
    monkeypatch.setattr(limits, "READ_BYTES", 2**20)
    monkeypatch.setattr(limits, "REPEATS", 2000)


def document(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def options(model):
    return ["--quick", "--rounds", "2", "--threads", "1", "--model", model]


def test_prefill_beside_a_peer(tiny_model, peers_folder, capsys):
    # A peer of other weights and one for short prompts only are not asked.
    folder = peers_folder({}, {"engine": "other", "dtype": "q8_0"}, {"engine": "small", "most_tokens": 511})
    assert main(["bench", "prefill", *options(tiny_model), "--peers", str(folder)]) == 0
    found = document(capsys)
    works = [(one["engine"], one["work"], one["context"], one["rounds"]) for one in found["rows"]]
    ours = "palimpsest, kv float32"
    assert works == [(ours, "linear", 512, 2), (ours, "prefill", 512, 2), ("fake", "prefill", 512, 2)]
    assert found["rows"][2]["tokens_per_s"] == pytest.approx(1000)
    by_name = {target["name"]: target["value"] for target in found["targets"]}
    assert list(by_name) == ["linear.512.float32.share", "prefill.512.float32.vs_best_peer"]
    assert by_name["prefill.512.float32.vs_best_peer"] > 0
    asked = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    assert [question["seed"] for question in asked if question["op"] == "prefill"] == [1000, 1001, 1002]


def test_decode_finds_its_rivals_by_program_and_weights(tiny_model, peers_folder, capsys):
    folder = peers_folder(
        {"engine": "OpenVINO GenAI", "variant": "kv f32", "arguments": ["2"]},
        {"engine": "OpenVINO GenAI", "variant": "kv u8", "arguments": ["1"]},
        {"engine": "other", "arguments": ["1e-3"]},
        {"engine": "half", "dtype": "float16", "kv_dtype": "float16"},  # nothing of ours is like it: not asked
    )
    assert decode.main([*options(tiny_model), "--rounds", "1", "--peers", str(folder), "--profile"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    theirs = [one["engine"] for one in found["rows"] if not one["engine"].startswith("palimpsest")]
    assert theirs == ["OpenVINO GenAI kv f32", "OpenVINO GenAI kv u8", "other"]
    assert found["machine"]["peak_gflop_per_s"] > 0
    seconds = {(one["engine"], one["dtype"]): one["seconds"] for one in found["rows"]}
    targets = {target["name"]: target["value"] for target in found["targets"]}
    # The faster of its two: a second a token, 12 tokens.
    expected = 12 / seconds["palimpsest, kv float32", "float32"]
    assert targets["decode.100.float32.vs_openvino_genai"] == pytest.approx(expected, rel=0.01)
    assert targets["decode.100.bfloat16.vs_float32"] > 0
    assert "12 steps of decode, context 100, bfloat16, op by op" in printed


def test_without_peers_their_targets_are_open_and_check_looks_at_the_rest(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(prefill, "LINEAR_SHARE", 1e-9)
    assert prefill.main([*options(tiny_model), "--check"]) == 0
    met = {target["name"]: target["met"] for target in document(capsys)["targets"]}
    assert met == {"linear.512.float32.share": True, "prefill.512.float32.vs_best_peer": None}
    monkeypatch.setattr(prefill, "LINEAR_SHARE", 1e9)
    assert prefill.main([*options(tiny_model), "--check"]) == 1


def test_a_folder_without_peers_is_a_mistake(tiny_model, tmp_path, capsys):
    assert main(["bench", "prefill", *options(tiny_model), "--peers", str(tmp_path)]) == 2
    assert "peers.json cannot be read" in capsys.readouterr().err


def test_token_ids_are_those_of_the_peers_workers():
    assert tokens(5, 1, 49152) == [25460, 17328, 47300, 33562, 40627]
    assert tokens(5, 1000, 151936) == [31252, 1078, 22345, 48852, 6058]
    assert tokens(3, 7, 512) == [252, 147, 160]


def test_decode_times_the_steps_alone_and_keeps_the_prompts(tiny_model):
    ours = Ours(tiny_model, VARIANTS["float32"], sequences=3, longest=120, threads=1)
    for _ in range(2):
        with ours.decoding(2, 100, 8) as run:
            first, second = ours.engine.scheduler.running
            assert [first.response_length, second.response_length] == [1, 1]
            run()
            assert (first.finish_reason, first.response_length) == ("length", 9)
            assert (second.finish_reason, second.response_length) == ("length", 9)
    # The second time every full page of the prompts was resident.
    assert first.counters.cached_tokens == 96
    assert first.tokens[:100] != second.tokens[:100]
    assert not ours.engine.unfinished


def test_prefill_never_finds_its_prompt_resident(tiny_model, monkeypatch):
    ours = Ours(tiny_model, VARIANTS["float32"], sequences=1, longest=120, threads=1)
    cached = []
    generate = ours.engine.generate

    def counting(*args):
        completions = generate(*args)
        cached.extend(completion.counters.cached_tokens for completion in completions)
        return completions

    monkeypatch.setattr(ours.engine, "generate", counting)
    for seed in (1, 2, 3):
        ours.prefill(100, seed)
    assert cached == [0, 0, 0]


@pytest.mark.slow  # two fresh interpreters with torch
def test_resident_memory_is_that_of_a_process_of_its_own(tiny_model):
    ballast = bytearray(400_000_000)
    ballast[::4096] = bytes(len(ballast[::4096]))  # touched: a forked child would count it
    found = resident(tiny_model, "float32", 100, 1)
    # Vocabulary 512, hidden 48, MLP 96, 2 layers of 6 heads and 2 kv heads of 8; rotary tables of 116 rows.
    layer = 48 * (48 + 16 + 16) + 48 + 16 + 16 + 48 * 48 + 3 * 48 * 96 + 2 * 48
    assert found.weights == 4 * (512 * 48 + 2 * layer + 48 + 2 * 116 * 4)
    assert found.kv == 4 * 128 * 2 * 2 * 2 * 8
    assert 50e6 < found.bare < found.used < found.bare + 200e6
    assert found.allowed_over_used == (found.bare + found.weights + found.kv + 200e6) / found.used

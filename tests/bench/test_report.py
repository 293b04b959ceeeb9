"""The report's last line, and the exit codes of --check."""

import json
from pathlib import Path

import pytest
from palimpsest import Engine, EngineConfig, SamplingParams
from palimpsest.bench import decode, options, random_model
from palimpsest.bench.clock import Sample
from palimpsest.bench.costs import Cost
from palimpsest.bench.limits import Limits
from palimpsest.bench.report import Report, Target, describe_machine, row
from palimpsest.bench.rounds import Entry, Measured
from palimpsest.engine.errors import ConfigError

LIMITS = Limits(2e11, 2.5e10)


def report(*targets):
    entry = Entry("palimpsest", "decode", "float32", 100, 1, 24, Cost(0.0, 1.25e10), None)
    measured = Measured(entry, [Sample(1.0, 0.5), Sample(2.0, 0.0), Sample(4.0, 1.0)], [LIMITS] * 3)
    return Report("decode", describe_machine("avx2", LIMITS), [row(measured)], list(targets))


def test_the_last_line_is_one_json_document_in_the_documented_form(capsys):
    report(Target("decode.100.float32.share", 0.9, 0.85), Target("decode.100.float32.vs_x", None, 1.1)).print()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(document) == ["bench", "machine", "rows", "targets"]
    assert document["bench"] == "decode"
    assert document["rows"] == [
        {
            "engine": "palimpsest",
            "work": "decode",
            "dtype": "float32",
            "context": 100,
            "batch": 1,
            "seconds": 2.0,
            "tokens_per_s": 12.0,
            "limit": 48.0,
            "share": 0.25,
            "rounds": 3,
            "others": [0.5, 0.0, 1.0],
        }
    ]
    assert document["targets"] == [
        {"name": "decode.100.float32.share", "value": 0.9, "target": 0.85, "met": True},
        {"name": "decode.100.float32.vs_x", "value": None, "target": 1.1, "met": None},
    ]
    machine = document["machine"]
    assert (machine["isa"], machine["peak_gflop_per_s"], machine["read_gb_per_s"]) == ("avx2", 200.0, 25.0)


@pytest.mark.parametrize(
    ("value", "check", "code"),
    [(0.5, ["--check"], 1), (0.5, [], 0), (0.85, ["--check"], 0), (None, ["--check"], 0)],
)
def test_check_fails_only_on_a_target_that_was_measured_and_missed(capsys, value, check, code):
    assert options.main("decode", lambda _: report(Target("a", value, 0.85)), check) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"bench"')


def test_what_is_said_on_the_command_line_reaches_the_benchmark():
    seen = []

    def run(chosen):
        seen.append(chosen)
        return report()

    options.main(
        "decode",
        run,
        ["--model", "m", "--works", "a.1,b", "--peers", "p", "--quick", "--threads", "3", "--rounds", "7"],
    )
    assert seen == [options.Options("m", ("a.1", "b"), Path("p"), quick=True, threads=3, rounds=7, profile=False)]


def test_works_are_chosen_by_the_heads_of_their_names():
    works = [
        decode.Work(1, 100, 1, ()),
        decode.Work(1, 1000, 1, ()),
        decode.Work(8, 1000, 1, ()),
        decode.Memory("int8"),
    ]

    def choose(*names):
        return options.Options("m", names, None, quick=False, threads=1, rounds=1, profile=False).choose(works)

    assert choose() == works
    assert choose("decode.100") == works[:1]
    assert choose("decode", "memory") == [*works[:2], works[3]]
    assert choose("decode_b8.1000") == works[2:3]
    with pytest.raises(ConfigError, match=r"--works decode\.10:.* decode\.100, decode\.1000, decode_b8\.1000"):
        choose("decode.10")


def test_a_random_model_takes_no_peers(capsys):
    assert options.main("decode", None, ["--model", "qwen2.5-0.5b-random", "--peers", "p"]) == 2
    assert "leave out --peers" in capsys.readouterr().err


def test_a_random_model_runs_and_leaves_nothing(monkeypatch, tmp_path):
    small = {"hidden_size": 28, "intermediate_size": 32, "num_hidden_layers": 1}
    monkeypatch.setitem(random_model.RANDOM_MODELS, "small", random_model.RANDOM_MODELS["qwen2.5-0.5b-random"] | small)
    with random_model.random_model("small") as folder:
        engine = Engine(folder, EngineConfig(kv_bytes=1 << 20))
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finish_reason == "length"
    assert not Path(folder).exists()


def test_mistakes_end_in_a_message_and_exit_code_2(capsys):
    def run(_):
        raise ConfigError("no such folder")

    assert options.main("decode", run, []) == 2
    assert capsys.readouterr().err == "palimpsest bench decode: no such folder\n"


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--threads", "0"], ["--fast"], ["--round", "5"]])
def test_unknown_and_senseless_options_are_refused(arguments):
    with pytest.raises(SystemExit) as error:
        options.main("decode", lambda _: report(), arguments)
    assert error.value.code == 2

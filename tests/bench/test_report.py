"""The report's last line, and the exit codes of --check."""

import json
from pathlib import Path

import pytest
from palimpsest.bench import options
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

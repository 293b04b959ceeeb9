"""reading_accuracy: what was measured is never measured again, and results of something else are not gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from palimpsest.bench.reading_accuracy import main
from palimpsest.rl.tasks.slots_model import write_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy")
    write_model(folder / "model")
    values = {
        "model": {"path": str(folder / "model"), "engine": {"kv_bytes": 1 << 22, "max_context": 128, "threads": 1}},
        "agent": {
            "chunk_tokens": 16,
            "memory_tokens": 6,
            "answer_tokens": 4,
            "template": [" question", "{problem}", " memory", "{memory}", " text", "{chunk}", " update"],
            "final_form": [" question", "{problem}", " memory", "{memory}", " answer"],
        },
        "data": {"task": "slots"},
        "reward": {"name": "em"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


def measure(config: Path, output: Path, *options: str, code: int = 0) -> None:
    assert main([str(config), "--output", str(output), "--lengths", "32,64", "--documents", "3", *options]) == code


def test_it_goes_on_where_it_was_killed(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results.jsonl"
    measure(config, output, "--sampling", "greedy,sampled")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["work"], row["sampling"], row["documents"]) for row in report["rows"]] == [
        ("32 tokens", "greedy", 3),
        ("32 tokens", "sampled", 3),
        ("64 tokens", "greedy", 3),
        ("64 tokens", "sampled", 3),
    ]
    lines = output.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 12 and json.loads(lines[-1])["turns"] == 5
    output.write_text("".join(lines[:6]) + lines[6][:20])
    measure(config, output, "--sampling", "greedy,sampled")
    again = output.read_text().splitlines(keepends=True)
    assert again[:6] == lines[:6] and len(again) == len(lines)
    kept = ("length", "sampling", "index", "reward", "answer", "turns", "tokens")
    assert [[json.loads(line)[name] for name in kept] for line in sorted(again[1:])] == [
        [json.loads(line)[name] for name in kept] for line in sorted(lines[1:])
    ]


def test_direct_reads_all_at_once_where_the_window_holds_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(config, tmp_path / "direct.jsonl", "--method", "direct", "--lengths", "64,128")
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["documents"] for row in rows] == [3, 0] and rows[1]["reward"] is None


def test_means_and_standard_errors(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results.jsonl"
    measure(config, output, "--lengths", "32")
    header, *rows = [json.loads(line) for line in output.read_text().splitlines()]
    for row, reward, seconds in zip(rows, (1.0, 0.0, 1.0), (1.5, 0.5, 2.0), strict=True):
        row |= {"reward": reward, "seconds": seconds, "undecoded": 1}
    output.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)))
    capsys.readouterr()
    measure(config, output, "--lengths", "32")
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["reward"] == pytest.approx(2 / 3) and row["standard_error"] == pytest.approx(1 / 3)  # (2/9 / 2) ** 0.5
    assert row["tokens_per_s"] == 3 * 32 / 4.0 and row["undecoded"] == 3 / 9


@pytest.mark.parametrize(
    "content", ["notes", "notes\nmore", '{"a": 1}\n', "[]\n", "%(header)snot JSON\n", "%(header)s{}\n"]
)
def test_a_file_of_something_else_stays_as_it_is(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    measure(config, tmp_path / "results.jsonl", "--lengths", "32")
    header = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)[0]
    output = tmp_path / "other.jsonl"
    output.write_text(content % {"header": header} if "%" in content else content)
    before = output.read_bytes()
    measure(config, output, code=2)
    assert output.read_bytes() == before and "name another --output" in capsys.readouterr().err


def test_mistakes_are_told(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(config, tmp_path / "results.jsonl")
    measure(config, tmp_path / "results.jsonl", "--set", "data.variant=two_hop", code=2)
    measure(config, tmp_path / "results.jsonl", "--seed", "3", code=2)
    measure(config, tmp_path / "results.jsonl", "--set", "agent.chunk_tokens=32", code=2)
    measure(config, tmp_path / "results.jsonl", "--set", "reward.name=sub_em", code=2)
    measure(config, tmp_path / "other.jsonl", "--seed", "0", code=2)
    measure(config, tmp_path / "other.jsonl", "--documents", "0", code=2)
    measure(config, tmp_path, code=2)
    measure(config, tmp_path / "other.jsonl", "--sampling", "best", code=2)
    measure(config, tmp_path / "other.jsonl", "--lengths", "1G", code=2)
    errors = capsys.readouterr().err
    assert errors.count("holds results of another") == 4 and "got 'best'" in errors and "got '1G'" in errors
    assert "--seed 0 is data.seed" in errors and "--documents must be at least 1, got 0" in errors
    assert f"{tmp_path} cannot be used" in errors

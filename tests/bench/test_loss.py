"""The benchmark of the loss: what it compares is the same, and what it reports."""

import json

import pytest
import torch
from palimpsest.bench import limits, loss
from palimpsest.bench.loss import Inputs, Work
from palimpsest.bench.memory import grown
from palimpsest.cli import main

TINY = Work(tokens=600, timed=40, vocabulary=300, hidden=24)


def test_both_compute_the_same_gradients():
    inputs = Inputs(TINY, 300)
    for ours, theirs in zip(inputs.fused(), inputs.plain(), strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_report(monkeypatch, capsys):
    monkeypatch.setattr(limits, "READ_BYTES", 2**20)
    monkeypatch.setattr(limits, "REPEATS", 2000)
    monkeypatch.setitem(loss.WORKS, "quick", TINY)
    monkeypatch.setattr(
        loss, "_measured", lambda which, work, tokens, backend, threads: {"fused": 100, "plain": 7}[which] * tokens
    )
    monkeypatch.setattr(loss, "available_bytes", lambda device: 3 * 3 * 4 * 300 * 300)
    assert main(["bench", "loss", "--quick", "--rounds", "1", "--threads", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    # Only 300 rows fit, that is 256.
    assert "0 MB with 256 tokens, scaled" in printed[0]
    report = json.loads(printed[-1])
    assert [(row["engine"], row["batch"], row["context"]) for row in report["rows"]] == [
        ("palimpsest, 256 rows at once", 1, 40),
        ("torch, all logits", 1, 40),
    ]
    memory, speed = report["targets"]
    assert memory["name"] == "loss.600.float32.memory_vs_plain" and memory["value"] == pytest.approx(0.07)
    assert speed["name"] == "loss.40.float32.speed_vs_plain" and speed["value"] > 0


def test_options_of_other_benchmarks_are_refused(capsys):
    assert main(["bench", "loss", "--model", "x"]) == 2
    assert "leave out --model, --works, --peers, --profile" in capsys.readouterr().err


def test_how_far_memory_grew():
    def work():
        passing = torch.ones(50_000_000)
        return passing[:10].clone()

    assert 195e6 < grown(work, torch.device("cpu")) < 230e6

"""bench quality: its perplexity is that of `transformers`, and its report says what was read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from palimpsest.bench import quality
from palimpsest.tests.tiny_models import make_model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_perplexity_is_that_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model_folder(tmp_path / "hf", "qwen2")
    text = tmp_path / "text.txt"
    text.write_text("The keeper said: don't count the ships, count the lamps! " * 8)
    options = ["--model", str(folder), "--text", str(text), "--tokens", "100"]
    assert quality.main([*options, "--quick"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["dtype"] for row in report["rows"]] == ["float32", "int8", "int4"]
    exact, int8, int4 = report["rows"]
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text.read_text()).input_ids[:100]])
    loss = AutoModelForCausalLM.from_pretrained(folder)(ids, labels=ids).loss
    assert exact["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)
    assert exact["agreement"] == 1 and exact["context"] == 100
    assert 1 > int8["agreement"] > int4["agreement"] > 0.5
    assert quality.main([*options, "--quick", "--kv-dtype", "int8"]) == 0
    rounded = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]
    assert rounded["kv_dtype"] == "int8" and rounded["perplexity"] != exact["perplexity"]
    assert rounded["perplexity"] == pytest.approx(exact["perplexity"], rel=0.01)
    assert exact["weight_bytes"] > int8["weight_bytes"] > int4["weight_bytes"]


def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model_folder(tmp_path / "hf")
    (tmp_path / "short.txt").write_text("lamps")
    for options, words in (
        (["--text", str(tmp_path / "none.txt")], "cannot be read"),
        (["--text", str(tmp_path / "short.txt")], "ask for fewer"),
        (["--tokens", "1"], "at least 2"),
    ):
        assert quality.main(["--model", str(folder), *options]) == 2
        assert words in capsys.readouterr().err

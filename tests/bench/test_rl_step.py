"""bench rl_step: its promises hold on a tiny model, and its seconds add up."""

from __future__ import annotations

import json

import pytest
from palimpsest.bench import rl_step


def test_the_report(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_step.main(["--model", tiny_model, "--quick", "--check", "--threads", "1"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["variant"] for row in report["rows"]] == ["all on", "all off"]
    assert report["rows"][0]["tokens"] == report["rows"][1]["tokens"] > 0  # the same responses either way
    assert all(target["met"] and target["value"] == 0 for target in report["targets"])
    for row in report["rows"]:
        parts = sum(row[f"{name}_s"] for name in ("rollout", "loss", "update", "rest"))
        assert row["seconds"] == pytest.approx(parts, abs=1e-3) and row["loss_s"] > 0
    assert rl_step.main(["--model", tiny_model, "--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err

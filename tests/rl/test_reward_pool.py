"""Rewards in processes of their own: whatever a function does, there is a number, and a count by name."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.rewards import Scorer
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.trajectory import Problem
from palimpsest.tests.tiny_models import make_model_folder

FUNCTIONS = """
import os, re, subprocess, sys, time
from pathlib import Path
import numpy as np

def reward(answer, references, extra):
    if answer == "raise":
        raise RuntimeError("boom")
    if answer == "leave":
        sys.exit("enough")
    if answer == "die":
        os._exit(7)
    if answer == "sleep":
        child = subprocess.Popen(["sleep", "1000"])
        Path(extra["pids"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(1000)
    if answer == "backtrack":  # holds the GIL
        re.match(r"(a+)+b", "a" * 64)
    if answer == "print":
        print("noise on standard output", flush=True)
        sys.stdin.read()
    return {
        "none": None, "nan": float("nan"), "inf": 10**400, "huge": 1e300,
        "text": "0.5", "long": "x" * 10_000_000, "list": [1],
        "numpy": np.bool_(True), "float": np.float32(0.25), "extra": extra.get("year"), "half": 0.5,
    }.get(answer[:5], len(answer))

def plain(answer, references):
    return answer in references

def patient(answer, references, extra):
    while extra and not Path(extra["gate"]).exists():
        time.sleep(0.01)
    return len(answer)

number = 3
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "broken_rewards.py").write_text("raise SystemExit('at import')")
    (tmp_path / "statistics.py").write_text("own = True")  # the user's modules go before no others
    monkeypatch.chdir(tmp_path)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_whatever_a_function_does_is_survived_and_counted(tmp_path: Path) -> None:
    scorer = Scorer("own_rewards:reward", timeout=4.0, workers=2)
    pids = tmp_path / "pids"
    expected = {"raise": "raised", "leave": "raised", "die": "died", "sleep": "timeout", "backtrack": "timeout"}
    expected |= {
        "none": "result",
        "nan": "result",
        "inf": "result",
        "huge": "result",
        "text": "result",
        "long": "result",
        "list": "result",
    }
    values = {"numpy": 1.0, "float": 0.25, "extra": 1874.0, "print": 5.0, "y" * 10_000_000: 1e7}
    extra = {"year": 1874, "pids": str(pids)}
    scores = {answer: scorer.submit(answer, ["a"], extra) for answer in [*expected, *values]}
    with pytest.warns(UserWarning, match="the reward function failed"):
        found = {answer: score.value() for answer, score in scores.items()}
    assert found == dict.fromkeys(expected, 0.0) | values
    assert scorer.failures.counts == Counter(expected.values())
    assert "code 7" in scorer.failures.first["died"] and "4.0 s" in scorer.failures.first["timeout"]
    deadline = time.monotonic() + 20
    while any(alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline  # neither the function nor what it had started goes on
        time.sleep(0.01)
    with pytest.warns(UserWarning, match="raised"):
        scorer.failures.first.clear()
        assert scorer("half", [], {"local": lambda: 0}) == 0.0  # cannot be pickled
    assert scorer("half", []) == 0.5
    scorer.close()


def test_a_function_without_extra(tmp_path: Path) -> None:
    scorer = Scorer("own_rewards:plain")
    assert scorer("a", ["a"], {"year": 1}) == 1.0 and scorer("b", ["a"]) == 0.0
    scorer.close()


def test_what_cannot_be_called_is_refused_at_start() -> None:
    for name, why in (
        ("own_rewards:absent", "absent"),
        ("own_rewards:number", "no function"),
        ("broken_rewards:reward", "at import"),
        ("no_such_module:reward", "no_such_module"),
        (":reward", "module:function"),
        ("own_rewards:", "module:function"),
    ):
        with pytest.raises(ConfigError, match=why):
            Scorer(name)
    for changes in ({"timeout": 0}, {"workers": 0}):
        with pytest.raises(ConfigError):
            Scorer("own_rewards:reward", **changes)  # type: ignore[arg-type]


def test_scoring_does_not_stop_the_decoding_of_others(tmp_path: Path) -> None:
    """The first group to end waits for its scores; the next one is rolled out, scored and given meanwhile."""
    engine = Engine(make_model_folder(tmp_path / "model"), EngineConfig(kv_bytes=1 << 22, threads=1, max_context=1024))
    agent = MemoryAgent(engine, AgentConfig(60, 6, 4, sampling=SamplingParams(seed=2)))
    gate = tmp_path / "gate"
    problems = [
        Problem("The keeper. ", "Who?", (), extra={"gate": str(gate)}),
        Problem("The keeper counted the lamps. " * 24, "Who?", ()),
    ]
    scorer = Scorer("own_rewards:patient", workers=4, timeout=30.0)
    rollout = Rollout(agent, scorer, AlgorithmConfig(group_size=2, kl=0.0), deterministic=False)
    groups = rollout.groups(problems, 2)
    first = next(groups)
    assert len(first.trajectories[0].turns) > 3
    gate.touch()
    [second] = groups
    assert len(second.trajectories[0].turns) == 2 and not scorer.failures.counts
    scorer.close()

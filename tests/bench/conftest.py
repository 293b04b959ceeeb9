"""Fixtures: a tiny model, and folders of peers whose workers only pretend."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from palimpsest.tests.tiny_models import make_model_folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model_folder(tmp_path_factory.mktemp("model"), "qwen2", tie_word_embeddings=True))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palimpsest.bench.rounds.PAUSE", 0.0)


@pytest.fixture
def peers_folder(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes peers.json for fake workers: one mapping of changes to the defaults per peer."""

    def write(*peers: dict[str, Any]) -> Path:
        shutil.copy(Path(__file__).with_name("fake_worker.py"), tmp_path)
        entries = []
        for peer in peers:
            changed = dict(peer)
            command = [sys.executable, "fake_worker.py", *changed.pop("arguments", ["1e-3"])]
            defaults = {"engine": "fake", "variant": "", "dtype": "float32", "kv_dtype": "float32", "command": command}
            entries.append(defaults | changed)
        (tmp_path / "peers.json").write_text(json.dumps(entries))
        return tmp_path

    return write

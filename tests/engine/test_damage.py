"""Damaged files: whatever bytes are flipped or lost, a model either loads or is refused with a CheckpointError."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from palimpsest.engine import checkpoint
from palimpsest.engine.errors import CheckpointError
from palimpsest.engine.gguf import converted_folder
from palimpsest.engine.rotary import rotary_tables
from palimpsest.engine.tokenizer import Tokenizer
from palimpsest.tests.engine.test_gguf import write_gguf
from palimpsest.tests.tiny_models import make_model_folder

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
WRONG = [None, True, -1, 0, 0.5, 1e300, 10**30, "x", "", [], [1], ["x"], {}, {"x": 1}, float("nan"), float("inf")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model_folder(tmp_path_factory.mktemp("damage") / "hf", "qwen2", rope_parameters=YARN)
    write_gguf(folder.parent / "m.gguf", folder, "qwen2")
    return folder


def load_folder(folder: Path) -> None:
    loaded = checkpoint.load(folder, torch.float32)
    config = loaded.config
    rotary_tables(config.head_dim, config.rope_theta, config.rope_scaling, min(config.max_position, 64))
    tokenizer = Tokenizer.load(folder)
    tokenizer.check_ids(config.vocab_size)
    tokenizer.encode_template("The keeper\n")


def load_gguf(file: Path) -> None:
    folder = converted_folder(file)
    load_folder(folder)


def damaged(content: bytes, dice: random.Random, reach: int) -> bytes:
    """A few bits flipped or bytes put in among the first `reach` bytes, or the file cut there."""
    changed = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 8])):
        place = dice.randrange(min(reach, len(changed)))
        kind = dice.randrange(4)
        if kind == 0:
            changed[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            changed[place] = dice.choice(b'0123456789-.eE[]{}",: \x00\xff')
        elif kind == 2:
            changed[place : place + dice.choice([1, 8])] = dice.choice([b"", b"\xff" * 8, b"[", b"null", b"-1"])
        elif dice.random() < 0.3:
            del changed[max(place, 1) :]
    return bytes(changed)


def outcomes(file: Path, load: Callable[[], None], rounds: int, reach: int) -> tuple[int, int]:
    """How often a damaged file loaded and was refused. Any other exception passes through, with the round's number."""
    content = file.read_bytes()
    loaded = refused = 0
    for number in range(rounds):
        file.write_bytes(damaged(content, random.Random(number), reach))
        try:
            load()
            loaded += 1
        except CheckpointError:
            refused += 1
        except BaseException as error:
            error.add_note(f"{file.name}, round {number}")
            raise
    return loaded, refused


@pytest.mark.parametrize(
    ("name", "rounds", "reach"),
    [
        ("model.safetensors", 300, 3000),
        ("config.json", 300, 2000),
        ("generation_config.json", 200, 200),
        ("tokenizer_config.json", 200, 1000),
        ("tokenizer.json", 200, 2000),
        ("tokenizer.json", 200, 1 << 20),
    ],
)
def test_flips_and_cuts_in_a_folder(tmp_path: Path, tiny: Path, name: str, rounds: int, reach: int) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "m"))
    loaded, refused = outcomes(folder / name, lambda: load_folder(folder), rounds, reach)
    assert loaded > 0
    assert refused > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rounds", "reach"), [(100, 1200), (100, 20000)])
def test_flips_and_cuts_in_a_gguf_file(
    tmp_path: Path, tiny: Path, rounds: int, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "flush", lambda _: None)  # waiting for the disk is most of the time
    file = Path(shutil.copy(tiny.parent / "m.gguf", tmp_path))
    loaded, refused = outcomes(file, lambda: load_gguf(file), rounds, reach)
    assert loaded > 0
    assert refused > 0
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_wrong_values_of_every_key(tmp_path: Path, tiny: Path, name: str) -> None:
    """Well-formed JSON with one value, at any depth, replaced by one of another type or range."""
    folder = Path(shutil.copytree(tiny, tmp_path / "m"))
    values = json.loads((folder / name).read_text())
    if name == "tokenizer.json":
        values["model"]["merges"] = values["model"]["merges"][:3]
    load_folder(folder)
    refused = 0
    for place in places(values):
        for wrong in WRONG:
            (folder / name).write_text(json.dumps(replaced(values, place, wrong)))
            try:
                load_folder(folder)
            except CheckpointError:
                refused += 1
            except BaseException as error:
                error.add_note(f"{name}: {place} = {wrong!r}")
                raise
    assert refused > 20


def places(values: object, depth: int = 5) -> list[tuple[str | int, ...]]:
    """Paths to the values of a JSON document; of a long list or mapping only the first two entries."""
    items: list[tuple[str | int, object]] = []
    if isinstance(values, dict):
        items = list(values.items())
    elif isinstance(values, list):
        items = list(enumerate(values))
    inner = items if len(items) < 50 else items[:2]
    deeper = [(key, *rest) for key, value in inner if depth for rest in places(value, depth - 1)]
    return [(key,) for key, _ in inner] + deeper


def replaced(values: object, place: tuple[str | int, ...], wrong: object) -> object:
    """A copy of a JSON document with another value in one place."""
    copy = json.loads(json.dumps(values))
    holder = copy
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = wrong
    return copy

"""Endurance: whether hundreds of turns in a row cost as much at their end as at their beginning."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from ..engine import checkpoint
from ..engine.engine import Engine
from ..engine.gguf import converted_folder
from ..engine.model_config import parameter_shapes
from .ours import VARIANTS, Ours
from .readings import ForcedReading

__all__ = ["Endurance", "endurance", "tiny_model"]

CHUNK, MEMORY, RIGHT = 64, 32, 80
STRETCH = 100  # turns that are compared


@dataclass(frozen=True)
class Endurance:
    """Seconds of CPU time per turn, the median, and resident bytes: of the first turns and of the last ones."""

    first_seconds: float
    last_seconds: float
    first_bytes: int
    last_bytes: int

    def __str__(self) -> str:
        return (
            f"CPU time per turn {self.first_seconds * 1e3:.2f} and {self.last_seconds * 1e3:.2f} ms, "
            f"resident {self.first_bytes / 1e6:.1f} and {self.last_bytes / 1e6:.1f} MB"
        )


def endurance(engine: Engine, turns: int) -> Endurance:
    """Read `turns` chunks in a row with a tiny random model that has the tokenizer of `engine`.

    On one thread: CPU time would count how long a second one waits for work, which depends on the machine's mood.
    """
    threads = torch.get_num_threads()
    try:
        return _endurance(engine, turns)
    finally:
        torch.set_num_threads(threads)


def _endurance(engine: Engine, turns: int) -> Endurance:
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        model = tiny_model(engine, Path(place) / "model")
        ours = Ours(str(model), VARIANTS["float32"], sequences=2, longest=1024, threads=1, drafts=True)
    reading = ForcedReading(
        ours.engine, memory=MEMORY, chunk=CHUNK, right=RIGHT, drafts=True, open_prompt=True, seed=80_000
    )
    process = psutil.Process(os.getpid())
    first_bytes = 0
    for number in range(turns):
        start = time.process_time()
        reading.turn()
        seconds.append(time.process_time() - start)
        if number + 1 == STRETCH:
            first_bytes = process.memory_info().rss
    last_bytes = process.memory_info().rss
    reading.close()
    first, last = statistics.median(seconds[:STRETCH]), statistics.median(seconds[-STRETCH:])
    return Endurance(first, last, first_bytes, last_bytes)


def tiny_model(engine: Engine, folder: Path) -> Path:
    """Write a random model of two narrow layers with an engine's tokenizer; returns `folder`."""
    source = Path(engine.model_path)
    config = replace(
        engine.model.config, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, tie_embeddings=True, rope_scaling=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    parameters = {
        name: torch.ones(shape) if "norm" in name else 0.05 * torch.randn(shape, generator=generator)
        for name, shape in parameter_shapes(config).items()
    }
    checkpoint.save(folder, config, parameters, converted_folder(source) if source.is_file() else source)
    return folder

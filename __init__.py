"""Palimpsest: a decoding engine for memory agents."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.async_engine import AsyncEngine
    from .engine.config import AgentConfig, EngineConfig, SamplingParams
    from .engine.engine import Engine
    from .engine.errors import CheckpointError, ConfigError, PalimpsestError, RequestError, TraceError, WindowError
    from .engine.memory_agent import MemoryAgent, Reading, Turn
    from .engine.sequence import Completion, Segment
    from .engine.stream import Update

__version__ = "0.1.0"

# How long OpenMP's threads spin at a barrier before they sleep; read once, when torch is loaded. The default spins for
# milliseconds: where anything else wants the cores, two threads are then ten times slower than one.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = [
    "AgentConfig",
    "AsyncEngine",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "MemoryAgent",
    "PalimpsestError",
    "Reading",
    "RequestError",
    "SamplingParams",
    "Segment",
    "TraceError",
    "Turn",
    "Update",
    "WindowError",
]

_HOMES = {
    "async_engine": ("AsyncEngine",),
    "config": ("AgentConfig", "EngineConfig", "SamplingParams"),
    "engine": ("Engine",),
    "errors": ("CheckpointError", "ConfigError", "PalimpsestError", "RequestError", "TraceError", "WindowError"),
    "memory_agent": ("MemoryAgent", "Reading", "Turn"),
    "sequence": ("Completion", "Segment"),
    "stream": ("Update",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `palimpsest --help` doesn't wait for torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".engine.{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Generated training tasks: documents from (seed, index), of any length, with an exact oracle."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .facts import FactsConfig
from .facts_oracle import FactsOracleConfig
from .facts_quiz import FactsQuizConfig
from .slots import SlotsConfig
from .slots_oracle import OracleConfig

__all__ = [
    "TASKS",
    "ExamplesConfig",
    "FactsConfig",
    "FactsOracleConfig",
    "FactsQuizConfig",
    "OracleConfig",
    "SlotsConfig",
    "TaskConfig",
]

TaskConfig = SlotsConfig | FactsConfig  # documents of any length, with questions
ExamplesConfig = OracleConfig | FactsOracleConfig | FactsQuizConfig  # single turns

# What `data.task` of a training run may be.
TASKS: Mapping[str, type[TaskConfig | ExamplesConfig]] = MappingProxyType(
    {
        "slots": SlotsConfig,
        "slots_oracle": OracleConfig,
        "facts": FactsConfig,
        "facts_oracle": FactsOracleConfig,
        "facts_quiz": FactsQuizConfig,
    }
)

"""Generated training tasks: documents from (seed, index), of any length, with an exact oracle."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .slots import SlotsConfig
from .slots_oracle import OracleConfig

__all__ = ["TASKS", "OracleConfig", "SlotsConfig"]

# What `data.task` of a training run may be.
TASKS: Mapping[str, type[SlotsConfig | OracleConfig]] = MappingProxyType(
    {"slots": SlotsConfig, "slots_oracle": OracleConfig}
)

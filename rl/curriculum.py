"""Curriculum: when a run goes on to other data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .run_config import CurriculumConfig

__all__ = ["Curriculum"]


class Curriculum:
    """Counts steps on the way through the stages. stage: the present one; 0 is the data before any stage."""

    def __init__(self, config: CurriculumConfig | None) -> None:
        self._config = config
        self.stage = 0
        self._rewards: list[float] = []

    def add(self, reward: float) -> bool:
        """Take a step's mean answer; -> whether the next stage begins."""
        config = self._config
        if config is None or self.stage == len(config.stages):
            return False
        self._rewards = [*self._rewards, reward][-config.steps :]
        if len(self._rewards) < config.steps or sum(self._rewards) < config.reward * config.steps:
            return False
        self.stage, self._rewards = self.stage + 1, []
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"stage": self.stage, "rewards": self._rewards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the one went on that gave this state."""
        most = 0 if self._config is None else len(self._config.stages)
        self.stage, self._rewards = min(state["stage"], most), list(state["rewards"])

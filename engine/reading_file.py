"""palimpsest.json: lies beside an adapter and says how to read with it, since that is what it was trained for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from .checkpoint import read_json, write_json
from .config import AgentConfig
from .errors import CheckpointError, ConfigError
from .templates import Slot, Template

__all__ = ["NAME", "read", "write"]

NAME = "palimpsest.json"


def write(folder: str | Path, config: AgentConfig) -> None:
    """Write what belongs to the training: the limits, the prompts and the kind of sampling. Raises OSError."""
    names = ("chunk_tokens", "memory_tokens", "answer_tokens", "strip_thinking")
    values: dict[str, object] = {name: getattr(config, name) for name in names}
    for name in ("template", "final_form"):
        given = getattr(config, name)
        values[name] = _parts(given) if isinstance(given, Template) else given
    values["sampling"] = {"temperature": config.sampling.temperature, "top_p": config.sampling.top_p}
    write_json(Path(folder) / NAME, values)


def read(folder: str | Path) -> AgentConfig:
    """The agent that an adapter was trained as; AgentConfig's own defaults where the folder says nothing.

    Raises CheckpointError for a file that cannot be read, or holds what is no AgentConfig.
    """
    file = Path(folder) / NAME
    if not file.exists():
        return AgentConfig()
    values = read_json(file)
    sampling = values.pop("sampling", {})
    known = {field.name for field in dataclasses.fields(AgentConfig)}
    try:
        if not isinstance(sampling, Mapping):
            raise ConfigError(f"sampling must be a mapping, got {sampling!r}")
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ConfigError(f"there is no {unknown[0]!r}; known are {', '.join(sorted(known))}")
        default = AgentConfig()
        return dataclasses.replace(default, sampling=dataclasses.replace(default.sampling, **sampling), **values)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{file} describes no agent: {error}; correct it or take it away") from error


def _parts(template: Template) -> list[str]:
    return [f"{{{part.value}}}" if isinstance(part, Slot) else part for part in template.parts]

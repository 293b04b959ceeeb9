"""A run's configuration as YAML: typed, section by section; what no key or value can mean is refused by its path."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..engine.config import AgentConfig, _require, _require_choice
from ..engine.errors import ConfigError
from ..engine.templates import Template
from .agent_function import FunctionConfig
from .config import AlgorithmConfig
from .data import DataConfig
from .live_agent import AgentFunction
from .run_config import RunConfig
from .tasks import TASKS

__all__ = ["from_mapping", "load_config"]

T = TypeVar("T")

# Names that only type checkers see where they are used.
HIDDEN: Mapping[str, Any] = types.MappingProxyType(
    {"Template": Template, "Sequence": Sequence, "AgentFunction": AgentFunction}
)


def load_config(path: str | Path, changes: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file. changes: "a.b=c" each, c being YAML, set after the file was read.

    Numbers are those of YAML 1.2: 1e-6 is one. Raises ConfigError for a file that cannot be read, is no YAML, or names
    a key twice, and as from_mapping does.
    """
    values = _parsed(_text(path), str(path))
    for change in changes:
        key, separator, value = change.partition("=")
        _require(bool(separator and key), f"--set takes key=value, as in optimizer.learning_rate=1e-5; got {change!r}")
        _put(values, key, _yaml(value, f"--set {change}"))
    return from_mapping(values)


def from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """From parsed YAML. Raises ConfigError for unknown keys, naming the nearest, and for values that do not fit."""
    config = _built(RunConfig, values, "")
    for path, changed in config.data_changes.items():  # keys of `data` that stand elsewhere
        _require_known(changed, type(config.data), path)
    config.stages, config.eval_sets  # noqa: B018  raise for values that do not fit
    return config


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, with floats as YAML 1.2 has them, and without keys that hide one another."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"the key {key!r} stands twice{node.start_mark}; which one counts is not guessed")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?((\.\d+|\d+\.\d*)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$"),
    list("-+.0123456789"),
)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 ({error})") from error


def _yaml(text: str, place: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} is no YAML: {error}") from error


def _parsed(text: str, place: str) -> dict[str, Any]:
    values = _yaml(text, place)
    if not isinstance(values, dict):
        raise ConfigError(f"{place} must map the keys {', '.join(_names(RunConfig))}, got {values!r:.60}")
    return values


def _put(values: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        below = values.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {path}: {parent} is {below!r:.60}, which holds no keys")
        values = below
    values[last] = value


def _built(kind: type[T], values: object, path: str, default: object | None = None) -> T:
    """A dataclass from a mapping, section by section; what is left out is that of `default`, or the class's own."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must hold a mapping with keys of {', '.join(_names(kind))}, got {values!r:.60}")
    is_algorithm = kind is AlgorithmConfig  # it has presets, which are no field
    _require_known((key for key in values if not (is_algorithm and key == "preset")), kind, path)
    hints = typing.get_type_hints(kind, localns=dict(HIDDEN))
    given = {}
    for key, value in values.items():
        section = _section(hints.get(key), value)
        given[key] = value
        if section is not None:
            below, inner = section
            given[key] = _built(below, inner, f"{path}.{key}" if path else key, _default(kind, key, default))
    missing = [] if isinstance(default, kind) else [name for name in _required(kind) if name not in given]
    _require(not missing, f"{path or 'the configuration'} needs the key {' and '.join(missing)}")
    try:
        if is_algorithm:
            return typing.cast(T, AlgorithmConfig.from_mapping(given))
        return dataclasses.replace(default, **given) if isinstance(default, kind) else kind(**given)  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _section(hint: object, value: object) -> tuple[type[Any], object] | None:
    """The dataclass that a value is for, and what it is made of; None where the value is taken as it is."""
    kinds = set(typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,))
    if value is None and type(None) in kinds:
        return None
    kinds.discard(type(None))
    keys = value if isinstance(value, Mapping) else {}
    if DataConfig in kinds and "task" in keys:
        _require_choice("data", "task", keys["task"], tuple(TASKS))
        return TASKS[keys["task"]], {key: one for key, one in keys.items() if key != "task"}
    for plain in (DataConfig, AgentConfig):
        if plain in kinds:
            return (FunctionConfig if "function" in keys and FunctionConfig in kinds else plain), value
    kind = kinds.pop()
    return (kind, value) if not kinds and isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _default(kind: type, key: str, default: object | None) -> Any:
    """What a section that is given in part is filled up with: None where its class has no instance by default."""
    if default is not None:
        return getattr(default, key, None)
    [f] = [f for f in dataclasses.fields(kind) if f.name == key]
    return None if f.default_factory is dataclasses.MISSING else f.default_factory()


def _required(kind: type) -> list[str]:
    absent = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(kind) if f.default is absent and f.default_factory is absent]


def _names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _require_known(keys: Iterable[object], kind: type, path: str) -> None:
    known = _names(kind)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            before = f"{path}." if path else ""
            hint = f"did you mean {before}{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"there is no key {f'{before}{key}' or repr('')}; {hint}")

"""RunConfig: everything that a training run is told, from YAML. Typed, and unknown keys are refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..engine.config import (
    AgentConfig,
    EngineConfig,
    SamplingParams,
    _require,
    _require_choice,
    _require_int,
)
from ..engine.errors import ConfigError
from ..engine.lora import LoraConfig
from ..engine.templates import Template
from .config import AlgorithmConfig
from .data import DataConfig
from .optimizer import OptimizerConfig
from .trainer_config import TrainerConfig

__all__ = [
    "LogConfig",
    "ModelOptions",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "load_config",
]

T = TypeVar("T")

OBJECTIVES = ("rl",)


@dataclass(frozen=True)
class ModelOptions:
    """path: Hugging Face folder or GGUF file; None is the embedded model. engine: how it is held. lora: adapters to
    train; None trains all parameters. reference: see TrainerConfig."""

    path: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    lora: LoraConfig | None = None
    reference: str = "auto"


@dataclass(frozen=True)
class RewardConfig:
    """name: one of rewards.REWARDS."""

    name: str = "boxed_exact"


@dataclass(frozen=True)
class RolloutConfig:
    """steps: of the whole run. problems: rolled out for each. mini_batch: groups per update; None makes one update of
    a step's groups."""

    steps: int = 100
    problems: int = 8
    mini_batch: int | None = None

    def __post_init__(self) -> None:
        _require_int("RolloutConfig", "steps", self.steps, 1)
        _require_int("RolloutConfig", "problems", self.problems, 1)


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid out. train_tokens, recompute, share_prefixes: see TrainerConfig."""

    train_tokens: int = 16384
    recompute: bool = True
    share_prefixes: bool = True


@dataclass(frozen=True)
class LogConfig:
    """folder: of the run; log.jsonl and config.yaml are written there, and all that trackers keep."""

    folder: str = "run"

    def __post_init__(self) -> None:
        _require(isinstance(self.folder, str), f"LogConfig.folder must be a path, got {self.folder!r}")


def _training_agent() -> AgentConfig:
    return AgentConfig(sampling=SamplingParams(temperature=1.0))


@dataclass(frozen=True)
class RunConfig:
    """The top keys of the YAML. What a section leaves out has the default of its class; agent.sampling that of
    training, temperature 1 without a filter."""

    data: DataConfig
    model: ModelOptions = field(default_factory=ModelOptions)
    reward: RewardConfig = field(default_factory=RewardConfig)
    agent: AgentConfig = field(default_factory=_training_agent)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    objective: str = "rl"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _require_choice("RunConfig", "objective", self.objective, OBJECTIVES)

    @property
    def trainer(self) -> TrainerConfig:
        """What the Trainer is told. Raises ConfigError for sections that contradict one another."""
        return TrainerConfig(
            self.algorithm,
            self.optimizer,
            mini_batch=self.rollout.mini_batch,
            train_tokens=self.parallel.train_tokens,
            recompute=self.parallel.recompute,
            share_prefixes=self.parallel.share_prefixes,
            lora=self.model.lora,
            reference=self.model.reference,
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """From parsed YAML. Raises ConfigError for unknown keys, naming the nearest, and values."""
        return _built(cls, values, "")


def load_config(path: str | Path, changes: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file. changes: "a.b=c" each, c being YAML, set after the file was read.

    Numbers are those of YAML 1.2: 1e-6 is one. Raises ConfigError for a file that cannot be read, is no YAML, or names
    a key twice, and as RunConfig.from_mapping does.
    """
    values = _parsed(_text(path), str(path))
    for change in changes:
        key, separator, value = change.partition("=")
        _require(bool(separator and key), f"--set takes key=value, as in optimizer.learning_rate=1e-5; got {change!r}")
        _put(values, key, yaml.load(value, _Loader))
    return RunConfig.from_mapping(values)


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


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} is no YAML: {error}") from error
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


def _built(kind: type[T], values: object, path: str, default: T | None = None) -> T:
    """A dataclass from a mapping, section by section; what is left out is that of `default`, or the class's own."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must hold a mapping with keys of {', '.join(_names(kind))}, got {values!r:.60}")
    known = _names(kind)
    is_algorithm = kind is AlgorithmConfig  # has presets, which are no field
    for key in values:
        if key not in known and not (is_algorithm and key == "preset"):
            _unknown(str(key), known, path)
    hints = typing.get_type_hints(kind, localns={"Template": Template})
    given: dict[str, Any] = {}
    for key, value in values.items():
        section = _section(hints.get(key))
        below = f"{path}.{key}" if path else key
        if section is None or (value is None and type(None) in typing.get_args(hints[key])):
            given[key] = value
        else:
            given[key] = _built(section, value, below, _default(kind, key, default))
    try:
        if is_algorithm:
            return typing.cast(T, AlgorithmConfig.from_mapping(given))
        return kind(**given) if default is None else dataclasses.replace(default, **given)  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error
    except TypeError as error:
        raise ConfigError(f"{path or 'the configuration'} lacks a key without a default: {error}") from error


def _names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _unknown(key: str, known: list[str], path: str) -> None:
    near = difflib.get_close_matches(key, known, n=1)
    before = f"{path}." if path else ""
    hint = f"did you mean {before}{near[0]}?" if near else f"known keys: {', '.join(known)}"
    raise ConfigError(f"there is no key {before}{key}; {hint}")


def _section(hint: object) -> type[Any] | None:
    """The dataclass that a field holds, None for a field that holds none."""
    kinds = set(typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,))
    kinds.discard(type(None))
    kind = kinds.pop()
    return kind if not kinds and isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _default(kind: type, key: str, default: object | None) -> Any:
    """What a section that is given in part is filled up with: None where its class has no instance by default."""
    if default is not None:
        return getattr(default, key)
    [f] = [f for f in dataclasses.fields(kind) if f.name == key]
    return None if f.default_factory is dataclasses.MISSING else f.default_factory()

"""RunConfig: everything that a training run is told. Frozen and validated where it is made; config_file.py reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.config import (
    AgentConfig,
    EngineConfig,
    FrozenDict,
    SamplingParams,
    _frozen,
    _require,
    _require_bool,
    _require_choice,
    _require_int,
    _require_number,
    _tuple,
)
from ..engine.lora import LoraConfig
from ..engine.trace import differences
from .agent_function import FunctionConfig
from .checkpoint import CheckpointConfig
from .config import AlgorithmConfig
from .data import DataConfig
from .optimizer import OptimizerConfig
from .tasks import ExamplesConfig, TaskConfig
from .trainer_config import TrainerConfig

__all__ = [
    "AnyData",
    "CurriculumConfig",
    "EvalConfig",
    "LogConfig",
    "ModelOptions",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
]

OBJECTIVES = ("rl", "sft")
NO_DIFFERENCE = ("log.", "checkpoint.", "rollout.steps")  # to what a step does
WANDB_MODES = ("online", "offline")

AnyData = DataConfig | TaskConfig | ExamplesConfig


@dataclass(frozen=True)
class ModelOptions:
    """path: Hugging Face folder or GGUF file; None is the embedded model. engine: how it is held. lora: fresh adapters
    to train; adapter: the PEFT folder of some to train on. Without either all parameters are trained. reference: see
    TrainerConfig."""

    path: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    lora: LoraConfig | None = None
    adapter: str | None = None
    reference: str = "auto"

    def __post_init__(self) -> None:
        for name, kinds in (("path", "a folder, a .gguf file"), ("adapter", "a folder")):
            value = getattr(self, name)
            ok = value is None or isinstance(value, str)
            _require(ok, f"ModelOptions.{name} must be {kinds} or null, got {value!r}")
        _require(
            self.adapter is None or self.lora is None,
            f"ModelOptions has lora and adapter={self.adapter!r}; fresh adapters, or those of a folder: leave one out",
        )


@dataclass(frozen=True)
class RewardConfig:
    """name, timeout, workers: see Scorer; a function of the user's own is "module:function"."""

    name: str = "boxed_exact"
    timeout: float = 60.0
    workers: int = 2


@dataclass(frozen=True)
class CurriculumConfig:
    """Other data when it has been learnt: stages are keys of `data` that change, each beginning when the mean answer of
    the last `steps` steps, all in the stage before it, reaches `reward` (shaping and dynamic sampling left aside)."""

    stages: tuple[Mapping[str, Any], ...]
    reward: float = 0.95
    steps: int = 3

    def __post_init__(self) -> None:
        owner = "CurriculumConfig"
        stages = _tuple(owner, "stages", self.stages)
        _require(bool(stages), f"{owner}.stages must hold at least one mapping of keys of data that change")
        object.__setattr__(self, "stages", tuple(_frozen(owner, "stages", stage) for stage in stages))
        _require_number(owner, "reward", self.reward, -1e6, 1e6)
        _require_int(owner, "steps", self.steps, 1)


@dataclass(frozen=True)
class RolloutConfig:
    """steps: of the whole run. problems: rolled out for each. mini_batch: groups per update; None makes one update of
    a step's groups. curriculum: None keeps to one kind of data."""

    steps: int = 100
    problems: int = 8
    mini_batch: int | None = None
    curriculum: CurriculumConfig | None = None

    def __post_init__(self) -> None:
        _require_int("RolloutConfig", "steps", self.steps, 1)
        _require_int("RolloutConfig", "problems", self.problems, 1)


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid out.

    train_tokens, recompute, share_prefixes: see TrainerConfig. tensor: so many neighbouring ranks of torchrun hold one
    model together; ranks beyond that work on different groups. deterministic: see Rollout; without it a run is faster
    and cannot be resumed to the bit. timeout: longest time that a rank waits for another, seconds.
    """

    train_tokens: int = 16384
    recompute: bool = True
    share_prefixes: bool = True
    tensor: int = 1
    deterministic: bool = True
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        _require_int("ParallelConfig", "tensor", self.tensor, 1)
        _require_bool("ParallelConfig", "deterministic", self.deterministic)
        _require_number("ParallelConfig", "timeout", self.timeout, 1.0, 1e6)


@dataclass(frozen=True)
class LogConfig:
    """folder: of all that the run writes; log.jsonl is there. trajectories: keep those of every step too, to look at
    and to train from again. tensorboard: write its event files. wandb: a project of Weights & Biases; None leaves it
    out. wandb_mode: "offline" writes what `wandb sync` sends later."""

    folder: str = "run"
    trajectories: bool = False
    tensorboard: bool = False
    wandb: str | None = None
    wandb_mode: str = "online"

    def __post_init__(self) -> None:
        ok = isinstance(self.folder, str) and bool(self.folder)
        _require(ok, f"LogConfig.folder must be a path, got {self.folder!r}")
        for name in ("trajectories", "tensorboard"):
            _require_bool("LogConfig", name, getattr(self, name))
        ok = self.wandb is None or isinstance(self.wandb, str)
        _require(ok, f"LogConfig.wandb must be the name of a project or null, got {self.wandb!r}")
        _require_choice("LogConfig", "wandb_mode", self.wandb_mode, WANDB_MODES)


@dataclass(frozen=True)
class EvalConfig:
    """sets: data to evaluate on, by a name: the keys of `data` that change, a mapping for each set. every: steps from
    one evaluation to the next; there is one before the first step and one after the last. problems: the first so many
    of each set. sampling: greedy by default."""

    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=FrozenDict)
    every: int = 10
    problems: int = 32
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def __post_init__(self) -> None:
        sets = _frozen("EvalConfig", "sets", self.sets)
        frozen = {name: _frozen("EvalConfig", f"sets.{name}", changes) for name, changes in sets.items()}
        object.__setattr__(self, "sets", FrozenDict(frozen))
        for name in ("every", "problems"):
            _require_int("EvalConfig", name, getattr(self, name), 1)


def _training_agent() -> AgentConfig:
    return AgentConfig(sampling=SamplingParams(temperature=1.0))


@dataclass(frozen=True)
class RunConfig:
    """The top keys of the YAML. What a section leaves out has the default of its class; agent.sampling that of
    training, temperature 1 without a filter.

    data: rows of files, or with the key "task" a generated task of tasks.TASKS. agent: the memory agent, or with the
    key "function" an agent of the user's own. objective: "rl", or "sft" on the examples of an oracle, rollout.problems
    of them in each step.
    """

    data: AnyData
    model: ModelOptions = field(default_factory=ModelOptions)
    reward: RewardConfig = field(default_factory=RewardConfig)
    agent: AgentConfig | FunctionConfig = field(default_factory=_training_agent)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    objective: str = "rl"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        _require_choice("RunConfig", "objective", self.objective, OBJECTIVES)
        supervised = isinstance(self.data, ExamplesConfig)
        _require(
            supervised == (self.objective == "sft"),
            f"objective {self.objective!r} does not go with the data given: 'sft' takes a task with an oracle, as "
            "data.task=slots_oracle, and 'rl' takes problems",
        )
        unused = {
            "reward": self.reward != RewardConfig(),
            "algorithm": self.algorithm != AlgorithmConfig(),
            "eval.sets": bool(self.eval.sets),
            "rollout.curriculum": self.rollout.curriculum is not None,
            "rollout.mini_batch": self.rollout.mini_batch is not None,
            "model.reference": self.model.reference != ModelOptions.reference,
            "parallel.deterministic": not self.parallel.deterministic,
            "log.trajectories": self.log.trajectories,
        }
        for name, given in unused.items():
            _require(not (supervised and given), f"{name} is of no use with objective 'sft'; leave it out")

    def plain(self) -> dict[str, Any]:
        """All of it as JSON gives it back."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values

    def changes_since(self, before: Mapping[str, Any]) -> Iterator[str]:
        """In words, what is other than in the plain configuration of before and matters to what a step does."""
        for key, (was, now) in differences(before, self.plain()):
            if not key.startswith(NO_DIFFERENCE):
                yield f"{key} was {was!r} and is {now!r} from here on"

    @property
    def data_changes(self) -> dict[str, Mapping[str, Any]]:
        """Keys of `data` that are changed elsewhere, by where."""
        curriculum = self.rollout.curriculum
        stages = () if curriculum is None else curriculum.stages
        changes = {f"rollout.curriculum.stages[{i}]": stage for i, stage in enumerate(stages)}
        return changes | {f"eval.sets.{name}": change for name, change in self.eval.sets.items()}

    @property
    def stages(self) -> tuple[AnyData, ...]:
        """The data, and then what each stage of the curriculum makes of it."""
        curriculum = self.rollout.curriculum
        stages = () if curriculum is None else curriculum.stages
        return (self.data, *(dataclasses.replace(self.data, **stage) for stage in stages))

    @property
    def eval_sets(self) -> dict[str, AnyData]:
        """What is evaluated on, by name."""
        return {name: dataclasses.replace(self.data, **changes) for name, changes in self.eval.sets.items()}

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

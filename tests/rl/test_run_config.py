"""RunConfig: YAML to typed configurations; what is misspelt, twice there or of another type is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from palimpsest.engine.config import AgentConfig, SamplingParams
from palimpsest.engine.errors import ConfigError
from palimpsest.engine.lora import LoraConfig
from palimpsest.rl.agent_function import FunctionConfig
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.config_file import load_config
from palimpsest.rl.run_config import RunConfig
from palimpsest.rl.tasks import SlotsConfig

YAML = """
model: {path: m, engine: {max_context: 1024}, lora: {rank: 4}}
data: {path: train.jsonl}
agent: {chunk_tokens: 64, sampling: {seed: 7}}
algorithm: {preset: dapo, group_size: 4}
optimizer: {learning_rate: 1e-5, betas: [0.9, 0.99]}
"""


def load(tmp_path: Path, text: str, *changes: str) -> RunConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_config(file, changes)


def test_sections_become_the_configurations_that_the_parts_take(tmp_path: Path) -> None:
    config = load(tmp_path, YAML, "rollout.steps=5", "model.lora.rank=8", "optimizer.clip=null", "data.shuffle=true")
    assert config.model.engine.max_context == 1024 and config.model.engine.page_size == 16
    assert config.model.lora == LoraConfig(rank=8)
    assert config.agent == AgentConfig(chunk_tokens=64, sampling=SamplingParams(temperature=1.0, seed=7))
    assert config.algorithm == AlgorithmConfig.preset("dapo", group_size=4)
    assert config.optimizer.learning_rate == 1e-5 and config.optimizer.betas == (0.9, 0.99)
    assert config.optimizer.clip is None and config.data.path == ("train.jsonl",) and config.data.shuffle
    assert config.rollout.steps == 5 and config.trainer.lora == config.model.lora


def test_a_key_says_what_kind_of_data_and_agent_is_meant(tmp_path: Path) -> None:
    tokens = ("rollout.curriculum.stages=[{tokens: 512}, {tokens: 2048}]", "eval.sets={long: {tokens: 4096, seed: 1}}")
    config = load(tmp_path, "data: {task: slots, tokens: 128}\nagent: {function: 'my:agent'}", *tokens)
    assert config.agent == FunctionConfig("my:agent") and config.data == SlotsConfig(tokens=128)
    assert [data.tokens for data in config.stages if isinstance(data, SlotsConfig)] == [128, 512, 2048]
    assert config.eval_sets == {"long": SlotsConfig(seed=1, tokens=4096)}
    agent = load(tmp_path, YAML, "agent.template=['a', '{problem}', '{memory}', '{chunk}']").agent
    assert isinstance(agent, AgentConfig) and agent.sampling.seed == 7
    for change, message in (
        ("data.task=slot", "data.task must be one of slots, "),
        ("data.shuffle=true", "no key data.shuffle"),
        ("data.tokens=100", "data: SlotsConfig.tokens must be a multiple"),
        ("eval.sets.long.token=3", "no key eval.sets.long.token; did you mean eval.sets.long.tokens"),
        ("rollout.curriculum.stages=[{tokens: 3}]", "tokens must be"),
        ("rollout.curriculum.stages=[]", "stages must hold at least one"),
        ("agent.timeout=-1", "agent: FunctionConfig.timeout must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, "data: {task: slots}\nagent: {function: 'my:agent'}", *tokens, change)


def test_what_supervised_training_does_not_do_is_refused(tmp_path: Path) -> None:
    text = "objective: sft\ndata: {task: slots_oracle}"
    assert load(tmp_path, text).objective == "sft"
    for name, change in (
        ("reward", "reward.name=em"),
        ("algorithm", "algorithm.group_size=4"),
        ("eval.sets", "eval.sets={a: {}}"),
        ("rollout.curriculum", "rollout.curriculum.stages=[{noise: 0}]"),
        ("rollout.mini_batch", "rollout.mini_batch=2"),
        ("model.reference", "model.reference=none"),
        ("parallel.deterministic", "parallel.deterministic=false"),
        ("log.trajectories", "log.trajectories=true"),
    ):
        with pytest.raises(ConfigError, match=f"{name} is of no use"):
            load(tmp_path, text, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimiser.learning_rate=1", "no key optimiser; did you mean optimizer?"),
        ("agent.sampling.temperatur=1", "no key agent.sampling.temperatur; did you mean agent.sampling.temperature?"),
        ("algorithm.group_sise=1", "did you mean algorithm.group_size?"),
        ("algorithm.preset=dappo", "algorithm: .*preset must be one of"),
        ("agent=3", "agent must hold a mapping"),
        ("model.engine.page_size=0", "model.engine: EngineConfig.page_size must be"),
        ("agent.chunk_tokens.x=3", "agent.chunk_tokens.x: chunk_tokens is 64"),
        ("rollout.steps", "takes key=value"),
        ("objective=poem", "objective must be one of"),
        ("data.document_tokens=5", "set both or neither"),
        ("model.path=3", "model: ModelOptions.path must be a folder"),
        ("log.folder=''", "log: LogConfig.folder must be a path"),
        (".steps=3", "no key ''; known keys"),
        ("data={}", "data needs the key path"),
        ("data=null", "data must hold a mapping"),
        (
            "data={task: slotz}",
            "data.task must be one of slots, slots_oracle, facts, facts_oracle, facts_quiz, got",
        ),
        ("data={task: slots, lenght: 3}", "no key data.lenght"),
        ("data={task: slots, tokens: 3}", "data: SlotsConfig.tokens must be"),
        ("data={task: slots_oracle}", "objective 'rl' does not go with the data"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, YAML, change)


def test_files_that_hold_no_configuration_are_refused(tmp_path: Path) -> None:
    for text, message in (
        ("a: [", "is no YAML"),
        ("- 3", "must map the keys"),
        ("agent: {chunk_tokens: 1, chunk_tokens: 2}", "'chunk_tokens' stands twice"),
        ("model: {path: m}", "the configuration needs the key data"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, text)
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")

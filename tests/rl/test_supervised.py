"""Supervised training: the gradient is that of the plain cross-entropy, over any packs, and the loss falls."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest.engine.config import EngineConfig
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError, RequestError
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.supervised import Example, SupervisedTrainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.tests.tiny_models import make_model_folder

PROMPT = array("i", range(40, 77))
EXAMPLES = [
    Example(PROMPT, array("i", [5, 9, 2])),
    Example(PROMPT, array("i", [6])),  # shares its prompt
    Example(PROMPT[:20], array("i", [7, 7, 7, 7, 2])),
    Example(array("i", [3]), array("i", [8, 2])),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen2", tie_word_embeddings=True)


def make_trainer(folder: Path, **changes: Any) -> SupervisedTrainer:
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 20, threads=1, max_context=256))
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=0, clip=None)
    return SupervisedTrainer(engine, TrainerConfig(**{"optimizer": optimizer} | changes))


def gradients(trainer: SupervisedTrainer) -> dict[str, torch.Tensor]:
    """What the optimizer would be given; nothing is updated."""
    found: dict[str, torch.Tensor] = {}

    def catch(denominator: float) -> tuple[float, float]:
        for name, parameter in trainer.engine.model.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad / denominator
        trainer._optimizer.forget()
        return 0.0, 0.0

    trainer._optimizer.step = catch  # type: ignore[method-assign]
    trainer.step(EXAMPLES)
    return found


@pytest.mark.parametrize("changes", [{}, {"train_tokens": 41}, {"recompute": False, "share_prefixes": False}])
def test_gradient_is_that_of_the_cross_entropy(folder: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total = sum(len(example.response_ids) for example in EXAMPLES)
    for example in EXAMPLES:
        ids = torch.tensor([*example.prompt_ids, *example.response_ids])
        logits = theirs(ids[None]).logits[0, len(example.prompt_ids) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([*example.response_ids]), reduction="sum")
        (loss / total).backward()
    ours = gradients(make_trainer(folder, **changes))
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        error = (ours[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name


def test_it_learns_the_responses(folder: Path) -> None:
    trainer = make_trainer(folder)
    reports = [trainer.step(EXAMPLES) for _ in range(40)]
    assert reports[-1].loss < 0.5 < 3.0 < reports[0].loss
    assert (reports[0].examples, reports[0].tokens, trainer.steps) == (4, 11, 40)


def test_mistakes_are_refused_and_change_nothing(folder: Path) -> None:
    trainer = make_trainer(folder, train_tokens=30)
    before = [parameter.clone() for parameter in trainer.engine.model.parameters()]
    with pytest.raises(RequestError, match="at least one example"):
        trainer.step([])
    with pytest.raises(ConfigError, match="train_tokens=30"):
        trainer.step([EXAMPLES[3], EXAMPLES[0]])
    for parameter, old in zip(trainer.engine.model.parameters(), before, strict=True):
        assert parameter.grad is None and torch.equal(parameter, old)

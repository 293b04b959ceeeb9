"""Packing: the rows of the rollout, in any order and grouping; what is shared is computed once and changes nothing."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from palimpsest.engine.config import EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError
from palimpsest.rl.packing import Ids, Pack, pack_turns, response_rows
from palimpsest.tests.tiny_models import make_model_folder
from torch import Tensor

PAGE = 8
MODELS = {"llama": {"attention_bias": True}, "qwen3": {"num_key_value_heads": 1, "tie_word_embeddings": True}}


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_model_folder(tmp_path_factory.mktemp("model"), request.param, **MODELS[request.param])
    engine = Engine(folder, EngineConfig(kv_bytes=1 << 22, page_size=PAGE, threads=1))
    engine.model.requires_grad_(True)
    return engine


@pytest.fixture(scope="module")
def turns() -> list[Ids]:
    """64 turns of 1 to 90 tokens: groups of four behind a common chunk, an empty response, two equal turns."""
    rng = random.Random(2)

    def some(count: int) -> array[int]:
        return array("i", [rng.randrange(300) for _ in range(count)])

    head = some(20)
    made = [
        (head + chunk + some(rng.randrange(1, 6)), some(rng.choice((1, 2, 9, 30))))
        for chunk in (some(rng.randrange(40)) for _ in range(16))
        for _ in range(4)
    ]
    made[5] = (made[5][0], array("i"))
    made[9] = made[8]
    return made


def logprobs_of(engine: Engine, pack: Pack, recompute: bool) -> Tensor:
    rows = response_rows(engine.model, pack, PAGE, torch.float32, recompute)
    logits = engine.model.logits(rows)
    return logits.gather(1, pack.targets[:, None])[:, 0] - engine.model.ops.log_sum_exp(logits)


def run(
    engine: Engine, turns: list[Ids], budget: int, share: bool = True, recompute: bool = False
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Log-probabilities by turn, and the gradient of their sum weighted by the turn's length."""
    engine.model.zero_grad()
    found: dict[int, Tensor] = {}
    for pack in pack_turns(turns, budget, PAGE, share):
        logprobs = logprobs_of(engine, pack, recompute)
        for turn, part in zip(pack.turns, logprobs.split(pack.lengths), strict=True):
            found[turn] = part.detach()
        weights = [1.0 / length for length in pack.lengths for _ in range(length)]
        (logprobs * torch.tensor(weights)).sum().backward()  # type: ignore[no-untyped-call]
    return found, {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name in plain:
        assert (ours[name] - plain[name]).norm() <= 1e-6 * plain[name].norm(), name


def test_one_turn_many_turns_shared_or_not_is_the_same(engine: Engine, turns: list[Ids]) -> None:
    alone, plain = run(engine, turns, 100, share=False)
    assert set(alone) == {i for i, (_, response) in enumerate(turns) if response}
    assert all(plain[name].abs().max() > 0 for name, _ in engine.model.named_parameters())
    for budget, share in ((100, True), (700, False), (100_000, False), (100_000, True)):
        found, gradients = run(engine, turns, budget, share)
        assert all(torch.equal(found[i], alone[i]) for i in alone)
        assert_same_gradients(gradients, plain)


def test_order_of_the_turns_and_recomputation_change_no_bit(engine: Engine, turns: list[Ids]) -> None:
    found, gradients = run(engine, turns, 700)
    order = random.Random(1).sample(range(64), 64)
    shuffled, same = run(engine, [turns[i] for i in order], 700, recompute=True)
    assert all(torch.equal(shuffled[k], found[i]) for k, i in enumerate(order) if i in found)
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)


def test_shared_pages_are_computed_once(turns: list[Ids]) -> None:
    rows = {share: sum(len(p.batch.ids) for p in pack_turns(turns, 10**6, PAGE, share)) for share in (False, True)}
    assert rows[False] == sum(len(prompt) + len(response) - 1 for prompt, response in turns if response)
    once = {
        (tokens[: i + PAGE if i + PAGE <= len(tokens) else None].tobytes(), k * (i + PAGE > len(tokens)))
        for k, tokens in enumerate(prompt + response[:-1] for prompt, response in turns if response)
        for i in range(0, len(tokens), PAGE)
    }
    sizes = [len(ids) // 4 % PAGE or PAGE for ids, _ in once]
    assert rows[True] == sum(sizes) < 0.75 * rows[False]


def test_rows_are_those_of_the_rollout(engine: Engine) -> None:
    """Responses of the engine, with prefixes cached and prompts in pieces: the same bits of log-probability."""
    prompts = ["The keeper said: don't count", "The keeper said: don't look at the ships", "We'll see who is right"]
    params = SamplingParams(max_tokens=17, seed=4)
    done = engine.generate(prompts, params)
    turns = [(engine.tokenizer.encode_prompt(prompt), one.token_ids) for prompt, one in zip(prompts, done, strict=True)]
    found, _ = run(engine, turns, 1000)
    for i, one in enumerate(done):
        assert found[i].tolist() == one.logprobs


def test_a_turn_longer_than_the_budget_is_refused(turns: list[Ids]) -> None:
    with pytest.raises(ConfigError, match="train_tokens=20; raise it"):
        list(pack_turns(turns, 20, PAGE))
    assert list(pack_turns([turns[5]], 20, PAGE)) == []

"""Agents as functions: the same draws in any company, failures that end nothing, and what is trained on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.errors import ConfigError, RequestError, WindowError
from palimpsest.engine.memory_agent import MemoryAgent
from palimpsest.engine.reading import Turn
from palimpsest.examples.agents import calculator, memory, single_turn
from palimpsest.rl.agent_function import FunctionAgent, FunctionConfig
from palimpsest.rl.chat import Reply
from palimpsest.rl.config import AlgorithmConfig
from palimpsest.rl.group_loss import GroupLoss
from palimpsest.rl.llm import LLM
from palimpsest.rl.optimizer import OptimizerConfig
from palimpsest.rl.packing import pack_turns
from palimpsest.rl.replay import dumped, read_step
from palimpsest.rl.rollout import Rollout
from palimpsest.rl.trainer import Trainer
from palimpsest.rl.trainer_config import TrainerConfig
from palimpsest.rl.trajectory import Episode, Problem
from palimpsest.tests.tiny_models import make_model_folder
from transformers import AutoModelForCausalLM

ALGORITHM = AlgorithmConfig(group_size=4, kl=0.0)
SAMPLING = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
PROBLEM = Problem("The keeper counted the lamps.", "What is 2 + 3?", ("5",), extra={"year": 1874})

Function = Callable[[Problem, LLM], Awaitable[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama")


def make_engine(folder: Path, **changes: Any) -> Engine:
    values: dict[str, Any] = {"kv_bytes": 1 << 22, "threads": 1, "max_context": 1024} | changes
    return Engine(folder, EngineConfig(**values))


def make_agent(folder: Path, function: Function, timeout: float = 60.0, **changes: Any) -> FunctionAgent:
    return FunctionAgent(make_engine(folder, **changes), FunctionConfig(function, SAMPLING, timeout))


def drawn(turns: Any) -> list[Any]:
    return [(turn.index, list(turn.prompt_ids), list(turn.response_ids), turn.logprobs) for turn in turns]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def talk(sample: Problem, llm: LLM) -> str:
    """A conversation of four calls, whose tool says more each time."""
    messages = ask(sample.question)
    for round in range(4):
        reply = await llm.chat(messages)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"tool {round} <|im_end|>!"}]
    return reply


def test_the_memory_agent_as_a_function_is_the_memory_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHUNK_TOKENS", 40), ("MEMORY_TOKENS", 12), ("ANSWER_TOKENS", 9)):
        monkeypatch.setattr(memory, name, value)
    document = "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(1800, 1804))
    function = make_agent(folder, memory.agent)
    config = AgentConfig(40, 12, 9, template="chunk_first", sampling=SAMPLING)
    readings = MemoryAgent(make_engine(folder), config).rollout(document, "Who?", 3, first_sample=5)
    problem = Problem(iter([document[:50], document[50:]]), "Who?", ())  # a stream, which is there once
    episodes = {place: e for _, place, e in function.episodes([problem], 3, first_sample=5)}
    for place, reading in enumerate(readings):
        assert drawn(episodes[place].turns) == drawn(reading.turns) and len(reading.turns) > 3
        assert episodes[place].result == reading.answer
        assert list(episodes[place].limits) == [12] * (len(reading.turns) - 1) + [9]


def test_company_and_the_order_of_completion_change_nothing(folder: Path) -> None:
    async def late(sample: Problem, llm: LLM) -> str:
        await asyncio.sleep(0.01 * (hash(llm) % 7))
        return await talk(sample, llm)

    alone = {}
    agent = make_agent(folder, talk, max_sequences=1, drafts=False)
    for sample in range(6):
        alone[sample] = agent.run(PROBLEM, sample=sample)
    together = {2 * t + i: e for t, i, e in make_agent(folder, late).episodes([PROBLEM] * 3, 2)}
    assert {i: drawn(e.turns) for i, e in together.items()} == {i: drawn(e.turns) for i, e in alone.items()}
    assert len({str(drawn(e.turns)) for e in alone.values()}) == 6


def test_calls_side_by_side_have_numbers_of_their_own(folder: Path) -> None:
    def parted(pause: dict[int, float]) -> Function:
        async def branch(llm: LLM, number: int) -> None:
            for step in range(3):
                await asyncio.sleep(pause[number])
                await llm.chat(ask(f"part {number}"), turn=10 * number + step)

        async def agent(sample: Problem, llm: LLM) -> str:
            await asyncio.gather(branch(llm, 1), branch(llm, 2))
            return await llm.complete([1, 2, 3], max_tokens=3)

        return agent

    found = [make_agent(folder, parted(pause)).run(PROBLEM) for pause in ({1: 0.02, 2: 0}, {1: 0, 2: 0.02})]
    assert drawn(found[0].turns) == drawn(found[1].turns)
    assert [turn.index for turn in found[0].turns] == [10, 11, 12, 20, 21, 22, 23]
    assert list(found[0].limits) == [12] * 6 + [3]


def test_a_conversation_goes_on_with_its_own_ids(folder: Path) -> None:
    """What was drawn stands in the next prompt as it was drawn, and is computed once: in the engine and in packing."""
    agent = make_agent(folder, talk)
    turns = agent.run(PROBLEM).turns
    for before, after in pairwise(turns):
        shared = before.prompt_ids + before.response_ids[: before.text_tokens]
        assert after.prompt_ids[: len(shared)] == shared
        assert after.cached_tokens >= (len(shared) - 1) // 16 * 16 > 0
    control = agent.engine.tokenizer.id_of("<|im_end|>")
    assert turns[0].prompt_ids.count(control) == 2  # of the system message and the question
    ends = [turn.response_ids[-1] for turn in turns[:-1]]
    assert turns[-1].prompt_ids.count(control) == 2 + 2 * len(ends)  # none of them from what the tool said
    whole = [len(turn.prompt_ids) + len(turn.response_ids) - 1 for turn in turns]
    [pack] = pack_turns([(turn.prompt_ids, turn.response_ids) for turn in turns], 4096, 16)
    assert len(pack.batch.ids) < max(whole) + 16 * len(turns) < sum(whole) / 2


def failing(kind: str) -> Function:
    async def agent(sample: Problem, llm: LLM) -> Any:
        if kind == "no_call":
            return "5"
        reply = await llm.chat(ask(sample.question))
        if kind == "raised":
            raise {"1": ValueError("boom"), "2": SystemExit(3)}[sample.answers[0]]
        if kind == "window":
            await llm.complete([1] * 2000)
        if kind == "timeout":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    if sample.answers == ("1",):
                        raise
        if kind == "result":
            return {"1": None, "2": float("nan")}[sample.answers[0]]
        if kind == "left":
            task = asyncio.ensure_future(llm.chat(ask("for nobody"), max_tokens=500))
            await asyncio.sleep(0)
            assert not task.done()
        return torch.tensor(0.25) if kind == "number" else reply

    return agent


def test_what_fails_is_counted_and_ends_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palimpsest.rl.agent_loop.GRACE", 0.05)  # for the one that will not be cancelled
    kinds = ["raised", "no_call", "window", "timeout", "result", "good", "left", "number"]

    async def mixed(sample: Problem, llm: LLM) -> Any:
        return await failing(sample.id)(sample, llm)

    problems = [Problem("", "Who?", (answer,), id=kind) for kind in kinds for answer in "12"]
    agent = make_agent(folder, mixed, timeout=0.3)
    rollout = Rollout(agent, lambda answer, references, extra: 1.0, dataclasses.replace(ALGORITHM, group_size=2))
    with pytest.warns(UserWarning, match="an agent failed") as seen:
        groups = list(rollout.groups(problems, len(problems)))
    failed = ["raised", "no_call", "window", "timeout", "result"]
    assert rollout.failures == {f"agent.{kind}": 4 for kind in failed} and len(seen) == len(failed)
    assert "ValueError: boom" in agent.failures.first["raised"] and "2000 tokens" in agent.failures.first["window"]
    rewards = sorted(t.reward for group in groups for t in group.trajectories)
    assert rewards == [0.0] * 20 + [0.25] * 4 + [1.0] * 8
    turns = sorted(len(t.turns) for group in groups for t in group.trajectories)
    assert turns == [0] * 4 + [1] * 28  # what a failed one did is kept
    assert not agent.engine.unfinished
    agent.engine.scheduler.pool.check([])
    again = Rollout(agent, "em", ALGORITHM)
    again.load_state_dict(rollout.state_dict())
    assert again.failures == rollout.failures and again.samples == 32


def test_only_one_wait_has_the_time_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palimpsest.rl.agent_loop.TICK", 0.05)

    async def slow(sample: Problem, llm: LLM) -> str:
        for _ in range(6):
            await asyncio.sleep(0.12)
            reply = await llm.complete([1, 2, 3], max_tokens=1)
        return reply

    agent = make_agent(folder, slow, timeout=0.3)
    assert isinstance(agent.run(PROBLEM).result, str) and not agent.failures.counts


def test_leaving_early_ends_everything(folder: Path) -> None:
    put_away = []

    async def careful(sample: Problem, llm: LLM) -> str:
        try:
            await llm.chat(ask("Who?"))
            return await llm.chat(ask("Who?"), max_tokens=1 if sample.id == "short" else 900)
        finally:
            put_away.append(sample.id)

    agent = make_agent(folder, careful)
    groups = Rollout(agent, "em", ALGORITHM).groups([Problem("", "", (), id=i) for i in ("short", "long")], 2)
    next(groups)
    assert agent.engine.unfinished and len(put_away) == 4
    groups.close()
    assert not agent.engine.unfinished and len(put_away) == 8


def test_an_error_of_the_engine_ends_the_rollout(folder: Path) -> None:
    async def patient(sample: Problem, llm: LLM) -> str:
        try:
            return await llm.chat(ask("Who?"))
        except RequestError:
            return "5"

    agent = make_agent(folder, patient)
    with torch.no_grad():
        agent.engine.model.head_weight.fill_(float("nan"))
    with pytest.raises(RequestError, match="a call of an agent failed"):
        list(agent.episodes([PROBLEM], 2))
    assert not agent.engine.unfinished


def test_what_cannot_be_run_is_refused(folder: Path) -> None:
    engine = make_engine(folder)
    for wrong in (lambda sample, llm: "5", single_turn, "palimpsest.examples.agents.single_turn", "no.such:agent"):
        with pytest.raises(ConfigError):
            FunctionAgent(engine, FunctionConfig(wrong))  # type: ignore[arg-type]
    for changes in ({"timeout": 0}, {"sampling": 3}, {"sampling": SamplingParams(top_logprobs=1)}):
        with pytest.raises(ConfigError):
            FunctionConfig(talk, **changes)  # type: ignore[arg-type]
    agent = FunctionAgent(engine, FunctionConfig("palimpsest.examples.agents.single_turn:agent", SAMPLING))
    assert isinstance(agent.run(PROBLEM).result, str)
    with pytest.raises(ConfigError, match="top_p"):
        Rollout(FunctionAgent(engine, FunctionConfig(talk, SamplingParams(top_p=0.5))), "em", ALGORITHM)
    engine.parallel = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="data parallel"):
        FunctionAgent(engine, FunctionConfig(talk))
    engine.parallel = None

    async def inside() -> Episode:
        return agent.run(PROBLEM)

    with pytest.raises(RequestError, match="event loop"):
        asyncio.run(inside())


def test_ill_formed_calls_are_refused(folder: Path) -> None:
    said: list[str] = []
    kept: list[LLM] = []

    async def agent(sample: Problem, llm: LLM) -> str:
        kept.append(llm)
        wrong: list[Any] = ["Who?", [], [{"role": "user"}], [{"role": "user", "content": None}]]
        wrong += [[{"role": "user", "content": "?", "name": "x"}]]
        for messages in wrong:
            with pytest.raises(RequestError) as error:
                await llm.chat(messages)
            said.append(str(error.value))
        with pytest.raises(ConfigError):
            await llm.chat(ask("?"), max_tokens=0)
        with pytest.raises(WindowError):
            await llm.complete([1] * 1024)
        reply = await llm.chat(ask("?"), turn=7, stop=("e",))
        assert "e" not in reply and isinstance(reply, Reply)
        with pytest.raises(RequestError, match="turn=7"):
            await llm.chat(ask("?"), turn=7)
        return reply.strip()

    assert len(make_agent(folder, agent).run(PROBLEM).turns) == 1 and len(said) == 5
    with pytest.raises(RequestError, match="has ended"):
        asyncio.run(kept[0].chat(ask("?")))  # type: ignore[arg-type]


def conversation(folder: Path, sampling: SamplingParams) -> tuple[Engine, Any]:
    """A group of two, one of which is right, of four calls each, with a tool between them."""
    engine = make_engine(folder)
    agent = FunctionAgent(engine, FunctionConfig(talk, sampling))
    values = iter([1.0, 0.0])
    algorithm = dataclasses.replace(ALGORITHM, group_size=2)
    [group] = Rollout(agent, lambda answer, references: next(values), algorithm).groups([PROBLEM], 1)
    return engine, group


def test_what_a_tool_says_carries_no_gradient(folder: Path) -> None:
    """Against one long conversation with a mask: the loss has no term for a token that the model did not draw.

    The same turns with every tool token in the loss, or without what the tool said, give another gradient.
    """
    sampling = dataclasses.replace(SAMPLING, ignore_eos=True)  # so that a conversation's ids hold each call's
    engine, group = conversation(folder, sampling)
    engine.model.requires_grad_(True)
    denominator, seen = GroupLoss(engine, TrainerConfig(ALGORITHM)).backward(group, None)
    assert denominator == 2 * 4 * 12 == float(seen.sums[0])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    named = dict(theirs.named_parameters())

    def gradient(tool: str) -> list[torch.Tensor]:
        loss = torch.zeros((), dtype=torch.float64)
        for trajectory in group.trajectories:
            ids, mask = masked(trajectory.turns, tool)
            logprobs = theirs(torch.tensor(ids)[None]).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            loss = loss - (trajectory.reward - 0.5) * (chosen * torch.tensor(mask[1:])).sum()
        return list(torch.autograd.grad(loss, list(named.values())))

    def differs(tool: str) -> float:
        pairs = zip(named, gradient(tool), strict=True)
        return max(float((ours(name) - grad).norm() / grad.norm()) for name, grad in pairs)

    def ours(name: str) -> torch.Tensor:
        grad = engine.model.get_parameter(name).grad
        assert grad is not None
        return grad.double()

    assert differs("masked") < 1e-4
    assert differs("trained") > 0.1 and differs("left out") > 0.1


def masked(turns: list[Turn], tool: str) -> tuple[list[int], list[float]]:
    """One conversation as ids, and which of them are in the loss. tool: "masked", "trained" or "left out"."""
    ids, mask = list(turns[0].prompt_ids), [0.0] * len(turns[0].prompt_ids)
    for i, turn in enumerate(turns):
        between = list(turn.prompt_ids[len(ids) :]) if tool != "left out" or i == 0 else []
        ids += between
        mask += [1.0 if tool == "trained" else 0.0] * len(between)
        ids += turn.response_ids
        mask += [1.0] * len(turn.response_ids)
    return ids, mask


def test_the_calculator_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a reward that a random model can earn, the share of digits in what it writes; 8 steps make 0.01 some 0.7."""
    monkeypatch.setattr(calculator, "ROUNDS", 3)
    monkeypatch.setattr(calculator, "TOKENS", 12)

    async def agent(sample: Problem, llm: LLM) -> float:
        await calculator.agent(sample, llm)
        text = "".join(turn.text for turn in llm.turns)
        return sum(character.isdigit() for character in text) / max(len(text), 1)

    function = make_agent(folder, agent, kv_bytes=1 << 24)
    algorithm = AlgorithmConfig(group_size=8, kl=0.0, divide_by_std=True)
    optimizer = OptimizerConfig(learning_rate=0.04, warmup_steps=0)
    trainer = Trainer(function.engine, TrainerConfig(algorithm, optimizer))
    rollout = Rollout(function, "em", algorithm)
    reports = []
    for step in range(8):
        problems = [Problem("", f"What is {i} + {step}?", ()) for i in range(2)]
        reports.append(trainer.step(dumped(rollout.groups(problems, 2), tmp_path, step)))
    assert all(r.first["largest_difference"] == 0 and r.turns == 48 and r.updates == 1 for r in reports)
    assert reports[-1].correct > 0.3 > 0.05 > reports[0].correct
    said = [
        turn.prompt_ids
        for group in read_step(tmp_path / "step-00000000.jsonl")
        for t in group.trajectories
        for turn in t.turns
        if turn.index == 2
    ]
    assert all("can't be computed" in function.engine.tokenizer.decode(ids) for ids in said) and len(said) == 16


def test_what_the_calculator_computes() -> None:
    assert calculator.calculate(" (2 + 3) * -4 / 8\n") == "-2.5"
    for wrong in ("2 +", "1 / 0", "__import__('os')", "9**9**9", "(" * 500, "\0", "'a' * 9", "9" * 5000):
        assert calculator.calculate(wrong).startswith("This can't be computed")

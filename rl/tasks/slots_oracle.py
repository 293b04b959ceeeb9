"""The oracle of the slots task: single turns to imitate before any reward is there to learn from.

It knows what a reader should write, and is wrong on purpose. Noise makes sampled readings fail now and then; bias makes
the likeliest response wrong, so that greedy readings fail too. Both are left for the reward to correct.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...engine.config import _require, _require_choice, _require_int, _require_number
from ...engine.memory_agent import MemoryAgent
from ...engine.templates import FIRST_MEMORY, Slot
from ..supervised import Example
from .slots import KEYS, MOST_KEYS, NOTHING, UNIT, VALUES, VARIANTS, Fact, make_unit
from .span import span

__all__ = ["OracleConfig", "SlotsOracle"]

MOST_PLAIN_KEYS = 6  # in an example; the other variants write two facts of each, as in a document
Memory = dict[str, str | None]


@dataclass(frozen=True)
class OracleConfig:
    """seed: of all examples. chunk_tokens: least and most of an example's chunk, whole units. keys: least and most that
    a question asks for; more than the task asks for teach the look-up sooner. What always has the same length is learnt
    by position, and fails elsewhere.

    variant: of the task. noise: probability that one slot of a response is drawn at random, so that it is mostly wrong.
    bias: probability of the typical mistake where it can be made: to drop what was known when the chunk brings
    something else, or, where the last write wins, to keep what was known. wrong: probability that a memory without the
    fact that a chunk brings holds a random value instead: over a long document something wrong gets in, and what is
    written must still replace it. shuffled: probability that the memory has its keys in another order than the
    question. Readings have one order; but with several, what is known is found by its key, as facts in the chunk are,
    and not by its place. finals: share of examples that are final turns.
    """

    seed: int = 0
    chunk_tokens: tuple[int, int] = (128, 128)
    keys: tuple[int, int] = (2, 2)
    variant: str = "plain"
    noise: float = 0.03
    bias: float = 0.85
    wrong: float = 0.0
    shuffled: float = 0.0
    finals: float = 0.15

    def __post_init__(self) -> None:
        owner = "OracleConfig"
        _require_int(owner, "seed", self.seed, 0)
        _require_choice(owner, "variant", self.variant, tuple(VARIANTS))
        for name, low in (("chunk_tokens", UNIT), ("keys", 1)):
            object.__setattr__(self, name, span(owner, name, getattr(self, name), low))
        whole = not any(tokens % UNIT for tokens in self.chunk_tokens)
        _require(whole, f"{owner}.chunk_tokens must be multiples of {UNIT}, got {self.chunk_tokens}")
        most = MOST_PLAIN_KEYS if self.variant == "plain" else MOST_KEYS
        _require(self.keys[1] <= most, f"{owner}.keys must be at most {most} with {self.variant!r}, got {self.keys}")
        for name in ("noise", "bias", "wrong", "shuffled", "finals"):
            _require_number(owner, name, getattr(self, name), 0.0, 1.0)

    def examples(self, agent: MemoryAgent) -> SlotsOracle:
        """The examples of this configuration, in the prompts of an agent."""
        return SlotsOracle(agent, self)


class SlotsOracle:
    """Examples without end, in the prompts of an agent: example i is the same wherever and whenever it is asked for."""

    def __init__(self, agent: MemoryAgent, config: OracleConfig) -> None:
        self.agent, self.config = agent, config

    def example(self, index: int) -> Example:
        """Example number `index`, from 0."""
        config = self.config
        rng = random.Random(f"slots oracle {config.seed} {index}")
        asked = rng.sample(KEYS, rng.randint(*config.keys))
        if rng.random() < config.finals:
            return self._final(asked, rng)
        before: Memory = {}
        needles: list[list[Fact]] = []
        taken = list(asked)
        for key in asked:
            before[key], written = rng.choice(_cases(key, config.variant, taken, rng))
            if before[key] is None and written and rng.random() < config.wrong:
                before[key] = rng.choice(VALUES)
            needles.append(written)
            taken += [word for word in (before[key], *(word for _, word in written)) if word in KEYS]
        units = rng.randint(*(tokens // UNIT for tokens in config.chunk_tokens))
        chunk = _chunk(units, needles, [key for key in KEYS if key not in taken], rng)
        facts = [fact for written in needles for fact in written]
        after = self._mistaken(before, _read(before, facts), rng)
        nothing = not any(before.values()) and rng.random() < 0.5
        if rng.random() < config.shuffled:
            before = dict(rng.sample(list(before.items()), len(before)))
        memory = FIRST_MEMORY if nothing else _text(before)
        return self._example(asked, memory, chunk, _text(after))

    def _final(self, asked: Sequence[str], rng: random.Random) -> Example:
        memory: Memory = {key: rng.choice(VALUES) if rng.random() < 0.95 else None for key in asked}
        words = [word or NOTHING for word in memory.values()]
        if rng.random() < self.config.noise:
            words[rng.randrange(len(words))] = rng.choice(VALUES)
        return self._example(asked, _text(memory), None, "".join(f" {word}" for word in words))

    def _mistaken(self, before: Memory, after: Memory, rng: random.Random) -> Memory:
        config, told = self.config, dict(after)
        news = [key for key in told if after[key] != before[key]]
        old = [key for key in told if before[key] is not None]
        if rng.random() < config.bias:
            if config.variant == "last_write_wins":
                told |= {key: before[key] for key in news if key in old}
            elif news:
                told |= {key: None for key in old if key not in news}
        if rng.random() < config.noise:
            told[rng.choice(list(told))] = None if rng.random() < 0.5 else rng.choice(VALUES)
        return told

    def _example(self, asked: Sequence[str], memory: str, chunk: str | None, response: str) -> Example:
        agent, encode = self.agent, self.agent.tokenizer.encode
        question = encode("".join(f" {key}" for key in asked))
        values = {Slot.PROBLEM: question, Slot.MEMORY: encode(memory)}
        if chunk is None:
            segments = agent.final_prompt.fill(values)
        else:
            segments = agent.update_prompt.fill(values | {Slot.CHUNK: encode(chunk)})
        return Example.of(segments, encode(response), agent.tokenizer.eos_ids[0])


def _cases(key: str, variant: str, taken: Sequence[str], rng: random.Random) -> list[tuple[str | None, list[Fact]]]:
    """What a memory may know of a key, with what a chunk may say of it then."""
    old, new = rng.sample(VALUES, 2)
    cases: list[tuple[str | None, list[Fact]]] = [(None, []), (new, []), (None, [(key, new)])]
    if variant == "last_write_wins":
        cases += [(old, [(key, new)]), (None, [(key, old), (key, new)])]
    if variant == "two_hop":
        link = rng.choice([other for other in KEYS if other not in taken])
        cases[2] = (None, [(key, link)])
        cases += [(link, []), (link, [(link, new)]), (None, [(key, link), (link, new)])]
    return cases


def _chunk(units: int, needles: Iterable[list[Fact]], others: Sequence[str], rng: random.Random) -> str:
    placed: list[list[Fact]] = [[] for _ in range(units)]
    for written in needles:
        for unit, fact in zip(sorted(rng.choices(range(units), k=len(written))), written, strict=True):
            placed[unit].append(fact)
    return "".join(make_unit(facts, others, rng) for facts in placed)


def _read(memory: Memory, facts: Iterable[Fact]) -> Memory:
    """A perfect reader: what is written of a key, or of the key that stands for it, counts from then on."""
    known = dict(memory)
    for name, word in facts:
        for key in known:
            if name in (key, known[key]):
                known[key] = word
    return known


def _text(memory: Memory) -> str:
    return "".join(f" {key} {word or NOTHING}" for key, word in memory.items())

"""Price: how far the next tokens move when a memory's KV is carried on instead of computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engine.config import AgentConfig
from ..engine.engine import Engine
from ..engine.memory_agent import MemoryAgent
from ..engine.sampler import SampleRow
from .forced import forced
from .workload import QUESTION, document

__all__ = ["Price", "price"]


@dataclass(frozen=True)
class Price:
    """Over the `tokens` of a reading that follow carried KV, each with the same ids before it.

    divergence: Kullback-Leibler divergence of the carried from the exact distribution of the next token, in nats, the
    mean. agreement: how often the likeliest token is the same, 0 to 1.
    """

    divergence: float
    agreement: float
    tokens: int

    def __str__(self) -> str:
        return f"KL {self.divergence:.4f} nats, same likeliest token {self.agreement:.1%} of {self.tokens} tokens"


def price(engine: Engine, config: AgentConfig, chunks: int) -> Price:
    """What carrying costs a reading of `chunks` chunks of the demo's document.

    What the model says with exact KV is what it is made to say with carried KV. That is carried on in turn, so that an
    error that grows from turn to turn counts.
    """
    text = document(engine, 0, chunks * config.chunk_tokens)
    exact, moved = _Heard(), _Heard()
    with forced({}, exact.listen):
        turns = MemoryAgent(engine, replace(config, memory_kv="exact")).read(text, QUESTION).turns
    script = {(0, turn.index): turn.response_ids for turn in turns}
    with forced(script, moved.listen):
        MemoryAgent(engine, replace(config, memory_kv="carried")).read(text, QUESTION)
    places = [(turn.index, index) for turn in turns[1:] for index in range(len(turn.response_ids))]
    divergence = [_divergence(exact[place], moved[place]) for place in places]
    same = [bool(exact[place].argmax() == moved[place].argmax()) for place in places]
    return Price(sum(divergence) / len(places), sum(same) / len(places), len(places))


class _Heard(dict[tuple[int, int], Tensor]):
    """Raw log-probabilities, float32 [vocabulary], by turn and index in the response; the engine tells none itself.

    A draft may be wrong: the row that a token was drawn from in the end is the one that stays.
    """

    def listen(self, logits: Tensor, rows: list[SampleRow]) -> None:
        self.update({(row.turn, row.index): torch.log_softmax(z, 0) for row, z in zip(rows, logits, strict=True)})


def _divergence(exact: Tensor, other: Tensor) -> float:
    p, q = exact.double(), other.double()
    return float((p.exp() * (p - q)).sum())

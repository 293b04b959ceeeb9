"""Workload: whole readings with what the model really writes, and the same turns given to other engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..engine.config import AgentConfig, SamplingParams
from ..engine.engine import Engine
from ..engine.errors import ConfigError
from ..engine.memory_agent import MemoryAgent
from ..engine.reading import Turn
from ..engine.sequence import DraftCounters
from .clock import Sample, timed
from .peers import Peer

__all__ = ["QUESTION", "Difference", "Workload", "document"]

DOCUMENT = Path(__file__).resolve().parents[1] / "examples" / "demo" / "harbour.txt"
QUESTION = "Which things happened in the harbour, and when?"


def document(engine: Engine, number: int, size: int) -> str:
    """Part `number` of the demo's document, of `size` tokens. Raises ConfigError when the document is missing."""
    try:
        ids = engine.tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the demo's document cannot be read ({error}); run from a checkout") from error
    start = number * size // 3 % max(len(ids) - size, 1)
    return engine.tokenizer.decode(ids[start : start + size])


@dataclass(frozen=True)
class Difference:
    """The first token that a peer wrote otherwise than we, by turn and place in the response, and how close it was.

    gap: between our two likeliest tokens there, in nats. ends: whether we ended the response there.
    """

    turn: int
    place: int
    gap: float
    ends: bool

    def __str__(self) -> str:
        where = f"turn {self.turn}, token {self.place}{', where ours ends' if self.ends else ''}"
        return f"differs first in {where}; our two likeliest lie {self.gap:.2g} apart"


class Workload:
    """Readings as an agent's configuration says, greedy; text: the document and the question of a round.

    The peers are fed the ids of our prompts turn by turn and write responses as long as ours.
    turns, drafts: of the last reading.
    """

    def __init__(self, engine: Engine, config: AgentConfig, text: Callable[[int], tuple[str, str]]) -> None:
        self.engine, self.config, self.text = engine, config, text
        self._agent = MemoryAgent(engine, config)
        self._differences: dict[str, tuple[Turn, int]] = {}
        self.turns: list[Turn] = []
        self.drafts: dict[str, DraftCounters] = {}

    def ours(self, number: int) -> Sample:
        """Our reading of round `number`."""
        text, question = self.text(number)

        def run() -> None:
            reading = self._agent.read(text, question)
            self.turns, self.drafts = reading.turns, reading.counters.drafts

        return timed(run)

    def theirs(self, peer: Peer) -> Sample:
        """A peer on the turns of our last reading. Raises PeerError."""
        samples = []
        for turn in self.turns:
            sample, ids = peer.turn(turn.prompt_ids, len(turn.response_ids))
            samples.append(sample)
            self._compare(peer.spec.label, turn, ids)
        seconds = sum(sample.seconds for sample in samples)
        return Sample(seconds, sum(sample.others * sample.seconds for sample in samples) / seconds)

    @property
    def wrote(self) -> str:
        """What the model wrote in the last reading, in how many steps, and how good the drafts of each source were."""
        written = sum(len(turn.response_ids) for turn in self.turns)
        steps = sum(turn.decode_steps + 1 for turn in self.turns)
        drafts = (
            f"; {source}: {one.accepted} of {one.proposed} drafted tokens right, {one.run_length:.1f} a draft"
            for source, one in self.drafts.items()
        )
        return f"{len(self.turns)} turns, {written} tokens written in {steps} steps{''.join(drafts)}"

    def differences(self) -> dict[str, Difference]:
        """By peer, the first token ever seen to differ."""
        found = {}
        for label, (turn, place) in self._differences.items():
            params = SamplingParams(temperature=0, max_tokens=1, top_logprobs=2)
            [completion] = self.engine.generate([turn.prompt_ids + turn.response_ids[:place]], params)
            first, second = (completion.top_logprobs or [[]])[0]
            found[label] = Difference(turn.index, place, first.logprob - second.logprob, place >= turn.text_tokens)
        return found

    def _compare(self, label: str, turn: Turn, ids: list[int]) -> None:
        ours = turn.response_ids
        place = next((i for i, token in enumerate(ids) if token != ours[i]), None)
        if place is not None:
            self._differences.setdefault(label, (turn, place))

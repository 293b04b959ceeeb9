"""Acceptance: how often drafts were right lately, and so how long the next one should be."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Acceptance", "StepCost"]

FADING = 0.75  # weight of the past at each draft: some four drafts are remembered
MOST_CREDIT = 32  # accepted tokens of one draft that count, so that a single long one does not outweigh what follows
# Accepted, rejected before the first draft. A memory is expected to repeat the old one; with this little doubt a long
# one is first tried by some 300 tokens and by the third turn whole, so that a first one that proves wrong costs less.
TRUSTED = (32.0, 0.02)
UNKNOWN = (4.0, 1.0)
PROBE_EVERY = 16  # tokens without a draft before one is tried whatever the average says
PROBE = 2  # its length


@dataclass(frozen=True)
class StepCost:
    """What a step of `rows` rows costs: max(1, fixed + row * rows) steps of a single row.

    As long as reading the weights takes longer than the arithmetic, rows are nearly free: `drag` each.
    """

    fixed: float
    row: float
    drag: float = 0.01

    @classmethod
    def of_weights(cls, bits: int) -> StepCost:
        """For weights of so many bits: the more bytes a step reads, the cheaper is another row beside it.

        Measured on two Zen 4 cores with SmolLM2-135M behind 1256 tokens; the ratio of arithmetic to bandwidth, which
        is what counts, differs little between CPUs.
        """
        if bits >= 32:
            return cls(0.45, 0.09)
        if bits >= 16:
            return cls(0.65, 0.16)
        return cls(0.8, 0.15) if bits >= 8 else cls(0.8, 0.2)

    def __call__(self, rows: int) -> float:
        return max(1.0, self.fixed + self.row * rows) + self.drag * (rows - 1)


@dataclass
class _Average:
    """Accepted and rejected tokens, older ones counting less."""

    accepted: float
    rejected: float

    @property
    def rate(self) -> float:
        """Chance that the next token of a draft is accepted."""
        return self.accepted / (self.accepted + self.rejected)

    def add(self, proposed: int, accepted: int) -> None:
        self.accepted = self.accepted * FADING + min(accepted, MOST_CREDIT)
        self.rejected = self.rejected * FADING + (accepted < proposed)


@dataclass
class Acceptance:
    """Averages by source of drafts. Hand one to all turns of a reading: each goes on with what was learnt before."""

    cost: StepCost = field(default_factory=lambda: StepCost.of_weights(32))
    averages: dict[str, _Average] = field(default_factory=dict)

    def record(self, source: str, proposed: int, accepted: int) -> None:
        """The first `accepted` of `proposed` tokens were right."""
        self._average(source).add(proposed, accepted)

    def length(self, source: str, limit: int, *, opening: bool, silence: int, width: int = 1) -> int:
        """How many tokens to propose, 0 to `limit`.

        opening: the draft is verified by the step that reads the prompt, beside many other rows. silence: tokens since
        the last draft. width: sequences in their response that share the step, this one included.
        """
        best = self._worth(self._average(source).rate, limit, opening, width)
        return best if best or silence < PROBE_EVERY else min(PROBE, limit)

    def _worth(self, chance: float, limit: int, opening: bool, width: int) -> int:
        """The length with the most tokens for the time, where each token is accepted with `chance` (Leviathan et al.,
        arXiv 2211.17192, section 3.5).

        Beside a prompt a row costs its arithmetic only, and what it saves is a token's time in the steps that follow.
        """
        cost, tokens, likely = self.cost, 1.0, 1.0
        best, fastest = 0, 1 / cost(width)
        for length in range(1, limit + 1):
            likely *= chance
            tokens += likely
            speed = tokens / cost(width * (1 + length))
            if speed <= fastest:
                break
            best, fastest = length, speed
        if opening:
            likely, best = chance, 0
            while best < limit and likely > cost.row * fastest:
                likely *= chance
                best += 1
        return best

    def _average(self, source: str) -> _Average:
        start = TRUSTED if source == "memory" else UNKNOWN
        return self.averages.setdefault(source, _Average(*start))

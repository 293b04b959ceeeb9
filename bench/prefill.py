"""How fast prompts are read: `python -m palimpsest.bench.prefill`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import options
from .breakdown import explain, ways
from .costs import linear_cost, prefill_cost
from .limits import Probe
from .options import Options
from .ours import VARIANTS, Ours
from .peers import Peer
from .report import Report, Target, describe_machine, row
from .rounds import Entry, Measured, alternate, best, ratio

__all__ = ["main", "run"]

# Tokens of the prompt -> what whole prefill should reach of the best peer's speed.
LENGTHS = {512: 1.25, 2048: 1.0, 6144: 1.1}
QUICK = (512,)
LINEAR_SHARE = 0.85
ROOM = 16  # the window needs a place for the response
SEED = 1000


@dataclass(frozen=True)
class Work:
    """A prompt of `length` tokens."""

    length: int

    @property
    def full_name(self) -> str:
        return f"prefill.{self.length}"


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit code."""
    return options.main("prefill", run, argv)


def run(chosen: Options) -> Report:
    """Measure every length; raises PalimpsestError for a model or folder of peers that cannot be used."""
    works = chosen.choose(map(Work, QUICK if chosen.quick else LENGTHS))
    lengths = [work.length for work in works]
    ours = Ours(
        chosen.model_path, VARIANTS["float32"], sequences=1, longest=max(lengths) + ROOM, threads=chosen.threads
    )
    probe = Probe()
    rows, targets = [], []
    with chosen.start_peers() as peers:
        for length in lengths:
            able = [peer for peer in peers if peer.spec.dtype == "float32" and peer.spec.can_hold(length)]
            linear, whole, *others = alternate(_entries(ours, able, length), chosen.rounds, probe)
            rows += [row(one) for one in (linear, whole, *others)]
            targets += _targets(length, linear, whole, others)
            if chosen.profile:
                _profile(ours, length)
    return Report("prefill", describe_machine(probe.isa, probe.best), rows, targets)


def _entries(ours: Ours, peers: Sequence[Peer], length: int) -> list[Entry]:
    """Ours first: the linear layers alone, then the whole; each round has a prompt of its own."""
    config = ours.model_config
    linear = linear_cost(config, length)
    whole = prefill_cost(config, length)

    def entry(engine: str, peer: Ours | Peer) -> Entry:
        return Entry(engine, "prefill", "float32", length, 1, length, whole, lambda n: peer.prefill(length, SEED + n))

    engine = ours.variant.engine
    alone = Entry(engine, "linear", "float32", length, 1, length, linear, lambda n: ours.linear(length, SEED + n))
    return [alone, entry(engine, ours), *(entry(peer.spec.label, peer) for peer in peers)]


def _targets(length: int, linear: Measured, whole: Measured, others: Sequence[Measured]) -> list[Target]:
    rival = best(others)
    faster = None if rival is None else ratio(whole, rival)
    return [
        Target(f"linear.{length}.float32.share", linear.share, LINEAR_SHARE),
        Target(f"prefill.{length}.float32.vs_best_peer", faster, LENGTHS[length]),
    ]


def _profile(ours: Ours, length: int) -> None:
    runner = ours.engine.runner
    for number, op_by_op in enumerate(ways(runner), start=1):  # prompts that no cache knows: seeds below the rounds'
        run = ours.prefilling(length, SEED - number)
        print(explain(f"prefill of {length} tokens, float32", runner, run, op_by_op))


if __name__ == "__main__":
    raise SystemExit(main())

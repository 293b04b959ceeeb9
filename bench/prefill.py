"""How fast prompts are read: `python -m palimpsest.bench.prefill`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import options
from .breakdown import explain, ways
from .costs import linear_cost, prefill_cost
from .options import Options
from .ours import EXACT, VARIANTS, Ours
from .peers import Peer
from .report import Report, Target, describe_machine, row
from .rounds import Entry, Measured, alternate, best, ratio

__all__ = ["main", "run"]

# Tokens of the prompt -> what whole prefill should reach of the best peer's speed.
GAINS = {512: 1.25, 2048: 1.0, 6144: 1.1}
LENGTHS = {"full": tuple(GAINS), "quick": (512,), "gpu": (2048, 6144), "tiny": (24,)}
LINEAR_SHARE = 0.85
GPU_SHARE = 0.70
EXACT_SPEED = 1 / 1.15  # of prefill by exact kernels
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
    works = chosen.choose(map(Work, LENGTHS[chosen.scale]))
    lengths = [work.length for work in works]
    variants = (VARIANTS["bfloat16"], EXACT) if chosen.by_triton else (VARIANTS["float32"],)
    engines = [
        Ours(
            chosen.model_path, variant, sequences=1, longest=max(lengths) + ROOM, threads=chosen.threads,
            backend=chosen.backend,
        )
        for variant in variants
    ]  # fmt: skip
    probe = chosen.probe()
    rows, targets = [], []
    with chosen.start_peers() as peers:
        for length in lengths:
            able = [peer for peer in peers if peer.spec.dtype == "float32" and peer.spec.can_hold(length)]
            linear, whole, *others = alternate(_entries(engines, able, length), chosen.rounds, probe)
            rows += [row(one) for one in (linear, whole, *others)]
            targets += (
                _gpu_targets(length, whole, *others) if chosen.by_triton else _targets(length, linear, whole, others)
            )
            if chosen.profile:
                _profile(engines[0], length)
    return Report("prefill", describe_machine(probe.isa, probe.best), rows, targets)


def _entries(engines: Sequence[Ours], peers: Sequence[Peer], length: int) -> list[Entry]:
    """Ours first: the first one's linear layers alone, then the whole; each round has a prompt of its own."""
    first = engines[0]
    dtype, config = first.variant.dtype, first.model_config
    linear = linear_cost(config, length, dtype)
    whole = prefill_cost(config, length, dtype)

    def entry(engine: str, peer: Ours | Peer) -> Entry:
        return Entry(engine, "prefill", dtype, length, 1, length, whole, lambda n: peer.prefill(length, SEED + n))

    name = first.variant.engine
    alone = Entry(name, "linear", dtype, length, 1, length, linear, lambda n: first.linear(length, SEED + n))
    ours = [entry(one.variant.engine, one) for one in engines]
    return [alone, *ours, *(entry(peer.spec.label, peer) for peer in peers)]


def _targets(length: int, linear: Measured, whole: Measured, others: Sequence[Measured]) -> list[Target]:
    rival = best(others)
    faster = None if rival is None else ratio(whole, rival)
    return [
        Target(f"linear.{length}.float32.share", linear.share, LINEAR_SHARE),
        Target(f"prefill.{length}.float32.vs_best_peer", faster, GAINS[length]),
    ]


def _gpu_targets(length: int, whole: Measured, exact: Measured) -> list[Target]:
    name = f"prefill.{length}.bfloat16"
    return [
        Target(f"{name}.share", whole.share, GPU_SHARE),
        Target(f"{name}.exact_vs_fast", ratio(exact, whole), EXACT_SPEED),
    ]


def _profile(ours: Ours, length: int) -> None:
    runner = ours.engine.runner
    for number, op_by_op in enumerate(ways(runner), start=1):  # prompts that no cache knows: seeds below the rounds'
        run = ours.prefilling(length, SEED - number)
        print(explain(f"prefill of {length} tokens, float32", runner, run, op_by_op))


if __name__ == "__main__":
    raise SystemExit(main())

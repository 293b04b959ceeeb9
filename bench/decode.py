"""How fast responses are written: `python -m palimpsest.bench.decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.model_config import ModelConfig
from . import options
from .breakdown import explain, ways
from .costs import Cost, decode_cost
from .memory import resident
from .options import Options
from .ours import EXACT, VARIANTS, Ours, Variant
from .peers import Peer, PeerSpec
from .report import Report, Target, describe_machine, row
from .rounds import Entry, Measured, alternate, best, ratio

__all__ = ["main", "run"]


@dataclass(frozen=True)
class Work:
    """`steps` tokens for each of `batch` sequences behind `context` tokens, by the engines that `dtypes` names."""

    batch: int
    context: int
    steps: int
    dtypes: tuple[str, ...]

    @property
    def name(self) -> str:
        return "decode" if self.batch == 1 else f"decode_b{self.batch}"

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.context}"

    @property
    def longest(self) -> int:
        """Tokens of a sequence at its end, and a place for one more."""
        return self.context + self.steps + 2


@dataclass(frozen=True)
class Memory:
    """The memory of one engine at its peak."""

    dtype: str

    @property
    def full_name(self) -> str:
        return f"memory.{MEMORY_CONTEXT}.{self.dtype}"


@dataclass(frozen=True)
class Rival:
    """The peer that a dtype is compared with at batch 1: program, dtype of weights, what to reach of its speed."""

    engine: str
    dtype: str
    gain: float


DTYPES = tuple(VARIANTS)
KINDS = VARIANTS | {"exact": EXACT}
BY_TRITON = ("bfloat16", "exact")
WORKS = {
    "full": (
        *(Work(1, context, 24, DTYPES) for context in (100, 2048, 6144)),
        *(Work(batch, 1000, 12, ("float32",)) for batch in (8, 16)),
    ),
    "quick": (Work(1, 100, 12, DTYPES),),
    "gpu": (
        *(Work(batch, 6144, 24, BY_TRITON) for batch in (1, 8)),
        *(Work(batch, 6144, 24, BY_TRITON[:1]) for batch in (32, 128)),
    ),
    "tiny": (Work(1, 20, 2, BY_TRITON), Work(2, 20, 1, BY_TRITON[:1])),
}
MEMORY_CONTEXT = 2048
MEMORY = tuple(map(Memory, DTYPES))
SHARES = {"float32": 0.85, "bfloat16": 0.85, "int8": 0.70, "int4": 0.50}
RIVALS = {
    "float32": Rival("OpenVINO GenAI", "float32", 1.1),
    "int8": Rival("llama.cpp", "q8_0", 1.2),
    "int4": Rival("llama.cpp", "q4_0", 1.2),
}
EXACT_SPEED = 1 / 1.15  # of exact kernels, on a GPU
BFLOAT16_GAIN = 1.7
BATCH_GAIN = 1.3


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit code."""
    return options.main("decode", run, argv)


def run(chosen: Options) -> Report:
    """Measure every work; raises PalimpsestError for a model or folder of peers that cannot be used."""
    everything: tuple[Work | Memory, ...] = (*WORKS[chosen.scale], *(MEMORY if chosen.scale == "full" else ()))
    picked = chosen.choose(everything)
    works = [work for work in picked if isinstance(work, Work)]
    dtypes = [dtype for dtype in KINDS if any(dtype in work.dtypes for work in works)]
    engines = {dtype: _engine(chosen, dtype, works) for dtype in dtypes}
    probe = chosen.probe()
    rows, targets = [], []
    with chosen.start_peers() as peers:
        for work in works:
            able = [peer for peer in peers if peer.spec.can_hold(work.batch * work.context)]
            ours = [engines[dtype] for dtype in work.dtypes]
            measured = alternate(_entries(work, ours, able), chosen.rounds, probe)
            rows += [row(one) for one in measured]
            if chosen.by_triton:
                targets += _gpu_targets(work, *measured[: len(ours)])
            else:
                targets += _targets(work, measured[: len(ours)], measured[len(ours) :])
            if chosen.profile:
                for engine in ours:
                    _profile(engine, work)
    targets += [
        _memory_target(chosen.model_path, one.dtype, chosen.threads) for one in picked if isinstance(one, Memory)
    ]
    return Report("decode", describe_machine(probe.isa, probe.best), rows, targets)


def _engine(chosen: Options, dtype: str, works: Sequence[Work]) -> Ours:
    mine = [work for work in works if dtype in work.dtypes]
    # One sequence more than run at once: the pool then never has to give up a prompt that is wanted again.
    sequences, longest = max(work.batch for work in mine) + 1, max(work.longest for work in mine)
    return Ours(
        chosen.model_path, KINDS[dtype], sequences=sequences, longest=longest, threads=chosen.threads,
        backend=chosen.backend,
    )  # fmt: skip


def _entries(work: Work, ours: Sequence[Ours], peers: Sequence[Peer]) -> list[Entry]:
    """Ours first. A peer stands beside us if it computes with a kind of weights that this work compares."""
    config = ours[0].model_config
    kinds = {kind for dtype in work.dtypes for kind in (dtype, RIVALS[dtype].dtype if dtype in RIVALS else dtype)}
    entries = [_entry(work, config, one.variant.engine, one.variant, one) for one in ours]
    beside = [peer for peer in peers if peer.spec.dtype in kinds]
    return entries + [_entry(work, config, peer.spec.label, peer.spec, peer) for peer in beside]


def _entry(work: Work, config: ModelConfig, name: str, kind: Variant | PeerSpec, engine: Ours | Peer) -> Entry:
    # The keys that a token sees, itself included: context + 1 at the first step, context + steps at the last.
    keys = work.context + (work.steps + 1) / 2
    step = decode_cost(config, work.batch, keys, kind.dtype, kind.kv_dtype)
    return Entry(
        engine=name,
        work=work.name,
        dtype=kind.dtype,
        context=work.context,
        batch=work.batch,
        tokens=work.batch * work.steps,
        cost=Cost(step.flops * work.steps, step.bytes * work.steps),
        run=lambda _: engine.decode(work.batch, work.context, work.steps),
    )


def _targets(work: Work, ours: Sequence[Measured], others: Sequence[Measured]) -> list[Target]:
    by_dtype = {one.entry.dtype: one for one in ours}
    prefix = work.full_name
    if work.batch > 1:
        fastest = best([one for one in others if one.entry.dtype == "float32"])
        return [Target(f"{prefix}.float32.vs_best_peer", _ratio(by_dtype["float32"], fastest), BATCH_GAIN)]
    targets = [Target(f"{prefix}.{dtype}.share", one.share, SHARES[dtype]) for dtype, one in by_dtype.items()]
    for dtype, rival in RIVALS.items():
        if dtype not in by_dtype:
            continue
        label = rival.engine.replace(" ", "_").lower()
        theirs = [one for one in others if one.entry.dtype == rival.dtype and one.entry.engine.startswith(rival.engine)]
        targets.append(Target(f"{prefix}.{dtype}.vs_{label}", _ratio(by_dtype[dtype], best(theirs)), rival.gain))
    gain = _ratio(by_dtype["bfloat16"], by_dtype["float32"])
    return [*targets, Target(f"{prefix}.bfloat16.vs_float32", gain, BFLOAT16_GAIN)]


def _gpu_targets(work: Work, fast: Measured, exact: Measured | None = None) -> list[Target]:
    name = f"{work.full_name}.bfloat16"
    targets = [Target(f"{name}.share", fast.share, SHARES["bfloat16"])]
    return targets if exact is None else [*targets, Target(f"{name}.exact_vs_fast", ratio(exact, fast), EXACT_SPEED)]


def _memory_target(model: str, dtype: str, threads: int) -> Target:
    found = resident(model, dtype, MEMORY_CONTEXT, threads)
    print(f"memory of {dtype}, context {MEMORY_CONTEXT}: {found}")
    return Target(f"{Memory(dtype).full_name}.allowed_over_used", found.allowed_over_used, 1.0)


def _ratio(ours: Measured, rival: Measured | None) -> float | None:
    return None if rival is None else ratio(ours, rival)


def _profile(engine: Ours, work: Work) -> None:
    runner = engine.engine.runner
    title = f"{work.steps} steps of {work.name}, context {work.context}, {engine.variant.dtype}"
    for op_by_op in ways(runner):
        with engine.decoding(work.batch, work.context, work.steps) as run:
            print(explain(title, runner, run, op_by_op))


if __name__ == "__main__":
    raise SystemExit(main())

"""What a turn of a memory agent takes, with the old memory as a draft, open prompts and chunks that a group shares:
`python -m palimpsest.bench.chunk_latency`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from ..engine.config import AgentConfig, SamplingParams
from ..engine.errors import ConfigError
from . import options
from .carrying import price
from .clock import Sample
from .costs import Cost, prefill_cost
from .endurance import endurance
from .group import Group
from .options import Options
from .ours import EXACT, VARIANTS, Ours
from .peers import Peer
from .readings import ForcedReading
from .report import Report, Target, describe_machine, row
from .rounds import Entry, Measured, alternate, best, ratio
from .sections import Part, Section, Stage, compare, run_sections
from .trained_agent import trained_agent
from .turns import HEAD, SEPARATOR, TAIL, Turns
from .workload import QUESTION, Workload, document

__all__ = ["main", "run"]

# By the name of a row, as --works takes it: the words of the table, and what to time.
Ways = dict[str, tuple[str, Callable[[], Sample]]]


@dataclass(frozen=True)
class Work:
    """A turn with a memory and a chunk of so many tokens. rights: percent of the old memory that the new one keeps."""

    memory: int
    chunk: int
    rights: tuple[int, ...] = (100, 0)

    @property
    def name(self) -> str:
        return f"{self.memory}.{self.chunk}"

    @property
    def ways(self) -> tuple[str, ...]:
        """Rows of its turns but the one that begins unknowing."""
        return ("off", "one_pass", *map(str, self.rights))


WORKS = (Work(256, 1000, (100, 95, 80, 50, 0)), Work(256, 5000), Work(1024, 1000), Work(1024, 5000))
QUICK = Work(32, 128)
GPU, TINY = Work(1024, 5000, (100, 80, 0)), Work(6, 12, (100,))  # only their turns, by exact kernels
OPEN = Work(256, 1000)
FIRST_TOKEN_WORK = Work(1024, 5000)
READINGS = {  # row -> words, percent right, drafts, open prompts
    "off": ("reading, off", 0, False, True),
    "100": ("reading, 100 % right", 100, True, True),
    "80": ("reading, 80 % right", 80, True, True),
    "80_closed": ("reading, 80 % right, closed", 80, True, False),
}
CARRY = Work(256, 1000)
CARRY_CHUNKS = 3
CARRIES = {  # row -> template, memory's KV
    f"{template}_{memory_kv}": (template, memory_kv)
    for template in ("memory_first", "chunk_first")
    for memory_kv in ("exact", "carried")
}
GROUP, GROUP_MEMORY, GROUP_CHUNK, GROUP_RIGHT = 16, 128, 1000, 80
WORKLOAD = {"chunks": 4, "chunk": 1000, "memory": 256, "answer": 64}
TURNS = 700
ROOM = 400  # of a prompt beside memory, chunk and response

ONE_PASS, SURPRISED, SETTLED = 1 / 1.10, 1 / 1.12, 1 / 1.03
GPU_ONE_PASS = 1 / 1.15
CEILING = {100: 0.90, 80: 0.75}
FIRST_TOKEN = 1 / 0.93
GROUP_SPEED = GROUP_BYTES = 3.0
PEER_GAIN = 1.5
FLAT = 1 / 1.03


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit code."""
    return options.main("chunk_latency", run, argv, adapters=True)


def run(chosen: Options) -> Report:
    """Measure every part; raises PalimpsestError for a model or folder of peers that cannot be used."""
    if chosen.profile:
        raise ConfigError("chunk_latency takes no --profile; `palimpsest bench decode --profile` shows a step")
    if chosen.adapter is not None:
        return trained_agent(chosen, chosen.adapter)
    works, opened = {"full": (WORKS, OPEN), "quick": ((QUICK,), QUICK), "gpu": ((GPU,), GPU), "tiny": ((TINY,), TINY)}[
        chosen.scale
    ]
    ours = Ours(
        chosen.model_path,
        EXACT if chosen.by_triton else VARIANTS["float32"],
        sequences=GROUP + 1 if chosen.scale == "full" else len(READINGS),
        longest=ROOM + max(work.chunk + 2 * work.memory for work in (*works, opened)),
        threads=chosen.threads,
        drafts=True,
        backend=chosen.backend,
    )
    probe = chosen.probe()
    rows, targets = run_sections(_sections(Stage(ours, chosen.rounds, probe), chosen, works, opened), chosen)
    return Report("chunk_latency", describe_machine(probe.isa, probe.best), rows, targets)


def _sections(stage: Stage, chosen: Options, works: Sequence[Work], opened: Work) -> list[Section]:
    turns = [Section(f"turn{work.name}", (*work.ways, "first_0"), partial(_turns, stage, work)) for work in works]
    if chosen.by_triton:
        return turns
    read = Section(f"read{opened.name}", (*READINGS, "one_pass"), partial(_readings, stage, opened))
    if chosen.quick:
        return [*turns, read]

    def workload(_: object) -> Part:
        with chosen.start_peers() as peers:
            return _workload(stage, peers)

    first = FIRST_TOKEN_WORK
    return [
        *turns,
        read,
        Section(f"first{first.name}", ("closed", "open"), partial(_first_token, stage, first)),
        Section(f"group{GROUP}.{GROUP_CHUNK}", ("chunk_first", "memory_first"), partial(_group, stage)),
        Section(f"carry{CARRY.name}", tuple(CARRIES), partial(_carried, stage, CARRY)),
        Section(f"endurance.{TURNS}", (), lambda _: _endurance(stage)),
        Section(f"workload.{WORKLOAD['chunk']}", (), workload),
    ]


def _turns(stage: Stage, work: Work, wanted: Collection[str]) -> Part:
    """Drafts alone: prompts are closed, and of each only the head is resident."""
    turns = Turns(stage.ours.engine, work.memory, work.chunk)
    ways: Ways = {
        "off": ("drafts off", turns.plain),
        "one_pass": ("one pass", turns.one_pass),
        **{str(right): (f"drafts, {right} % right", partial(turns.drafted, right)) for right in work.rights},
        "first_0": ("drafts, first 0 % right", turns.surprised),
    }
    found = stage.alternate(f"turn{work.memory}", work.chunk, turns.computed, ways, wanted)
    variant = stage.ours.variant
    prefix = f"turn{work.name}.{variant.dtype}"
    targets = [
        *compare(f"{prefix}.one_pass_over_100", found, "100", "one_pass", GPU_ONE_PASS if variant.exact else ONE_PASS),
        *compare(f"{prefix}.off_over_first_0", found, "first_0", "off", SURPRISED),
        *compare(f"{prefix}.off_over_later_0", found, "0", "off", SETTLED),
    ]
    return [row(one) for one in found.values()], targets


def _readings(stage: Stage, work: Work, wanted: Collection[str]) -> Part:
    """Drafts and open prompts as MemoryAgent uses them, against drafts off and what the rates allow at best."""
    engine = stage.ours.engine
    readings = {
        name: ForcedReading(
            engine, memory=work.memory, chunk=work.chunk, right=right, drafts=drafts, open_prompt=is_open,
            seed=1_000_000 * number,
        )
        for number, (name, (_, right, drafts, is_open)) in enumerate(READINGS.items(), start=1)
        if name in wanted
    }  # fmt: skip
    turns = Turns(engine, work.memory, work.chunk)
    ways: Ways = {name: (READINGS[name][0], reading.turn) for name, reading in readings.items()}
    with _settled(readings.values()):
        found = stage.alternate(
            f"read{work.memory}", work.chunk, turns.computed, {**ways, "one_pass": ("one pass", turns.one_pass)}, wanted
        )
    after = next((reading.after_memory for reading in readings.values()), 0)
    prefix = f"read{work.name}.float32"
    targets = []
    for right, least in CEILING.items():
        if {"off", "one_pass", str(right)} <= found.keys():
            ideal = _ideal(found, after, work.memory, turns.computed, right)
            off, drafted = found["off"].seconds, found[str(right)].seconds
            print(f"{prefix}, {right} % right: {off / drafted:.2f}x of drafts off, at best {off / ideal:.2f}x")
            targets.append(Target(f"{prefix}.share_of_ceiling_{right}", ideal / drafted, least))
    last = readings["off"].last if "off" in readings else None
    if last is not None:
        behind = after / (last.prefilled_tokens - last.prefilled_ahead)
        targets.append(Target(f"{prefix}.needed_over_prefilled", behind, 1.0))
    return [row(one) for one in found.values()], targets


@contextmanager
def _settled(readings: Collection[ForcedReading]) -> Iterator[None]:
    """Readings after the turn that writes the memory and two in which drafts settle; ended on leaving."""
    try:
        for reading in readings:
            for _ in range(3):
                reading.turn()
        yield
    finally:
        for reading in readings:
            reading.close()


def _ideal(found: Mapping[str, Measured], after: int, memory: int, pass_tokens: int, right: int) -> float:
    """Seconds of a turn at the rates of this run: prefill with the first run of the draft in it, then a step for each
    token that is wrong. All drafted rows of these steps are taken to be free.
    """
    token = found["one_pass"].seconds / pass_tokens
    step = (found["off"].seconds - after * token) / memory
    if right == 100:
        return (after + memory) * token
    wrong = round(memory * (100 - right) / 100)
    return (after + memory // wrong - 1) * token + wrong * step


def _first_token(stage: Stage, work: Work, wanted: Collection[str]) -> Part:
    """What is gained when the memory is resident before its turn begins."""
    turns = Turns(stage.ours.engine, work.memory, work.chunk)
    ways: Ways = {
        name: (f"to first token, {name}", partial(turns.to_first_token, is_open=name == "open"))
        for name in ("closed", "open")
    }
    tokens = work.memory + SEPARATOR + work.chunk + TAIL
    found = stage.alternate(f"first{work.memory}", work.chunk, tokens, ways, wanted)
    whole, closed, opened = (
        prefill_cost(stage.ours.model_config, length).flops for length in (HEAD + tokens, HEAD, HEAD + work.memory)
    )
    prefix = f"first{work.name}.float32"
    print(f"{prefix}: by arithmetic alone {(whole - closed) / (whole - opened):.3f}x")
    targets = compare(f"{prefix}.closed_over_open", found, "open", "closed", FIRST_TOKEN)
    return [row(one) for one in found.values()], targets


def _group(stage: Stage, wanted: Collection[str]) -> Part:
    group = Group(stage.ours.engine, size=GROUP, memory=GROUP_MEMORY, chunk=GROUP_CHUNK, right=GROUP_RIGHT)
    ways: Ways = {name: (name, partial(group.turn, name)) for name in ("chunk_first", "memory_first")}
    work = f"group{GROUP}"
    found = stage.alternate(work, GROUP_CHUNK, group.computed, ways, wanted)
    prefix = f"{work}.{GROUP_CHUNK}.float32"
    targets = compare(f"{prefix}.speed", found, "chunk_first", "memory_first", GROUP_SPEED)
    if len(found) == 2:
        less = group.kv_bytes["memory_first"] / group.kv_bytes["chunk_first"]
        targets.append(Target(f"{prefix}.kv_bytes", less, GROUP_BYTES))
    return [row(one) for one in found.values()], targets


def _carried(stage: Stage, work: Work, wanted: Collection[str]) -> Part:
    """Turns with an unchanged memory whose KV is computed or carried on, and what the latter costs in quality."""
    engine = stage.ours.engine
    readings = {
        name: ForcedReading(
            engine, memory=work.memory, chunk=work.chunk, right=100, drafts=True, open_prompt=True,
            seed=1_000_000 * number, template=template, memory_kv=memory_kv,
        )
        for number, (name, (template, memory_kv)) in enumerate(CARRIES.items(), start=1)
        if name in wanted
    }  # fmt: skip
    ways: Ways = {name: (name.replace("_", " "), reading.turn) for name, reading in readings.items()}
    with _settled(readings.values()):
        tokens = 2 * work.memory + SEPARATOR + work.chunk + TAIL
        found = stage.alternate(f"carry{work.memory}", work.chunk, tokens, ways, wanted)
    rows = []
    for name, one in found.items():
        template, memory_kv = CARRIES[name]
        rows.append(row(one))
        if memory_kv == "carried":
            config = AgentConfig(
                work.chunk, work.memory, WORKLOAD["answer"], template, sampling=SamplingParams(temperature=0)
            )
            paid = price(engine, config, CARRY_CHUNKS)
            rows[-1] |= {"divergence": paid.divergence, "agreement": paid.agreement}
            exact = found.get(f"{template}_exact")
            gain = "" if exact is None else f"{ratio(one, exact):.2f}x of exact, "
            print(f"carry{work.name}.float32, {template}: {gain}{paid}")
    return rows, []


def _endurance(stage: Stage) -> Part:
    stage.probe.measure()  # no row here has a limit, but the report names the machine's
    found = endurance(stage.ours.engine, TURNS)
    print(f"{TURNS} turns of a tiny model, the first and the last hundred: {found}")
    cpu, resident = found.first_seconds / found.last_seconds, found.first_bytes / found.last_bytes
    return [], [
        Target(f"endurance.{TURNS}.float32.cpu_time", cpu, FLAT),
        Target(f"endurance.{TURNS}.float32.resident", resident, FLAT),
    ]


def _workload(stage: Stage, peers: Sequence[Peer]) -> Part:
    engine, chunks, chunk = stage.ours.engine, WORKLOAD["chunks"], WORKLOAD["chunk"]
    tokens = chunks * chunk
    greedy = SamplingParams(temperature=0)
    config = AgentConfig(chunk, WORKLOAD["memory"], WORKLOAD["answer"], sampling=greedy)
    workload = Workload(engine, config, lambda number: (document(engine, number, tokens), QUESTION))
    each = prefill_cost(stage.ours.model_config, HEAD + chunk + 2 * WORKLOAD["memory"])
    cost = Cost(each.flops * chunks, each.bytes * chunks)

    def entry(engine: str, run: Callable[[int], Sample]) -> Entry:
        return Entry(engine, "workload", "float32", chunk, 1, tokens, cost, run)

    able = [peer for peer in peers if peer.spec.dtype == "float32"]
    entries = [entry("palimpsest, kv float32", workload.ours)]
    entries += [entry(peer.spec.label, lambda _, peer=peer: workload.theirs(peer)) for peer in able]  # type: ignore[misc]
    mine, *others = alternate(entries, stage.rounds, stage.probe)
    print(f"workload: {workload.wrote}")
    for label, one in workload.differences().items():
        print(f"{label} {one}")
    rival = best(others)
    gain = None if rival is None else ratio(mine, rival)
    drafts = {source: asdict(counters) for source, counters in workload.drafts.items()}
    return [row(mine) | {"drafts": drafts}, *map(row, others)], [
        Target(f"workload.{chunk}.float32.vs_best_peer", gain, PEER_GAIN)
    ]


if __name__ == "__main__":
    raise SystemExit(main())

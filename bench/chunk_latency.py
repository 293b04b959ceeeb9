"""What a turn of a memory agent takes, with the old memory as a draft, open prompts and chunks that a group shares:
`python -m palimpsest.bench.chunk_latency`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..engine.errors import ConfigError
from . import options
from .clock import Sample
from .costs import Cost, prefill_cost
from .endurance import endurance
from .group import Group
from .limits import Probe
from .options import Options
from .ours import VARIANTS, Ours
from .peers import Peer
from .readings import ForcedReading
from .report import Report, Target, describe_machine, row
from .rounds import Entry, Measured, alternate, best, ratio
from .turns import HEAD, SEPARATOR, TAIL, Turns
from .workload import Workload

__all__ = ["main", "run"]

Part = tuple[list[dict[str, Any]], list[Target]]


@dataclass(frozen=True)
class Work:
    """A turn with a memory and a chunk of so many tokens. rights: percent of the old memory that the new one keeps."""

    memory: int
    chunk: int
    rights: tuple[int, ...] = (100, 0)


WORKS = (Work(256, 1000, (100, 95, 80, 50, 0)), Work(256, 5000), Work(1024, 1000), Work(1024, 5000))
QUICK = Work(32, 128)
OPEN = Work(256, 1000)
FIRST_TOKEN_WORK = Work(1024, 5000)
READINGS = {  # name -> percent right, drafts, open prompts
    "reading, off": (0, False, True),
    "reading, 100 % right": (100, True, True),
    "reading, 80 % right": (80, True, True),
    "reading, 80 % right, closed": (80, True, False),
}
GROUP, GROUP_MEMORY, GROUP_CHUNK, GROUP_RIGHT = 16, 128, 1000, 80
WORKLOAD = {"chunks": 4, "chunk": 1000, "memory": 256, "answer": 64}
TURNS = 700
ROOM = 400  # of a prompt beside memory, chunk and response

ONE_PASS, SURPRISED, SETTLED = 1 / 1.10, 1 / 1.12, 1 / 1.03
CEILING = {100: 0.90, 80: 0.75}
FIRST_TOKEN = 1 / 0.93
GROUP_SPEED = GROUP_BYTES = 3.0
PEER_GAIN = 1.5
FLAT = 1 / 1.03


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit code."""
    return options.main("chunk_latency", run, argv)


def run(chosen: Options) -> Report:
    """Measure every part; raises PalimpsestError for a model or folder of peers that cannot be used."""
    if chosen.profile:
        raise ConfigError("chunk_latency takes no --profile; `palimpsest bench decode --profile` shows a step")
    works, opened = ((QUICK,), QUICK) if chosen.quick else (WORKS, OPEN)
    ours = Ours(
        chosen.model_path,
        VARIANTS["float32"],
        sequences=len(READINGS) if chosen.quick else GROUP + 1,
        longest=ROOM + max(work.chunk + 2 * work.memory for work in (*works, opened)),
        threads=chosen.threads,
        drafts=True,
    )
    probe = Probe()
    parts = [section.run() for section in chosen.choose(_sections(ours, chosen, works, opened, probe))]
    rows = [line for found, _ in parts for line in found]
    targets = [target for _, found in parts for target in found]
    return Report("chunk_latency", describe_machine(probe.isa, probe.best), rows, targets)


@dataclass(frozen=True)
class _Section:
    """A part of the report, by the head of its targets' names."""

    full_name: str
    run: Callable[[], Part]


def _sections(ours: Ours, chosen: Options, works: Sequence[Work], opened: Work, probe: Probe) -> list[_Section]:
    rounds = chosen.rounds
    sections = [
        _Section(f"turn{work.memory}.{work.chunk}", partial(_turns, ours, work, rounds, probe)) for work in works
    ]
    sections.append(_Section(f"read{opened.memory}.{opened.chunk}", partial(_readings, ours, opened, rounds, probe)))
    if chosen.quick:
        return sections

    def workload() -> Part:
        with chosen.start_peers() as peers:
            return _workload(ours, peers, rounds, probe)

    first = FIRST_TOKEN_WORK
    return [
        *sections,
        _Section(f"first{first.memory}.{first.chunk}", partial(_first_token, ours, first, rounds, probe)),
        _Section(f"group{GROUP}.{GROUP_CHUNK}", partial(_group, ours, rounds, probe)),
        _Section(f"endurance.{TURNS}", partial(_endurance, ours, chosen.threads)),
        _Section(f"workload.{WORKLOAD['chunk']}", workload),
    ]


def _turns(ours: Ours, work: Work, rounds: int, probe: Probe) -> Part:
    """Drafts alone: prompts are closed, and of each only the head is resident."""
    turns = Turns(ours.engine, work.memory, work.chunk)
    ways: dict[str, Callable[[], Sample]] = {
        "drafts off": turns.plain,
        "one pass": turns.one_pass,
        **{f"drafts, {right} % right": partial(turns.drafted, right) for right in work.rights},
        "drafts, first 0 % right": turns.surprised,
    }
    found = _alternate(ours, f"turn{work.memory}", work.chunk, turns.computed, ways, rounds, probe)
    off, prefix = found["drafts off"], f"turn{work.memory}.{work.chunk}.float32"
    targets = [
        Target(f"{prefix}.one_pass_over_100", ratio(found["drafts, 100 % right"], found["one pass"]), ONE_PASS),
        Target(f"{prefix}.off_over_first_0", ratio(found["drafts, first 0 % right"], off), SURPRISED),
        Target(f"{prefix}.off_over_later_0", ratio(found["drafts, 0 % right"], off), SETTLED),
    ]
    return [row(one) for one in found.values()], targets


def _readings(ours: Ours, work: Work, rounds: int, probe: Probe) -> Part:
    """Drafts and open prompts as MemoryAgent uses them, against drafts off and what the rates allow at best."""
    readings = {
        name: ForcedReading(
            ours.engine, memory=work.memory, chunk=work.chunk, right=right, drafts=drafts, open_prompt=is_open,
            seed=1_000_000 * number,
        )
        for number, (name, (right, drafts, is_open)) in enumerate(READINGS.items(), start=1)
    }  # fmt: skip
    for reading in readings.values():  # the turn that writes the memory, and two in which drafts settle
        for _ in range(3):
            reading.turn()
    turns = Turns(ours.engine, work.memory, work.chunk)
    after = next(iter(readings.values())).after_memory
    ways = {name: reading.turn for name, reading in readings.items()} | {"one pass": turns.one_pass}
    found = _alternate(ours, f"read{work.memory}", work.chunk, after + work.memory, ways, rounds, probe)
    prefix = f"read{work.memory}.{work.chunk}.float32"
    targets = []
    for right, least in CEILING.items():
        ideal = _ideal(found, after, work.memory, turns.computed, right)
        off, drafted = found["reading, off"].seconds, found[f"reading, {right} % right"].seconds
        print(f"{prefix}, {right} % right: {off / drafted:.2f}x of drafts off, at best {off / ideal:.2f}x")
        targets.append(Target(f"{prefix}.share_of_ceiling_{right}", ideal / drafted, least))
    last = readings["reading, off"].last
    if last is not None:
        behind = after / (last.prefilled_tokens - last.prefilled_ahead)
        targets.append(Target(f"{prefix}.needed_over_prefilled", behind, 1.0))
    for reading in readings.values():
        reading.close()
    return [row(one) for one in found.values()], targets


def _ideal(found: dict[str, Measured], after: int, memory: int, pass_tokens: int, right: int) -> float:
    """Seconds of a turn at the rates of this run: prefill with the first run of the draft in it, then a step for each
    token that is wrong. All drafted rows of these steps are taken to be free.
    """
    token = found["one pass"].seconds / pass_tokens
    step = (found["reading, off"].seconds - after * token) / memory
    if right == 100:
        return (after + memory) * token
    wrong = round(memory * (100 - right) / 100)
    return (after + memory // wrong - 1) * token + wrong * step


def _first_token(ours: Ours, work: Work, rounds: int, probe: Probe) -> Part:
    """What is gained when the memory is resident before its turn begins."""
    turns = Turns(ours.engine, work.memory, work.chunk)
    ways = {
        "to first token, closed": partial(turns.to_first_token, is_open=False),
        "to first token, open": partial(turns.to_first_token, is_open=True),
    }
    tokens = work.memory + SEPARATOR + work.chunk + TAIL
    found = _alternate(ours, f"first{work.memory}", work.chunk, tokens, ways, rounds, probe)
    whole, closed, opened = (
        prefill_cost(ours.model_config, length).flops for length in (HEAD + tokens, HEAD, HEAD + work.memory)
    )
    prefix = f"first{work.memory}.{work.chunk}.float32"
    print(f"{prefix}: by arithmetic alone {(whole - closed) / (whole - opened):.3f}x")
    faster = ratio(found["to first token, open"], found["to first token, closed"])
    return [row(one) for one in found.values()], [Target(f"{prefix}.closed_over_open", faster, FIRST_TOKEN)]


def _group(ours: Ours, rounds: int, probe: Probe) -> Part:
    group = Group(ours.engine, size=GROUP, memory=GROUP_MEMORY, chunk=GROUP_CHUNK, right=GROUP_RIGHT)
    ways = {name: partial(group.turn, name) for name in ("chunk_first", "memory_first")}
    work = f"group{GROUP}"
    found = _alternate(ours, work, GROUP_CHUNK, group.computed, ways, rounds, probe)
    speed = ratio(found["chunk_first"], found["memory_first"])
    less = group.kv_bytes["memory_first"] / group.kv_bytes["chunk_first"]
    prefix = f"{work}.{GROUP_CHUNK}.float32"
    targets = [Target(f"{prefix}.speed", speed, GROUP_SPEED), Target(f"{prefix}.kv_bytes", less, GROUP_BYTES)]
    return [row(one) for one in found.values()], targets


def _endurance(ours: Ours, threads: int) -> Part:
    found = endurance(ours.engine, TURNS, threads)
    print(f"{TURNS} turns of a tiny model, the first and the last hundred: {found}")
    cpu, resident = found.first_seconds / found.last_seconds, found.first_bytes / found.last_bytes
    return [], [
        Target(f"endurance.{TURNS}.float32.cpu_time", cpu, FLAT),
        Target(f"endurance.{TURNS}.float32.resident", resident, FLAT),
    ]


def _workload(ours: Ours, peers: Sequence[Peer], rounds: int, probe: Probe) -> Part:
    workload = Workload(ours.engine, **WORKLOAD)
    tokens = workload.chunks * workload.chunk
    each = prefill_cost(ours.model_config, HEAD + workload.chunk + 2 * WORKLOAD["memory"])
    cost = Cost(each.flops * workload.chunks, each.bytes * workload.chunks)

    def entry(engine: str, run: Callable[[int], Sample]) -> Entry:
        return Entry(engine, "workload", "float32", workload.chunk, 1, tokens, cost, run)

    able = [peer for peer in peers if peer.spec.dtype == "float32"]
    entries = [entry("palimpsest, kv float32", workload.ours)]
    entries += [entry(peer.spec.label, lambda _, peer=peer: workload.theirs(peer)) for peer in able]  # type: ignore[misc]
    mine, *others = alternate(entries, rounds, probe)
    print(f"workload: {workload.wrote}")
    for label, one in workload.differences().items():
        print(f"{label} differs first in turn {one.turn}, token {one.place}; our two likeliest lie {one.gap:.2g} apart")
    rival = best(others)
    gain = None if rival is None else ratio(mine, rival)
    return [row(one) for one in (mine, *others)], [
        Target(f"workload.{workload.chunk}.float32.vs_best_peer", gain, PEER_GAIN)
    ]


def _alternate(
    ours: Ours,
    work: str,
    context: int,
    tokens: int,
    ways: Mapping[str, Callable[[], Sample]],
    rounds: int,
    probe: Probe,
) -> dict[str, Measured]:
    """By name. The limit of each is one pass over the `tokens` that no way can do without, behind the head."""
    cost = prefill_cost(ours.model_config, tokens)
    entries = [
        Entry(name, work, "float32", context, 1, tokens, cost, lambda _, way=way: way())  # type: ignore[misc]
        for name, way in ways.items()
    ]
    return {one.entry.engine: one for one in alternate(entries, rounds, probe)}


if __name__ == "__main__":
    raise SystemExit(main())

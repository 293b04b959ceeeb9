"""A trained agent's whole readings, as `chunk_latency --adapter FOLDER` measures them: its own memories and drafts.

It reads held-out documents of the facts task, greedy, as the palimpsest.json beside the adapter says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from ..engine import lora, reading_file
from ..engine.config import SamplingParams
from ..engine.errors import ConfigError
from ..rl.tasks.facts import FactsConfig
from .clock import Sample
from .costs import Cost, prefill_cost
from .limits import Prober
from .options import Options
from .ours import VARIANTS, Ours
from .peers import Peer
from .report import Report, Target, describe_machine, row
from .rounds import Entry, alternate, best, ratio
from .sections import Part
from .turns import HEAD, drafting
from .workload import Workload

__all__ = ["trained_agent"]

CHUNKS = 8
ROOM = 400  # of a prompt beside memory, chunk and response
SEED = 1_000_000  # of the documents
PEER_GAIN = 1.5


def trained_agent(chosen: Options, folder: str) -> Report:
    """Measure the readings of the adapter in `folder`, with and without drafts, and those of the peers, whose model
    should have the adapter merged in. Raises PalimpsestError for what cannot be read."""
    if chosen.works or chosen.quick or chosen.tiny:
        raise ConfigError("--adapter measures the agent's readings alone; leave --works, --quick and --tiny out")
    config = reading_file.read(folder)
    config = replace(config, sampling=SamplingParams(temperature=0))
    longest = ROOM + config.chunk_tokens + 2 * config.memory_tokens
    ours = Ours(
        chosen.model_path, VARIANTS["float32"], sequences=2, longest=longest, threads=chosen.threads, drafts=True,
        backend=chosen.backend,
    )  # fmt: skip
    lora.merge(ours.engine, folder)
    workload = Workload(ours.engine, config, partial(_facts, tokens=CHUNKS * config.chunk_tokens))
    probe = chosen.probe()
    with chosen.start_peers() as peers:
        rows, targets = _readings(ours, workload, peers, chosen.rounds, probe)
    return Report("chunk_latency", describe_machine(probe.isa, probe.best), rows, targets)


def _readings(ours: Ours, workload: Workload, peers: Sequence[Peer], rounds: int, probe: Prober) -> Part:
    chunk = workload.config.chunk_tokens
    tokens = CHUNKS * chunk
    each = prefill_cost(ours.model_config, HEAD + chunk + 2 * workload.config.memory_tokens)
    cost = Cost(each.flops * CHUNKS, each.bytes * CHUNKS)

    def entry(engine: str, run: Callable[[int], Sample]) -> Entry:
        return Entry(engine, "agent", "float32", chunk, 1, tokens, cost, run)

    def undrafted(number: int) -> Sample:
        with drafting(ours.engine, False):
            return workload.ours(number)

    entries = [entry("palimpsest, drafts off", undrafted), entry("palimpsest", workload.ours)]  # its turns are the last
    able = [peer for peer in peers if peer.spec.dtype == "float32"]
    entries += [entry(peer.spec.label, lambda _, peer=peer: workload.theirs(peer)) for peer in able]  # type: ignore[misc]
    off, mine, *others = alternate(entries, rounds, probe)
    print(f"agent: {workload.wrote}")
    for label, one in workload.differences().items():
        print(f"{label} {one}")
    updates = [turn for turn in workload.turns if turn.kind == "update"]
    real = {
        "decode_steps_per_chunk": sum(turn.decode_steps for turn in updates) / len(updates),
        "undecoded": sum(not turn.decode_steps for turn in updates) / len(updates),
        "seconds_per_chunk": mine.seconds / CHUNKS,
        "over_drafts_off": ratio(mine, off),
        "drafts": {source: asdict(counters) for source, counters in workload.drafts.items()},
    }
    rival = best(others)
    return [row(off), row(mine) | real, *map(row, others)], [
        Target(f"agent.{chunk}.float32.vs_best_peer", None if rival is None else ratio(mine, rival), PEER_GAIN),
    ]


def _facts(number: int, tokens: int) -> tuple[str, str]:
    problem = FactsConfig(SEED, tokens, "one_fact", "held_out").source().problem(number)
    return "".join(problem.document), problem.question

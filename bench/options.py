"""Options: what every speed benchmark can be told on its command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from ..engine.config import BACKENDS
from ..engine.defaults import embedded_model_path
from ..engine.errors import ConfigError, PalimpsestError
from .device import DeviceProbe
from .limits import Probe, Prober
from .peers import Peer, running
from .random_model import RANDOM_MODELS, random_model
from .report import Report

__all__ = ["Options", "main"]

ROUNDS = 5
EXIT_MISSED = 1
EXIT_ERROR = 2

Named = TypeVar("Named", bound="Work")


class Work(Protocol):
    """Something to measure. full_name: WORK.CONTEXT, as the names of its targets begin."""

    @property
    def full_name(self) -> str: ...


@dataclass(frozen=True)
class Options:
    """model: folder or GGUF file, None for the embedded one. works: names or heads of names, as in the targets; empty
    for all. threads: CPU threads, of ours and of the peers. backend: EngineConfig.backend. tiny: works for Triton's
    kernels so small that its interpreter can run them. adapter: folder of a trained agent, whose readings are measured
    in place of all else.
    """

    model: str | None
    works: tuple[str, ...]
    peers: Path | None
    quick: bool
    threads: int
    rounds: int
    profile: bool
    backend: str = "auto"
    tiny: bool = False
    adapter: str | None = None

    @property
    def model_path(self) -> str:
        return str(embedded_model_path()) if self.model is None else self.model

    @property
    def by_triton(self) -> bool:
        """Whether Triton's kernels run: on a GPU or, under the interpreter, as if on one."""
        return self.backend == "triton" or (self.backend == "auto" and torch.cuda.is_available())

    @property
    def scale(self) -> str:
        """Which works there are: "full" or "quick" on a CPU, "gpu" or "tiny" by Triton. Raises ConfigError for both."""
        if self.by_triton and self.quick:
            raise ConfigError("--quick has works for a CPU; for Triton's kernels say --tiny, or nothing for a GPU")
        if self.tiny and not self.by_triton:
            raise ConfigError("--tiny has works for Triton's kernels; add --backend triton")
        if self.by_triton:
            return "tiny" if self.tiny else "gpu"
        return "quick" if self.quick else "full"

    def probe(self) -> Prober:
        """Measures the limits of what runs the works."""
        if not self.by_triton:
            return Probe()
        on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
        return DeviceProbe(torch.device("cuda" if on_gpu else "cpu"))

    def choose(self, works: Iterable[Named]) -> list[Named]:
        """Those of `works` that are to be measured. Raises ConfigError for a name that none of them has."""
        works = list(works)
        for name in self.works:
            if not any(_is_within(work.full_name, name) for work in works):
                names = ", ".join(work.full_name for work in works)
                raise ConfigError(f"--works {name}: there is no such work here; there are {names}")
        return [work for work in works if not self.works or any(_is_within(work.full_name, n) for n in self.works)]

    def start_peers(self) -> AbstractContextManager[list[Peer]]:
        """The peers of the folder, ended on leaving; none without a folder. Raises ConfigError for a wrong one."""
        return nullcontext([]) if self.peers is None else running(self.peers, self.threads)


def main(name: str, run: Callable[[Options], Report], argv: Sequence[str] | None, *, adapters: bool = False) -> int:
    """Parse, run, print; -> exit code: 0, 1 when --check finds a missed target, 2 after a mistake of the user.

    adapters: whether there is an --adapter."""
    parser = _parser(name)
    if adapters:
        what = "a trained agent's; measures its whole readings in place of all else"
        parser.add_argument("--adapter", metavar="FOLDER", help=what)
    arguments = vars(parser.parse_args(argv))
    check = arguments.pop("check")
    if arguments["rounds"] < 1 or arguments["threads"] < 1:
        parser.error("--rounds and --threads take a whole number of at least 1")
    try:
        with _model(arguments.pop("model"), arguments["peers"]) as model:
            report = run(Options(model=model, **arguments))
    except PalimpsestError as error:
        print(f"palimpsest bench {name}: {error}", file=sys.stderr)
        return EXIT_ERROR
    report.print()
    return EXIT_MISSED if check and report.missed else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _is_within(full_name: str, name: str) -> bool:
    """Whether decode.2048 is what decode or decode.2048 asks for."""
    return full_name == name or full_name.startswith(f"{name}.")


def _model(name: str | None, peers: Path | None) -> AbstractContextManager[str | None]:
    """The path of the model that --model names, None when it names none."""
    if name is None or name not in RANDOM_MODELS:
        return nullcontext(name)
    if peers is not None:
        raise ConfigError(f"--model {name} has random weights that no peer has; leave out --peers")
    return random_model(name)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"palimpsest bench {name}",
        description=f"Measure {name} beside the machine's limit and other engines; the last line is JSON.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    random = ", ".join(RANDOM_MODELS)
    add("--model", metavar="PATH", help=f"Hugging Face folder, GGUF file, or {random} (the embedded SmolLM2-135M)")
    add(
        "--works",
        metavar="NAME,NAME",
        type=_names,
        default=(),
        help="of the targets' names: decode.2048,decode_b8 (all)",
    )
    add("--peers", metavar="FOLDER", type=Path, help="a folder with peers.json and the engines that it names")
    add("--check", action="store_true", help="exit with 1 when a target is missed")
    add("--quick", action="store_true", help="the shortest works only, in under 50 seconds")
    add("--threads", type=int, metavar="N", default=torch.get_num_threads(), help="CPU threads (%(default)s)")
    add("--rounds", type=int, metavar="N", default=ROUNDS, help="of which medians are taken (%(default)s)")
    add("--profile", action="store_true", help="also show where the time goes, op by op")
    add("--backend", choices=BACKENDS, default="auto", help="of ours, as in EngineConfig (%(default)s)")
    add("--tiny", action="store_true", help="with --backend triton: so small that Triton's interpreter can run it")
    return parser

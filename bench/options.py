"""Options: what every speed benchmark can be told on its command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ..engine.errors import PalimpsestError
from .peers import Peer, running
from .report import Report

__all__ = ["Options", "main"]

ROUNDS = 5
EXIT_MISSED = 1
EXIT_ERROR = 2


@dataclass(frozen=True)
class Options:
    """model: folder or GGUF file, None for the embedded one. threads: CPU threads, of ours and of the peers."""

    model: str | None
    peers: Path | None
    quick: bool
    threads: int
    rounds: int
    profile: bool

    def start_peers(self) -> AbstractContextManager[list[Peer]]:
        """The peers of the folder, ended on leaving; none without a folder. Raises ConfigError for a wrong one."""
        return nullcontext([]) if self.peers is None else running(self.peers, self.threads)


def main(name: str, run: Callable[[Options], Report], argv: Sequence[str] | None) -> int:
    """Parse, run, print; -> exit code: 0, 1 when --check finds a missed target, 2 after a mistake of the user."""
    parser = _parser(name)
    arguments = vars(parser.parse_args(argv))
    check = arguments.pop("check")
    if arguments["rounds"] < 1 or arguments["threads"] < 1:
        parser.error("--rounds and --threads take a whole number of at least 1")
    try:
        report = run(Options(**arguments))
    except PalimpsestError as error:
        print(f"palimpsest bench {name}: {error}", file=sys.stderr)
        return EXIT_ERROR
    report.print()
    return EXIT_MISSED if check and report.missed else 0


def _parser(name: str) -> argparse.ArgumentParser:
    import torch

    parser = argparse.ArgumentParser(
        prog=f"palimpsest bench {name}",
        description=f"Measure {name} beside the machine's limit and other engines; the last line is JSON.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="PATH", help="Hugging Face folder or GGUF file (the embedded SmolLM2-135M)")
    add("--peers", metavar="FOLDER", type=Path, help="a folder with peers.json and the engines that it names")
    add("--check", action="store_true", help="exit with 1 when a target is missed")
    add("--quick", action="store_true", help="the shortest works only, in under 50 seconds")
    add("--threads", type=int, metavar="N", default=torch.get_num_threads(), help="CPU threads (%(default)s)")
    add("--rounds", type=int, metavar="N", default=ROUNDS, help="of which medians are taken (%(default)s)")
    add("--profile", action="store_true", help="also show where the time goes, op by op")
    return parser

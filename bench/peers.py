"""Peer: another engine in a process of its own, installed by the user, that does the same work on request.

A folder of peers holds `peers.json`, a list of {"engine", "variant", "dtype", "kv_dtype", "command"} and, if wanted,
"environment" and "most_tokens". A worker writes one JSON line when it is ready and then one for each line it reads:
{"op": "prefill", "n", "seed"} or {"op": "decode", "batch", "ctx", "steps"} gives {"sec", "others", "tokens"},
{"op": "turn", "prompt", "n"} also gives {"ids"}; or {"error"}. {"op": "quit"} ends it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from ..engine.config import from_mapping
from ..engine.errors import ConfigError
from .clock import Sample
from .costs import KV_BYTES, WEIGHT_BITS

__all__ = ["Peer", "PeerError", "PeerSpec", "read_specs", "running"]

MANIFEST = "peers.json"
PATIENCE = 900.0  # seconds for one answer
GOODBYE = 20.0


class PeerError(Exception):
    """A peer did not start, died, refused the work or said nothing for too long."""


@dataclass(frozen=True)
class PeerSpec:
    """How a peer is started and what it computes with.

    engine: the program's name, by which targets find it. variant: what tells its configurations apart. dtype,
    kv_dtype: of weights and KV, keys of WEIGHT_BITS and KV_BYTES. command: program and arguments; the program's path is
    relative to the folder, which is also the working directory. environment: variables added to ours. most_tokens: it
    is not asked for works with more tokens (batch x context), None for no bound.
    """

    engine: str
    variant: str
    dtype: str
    kv_dtype: str
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    most_tokens: int | None = None

    @property
    def label(self) -> str:
        return f"{self.engine} {self.variant}".strip()

    def can_hold(self, tokens: int) -> bool:
        """Whether it is to be asked for a work of so many tokens."""
        return self.most_tokens is None or tokens <= self.most_tokens


class Peer:
    """A running worker; `prefill`, `decode` and `turn` wait for its answer."""

    def __init__(self, spec: PeerSpec, folder: Path, threads: int) -> None:
        """Start the worker and wait until it has loaded its model. Raises PeerError when it doesn't."""
        self.spec = spec
        count = str(threads)
        environment = {**os.environ, "OMP_NUM_THREADS": count, "PEER_THREADS": count, **spec.environment}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the peer)
        try:
            self._process = subprocess.Popen(
                # Not resolved: the `python` of an environment is a link that must be called by its own name.
                [str(folder.absolute() / spec.command[0]), *spec.command[1:]],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{spec.label} cannot be started: {error}") from error
        self._stdin, self._stdout = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def prefill(self, tokens: int, seed: int) -> Sample:
        """A fresh prompt of `tokens` tokens, to the first token of its response. Raises PeerError."""
        return _sample(self._ask({"op": "prefill", "n": tokens, "seed": seed}))

    def decode(self, batch: int, context: int, steps: int) -> Sample:
        """`steps` tokens for each of `batch` sequences behind `context` tokens; their prefill isn't counted."""
        return _sample(self._ask({"op": "decode", "batch": batch, "ctx": context, "steps": steps}))

    def turn(self, prompt: Sequence[int], length: int) -> tuple[Sample, list[int]]:
        """Write `length` tokens behind a prompt, greedily, with whatever cache it has; -> the time and the ids."""
        answer = self._ask({"op": "turn", "prompt": list(prompt), "n": length})
        ids = answer.get("ids")
        if not isinstance(ids, list) or len(ids) != length:
            raise PeerError(f"{self.spec.label} was asked for {length} ids and gave {ids!r:.60}")
        return _sample(answer), ids

    def close(self) -> None:
        """Ask the worker to end, and end it if it doesn't."""
        try:
            self._process.communicate('{"op": "quit"}\n', timeout=GOODBYE)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._stdin.write(json.dumps(question) + "\n")
            self._stdin.flush()
        except OSError as error:
            raise PeerError(f"{self.spec.label} has died: {self._last_words()}") from error
        answer = self._answer()
        if "error" in answer or not answer.get("sec", 0) > 0:
            raise PeerError(f"{self.spec.label}: {answer.get('error', f'no time in its answer {answer}')}")
        return answer

    def _answer(self) -> dict[str, Any]:
        """One line, one JSON object. At most one is under way, so none can hide in the stream's buffer."""
        if not select.select([self._stdout], [], [], PATIENCE)[0]:
            self._process.kill()
            raise PeerError(f"{self.spec.label} did not answer within {PATIENCE:.0f} s")
        line = self._stdout.readline()
        try:
            answer = json.loads(line)
        except json.JSONDecodeError as error:
            raise PeerError(f"{self.spec.label} has died or does not speak JSON: {self._last_words()}") from error
        if not isinstance(answer, dict):
            raise PeerError(f"{self.spec.label} answered {answer!r} instead of a JSON object")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "it wrote nothing to stderr"


def _sample(answer: Mapping[str, Any]) -> Sample:
    return Sample(float(answer["sec"]), float(answer.get("others", 0.0)))


def read_specs(folder: Path) -> list[PeerSpec]:
    """The peers that a folder offers. Raises ConfigError when its peers.json is missing or wrong."""
    file = folder / MANIFEST
    try:
        entries = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"--peers {folder}: {file} cannot be read ({error}); bench/README.md has an example"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{file} must hold a list of objects, one per peer; bench/README.md has an example")
    return [_spec(entry, file) for entry in entries]


def _spec(entry: Mapping[str, Any], file: Path) -> PeerSpec:
    try:
        spec = from_mapping(PeerSpec, entry)
    except TypeError as error:  # a key is missing
        raise ConfigError(f"{file}: {error}; bench/README.md has an example") from error
    for name, value, known in (("dtype", spec.dtype, WEIGHT_BITS), ("kv_dtype", spec.kv_dtype, KV_BYTES)):
        if value not in known:
            raise ConfigError(f"{file}: {name} of {spec.label} must be one of {', '.join(known)}, got {value!r}")
    if not spec.command:
        raise ConfigError(f"{file}: command of {spec.label} is empty; give the program and its arguments")
    return spec


@contextmanager
def running(folder: Path, threads: int) -> Iterator[list[Peer]]:
    """Start all peers of a folder, and end them on leaving. One that doesn't start is left out, with a line on stderr.

    Raises ConfigError when the folder's peers.json is missing or wrong.
    """
    with ExitStack() as stack:
        peers = []
        for spec in read_specs(folder):
            try:
                peer = Peer(spec, folder, threads)
            except PeerError as error:
                print(f"{error}; left out", file=sys.stderr)
                continue
            stack.callback(peer.close)
            peers.append(peer)
        yield peers

"""RewardPool: a user's reward function in processes of its own, each answer within a time limit."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ..engine.errors import ConfigError

__all__ = ["Outcome", "RewardPool"]

WORKER = Path(__file__).with_name("reward_worker.py")
LOADING = 300.0  # seconds that a worker gets to import the function

Outcome = tuple[str, Any]  # ("value", number), or the name of a failure and why
Job = tuple[str, tuple[str, ...], Mapping[str, Any]]


class RewardPool:
    """Some processes with the function "module:name", each serving a job at a time.

    One that hangs or dies is replaced when the next job needs it. Standard output of the function goes to standard
    error, its standard input is empty.
    """

    def __init__(self, name: str, timeout: float, workers: int) -> None:
        """timeout: seconds for an answer. Starts one worker, to see that the function is there.

        Raises ConfigError if it is not.
        """
        module, colon, function = name.partition(":")
        if not (module and colon and function):
            raise ConfigError(f"a function is named as 'module:function', got {name!r}")
        self._name, self._timeout = name, timeout
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self.close = weakref.finalize(self, _close, self._threads, self._workers)
        self._idle.put(self._start())

    def submit(self, answer: str, references: Sequence[str], extra: Mapping[str, Any]) -> Future[Outcome]:
        """Score an answer when a worker is free."""
        return self._threads.submit(self._serve, (str(answer), tuple(references), dict(extra)))

    def _serve(self, job: Job) -> Outcome:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            try:
                worker = self._start()
            except ConfigError as error:
                return "died", str(error)
        outcome = worker.ask(job)
        if outcome[0] in ("timeout", "died"):
            worker.kill()
            self._workers.discard(worker)
        else:
            self._idle.put(worker)
        return outcome

    def _start(self) -> _Worker:
        worker = _Worker(self._name, self._timeout)
        self._workers.add(worker)
        return worker


class _Worker:
    """A process and the socket to it."""

    def __init__(self, name: str, timeout: float) -> None:
        self._timeout = timeout
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(theirs.fileno())],  # -P: modules beside WORKER shadow no others
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"PYTHONHASHSEED": "0", **os.environ},  # the same order of a set's elements in every run
            )
        self._connection.send(([*sys.path, os.getcwd()], *name.split(":", 1), timeout))
        outcome, why = self._receive(LOADING)
        if outcome != "loaded":
            self.kill()
            raise ConfigError(f"the reward function {name!r} can't be used: {why}")

    def ask(self, job: Job) -> Outcome:
        """Its outcome; with "timeout" and "died" the worker is of no use any more."""
        try:
            self._connection.send(job)
        except OSError:
            pass  # it died while it was idle; what there is to say is said below
        except Exception as error:  # pickling a row's data may raise anything; nothing was sent then
            return "raised", f"the problem can't be handed to another process: {type(error).__name__}: {error}"
        return self._receive(self._timeout)

    def kill(self) -> None:
        """End it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _receive(self, timeout: float) -> Outcome:
        try:
            if not self._connection.poll(timeout):
                return "timeout", f"no answer within {timeout} s"
            outcome: Outcome = self._connection.recv()
            return outcome
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            return "died", f"its process ended with code {self._process.returncode}"


def _close(threads: ThreadPoolExecutor, workers: set[_Worker]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in list(workers):
        worker.kill()

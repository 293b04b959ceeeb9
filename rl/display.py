"""What a run shows on standard error: bars on a terminal, and everywhere a line per step."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Display"]


class Display:
    """A context manager; outside of it only lines are shown. Texts that were told before are not told again."""

    def __init__(self, steps: int, done: int, groups: int, *, quiet: bool = False) -> None:
        """steps: of the whole run, `done` of them before it. groups: of a step. quiet: show nothing."""
        self._console = Console(stderr=True, highlight=False, markup=False, quiet=quiet)
        self._told = set[str]()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._steps = self._bars.add_task("steps", total=steps, completed=done)
        self._groups = self._bars.add_task("groups", total=groups)

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def group(self) -> None:
        """A group is complete."""
        self._bars.advance(self._groups)

    def step(self, line: str) -> None:
        """A step is complete; line: what came of it."""
        self.say(line)
        self._bars.advance(self._steps)
        self._bars.reset(self._groups)

    def tell(self, text: str) -> None:
        """Show a text, once."""
        if text not in self._told:
            self._told.add(text)
            self.say(text)

    def say(self, text: str) -> None:
        """Show a text."""
        self._console.print(text, soft_wrap=True)  # the terminal wraps; a log file keeps one line

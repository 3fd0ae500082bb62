"""The named phases of a start: what the run is busy with, how far it is, and for how long.

    with phases.phase("Warm start") as phase:
        phase.update(120, 200, "loss 0.53")

On a terminal, running phases move (spinner, bar, elapsed time) and leave one line each when they
end. Elsewhere (a log file, CI) each writes one plain line when it starts and one when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from rlsys.observe.summary import duration


class Phases:
    """Shows phases, several at a time where they overlap. `clock` tells seconds."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self.console = console
        self.clock = clock
        self.progress = Progress(
            SpinnerColumn("line" if console.options.ascii_only else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[detail]}", markup=False, style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            get_time=clock,
        )
        self._num_running = 0

    def phase(self, name: str) -> Phase:
        return Phase(self, name)

    def started(self, name: str) -> TaskID:
        if not self.console.is_interactive:
            self._print(Text(f"{name} ..."))
        elif self._num_running == 0:
            self.progress.start()
        self._num_running += 1
        return self.progress.add_task(name, total=None, detail="")

    def ended(self, task: TaskID, line: Text) -> None:
        self.progress.remove_task(task)
        self._num_running -= 1
        if self.console.is_interactive and self._num_running == 0:
            self.progress.stop()
        self._print(line)

    def stop(self) -> None:
        """What moves stands still, and the terminal has its cursor again."""
        if self.console.is_interactive and self._num_running:
            self.progress.stop()

    def _print(self, line: Text) -> None:
        # A long line is left to the terminal to wrap, and to a log file to keep whole.
        self.console.print(line, soft_wrap=True, highlight=False)


class Phase:
    """A context: the phase runs from its beginning to its end."""

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self._name = name
        self._detail = ""

    def __enter__(self) -> Phase:
        self._start_s = self._phases.clock()
        self._task = self._phases.started(self._name)
        return self

    def update(self, done: int, total: int | None = None, detail: str = "") -> None:
        """`done` of `total` units, and a word about them, such as "loss 0.53"."""
        count = f"{done}/{total}" if total is not None else f"{done}"
        self._detail = f"{count} {detail}".rstrip()
        self._phases.progress.update(self._task, completed=done, total=total, detail=self._detail)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        line = Text(f"{self._name}: ")
        if self._detail:
            line.append(f"{self._detail}, ")
        elapsed = duration(self._phases.clock() - self._start_s)
        if kind is None:
            line.append(elapsed, style="green")
        elif issubclass(kind, Exception):
            line.append(f"failed after {elapsed}", style="bold red")
        else:  # Ctrl-C, or the cancellation of a task
            line.append(f"stopped after {elapsed}", style="yellow")
        self._phases.ended(self._task, line)

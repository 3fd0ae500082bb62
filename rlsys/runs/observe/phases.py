"""Named phases of a run: the current activity, its progress and its duration.

    with phases.phase("Warm start") as phase:
        phase.update(120, 200, "loss 0.53")

A terminal shows a moving line per phase (spinner, bar, elapsed time) and keeps one line for each
phase that has ended. A notebook shows one output that is updated in place. Elsewhere (a log file, a
pipe, CI) a phase prints a line when it starts, one when it ends, and some in between, so that a
reader sees that the run is alive.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rlsys.common.background_tasks import report, start_thread
from rlsys.runs.observe.notebook import NotebookDisplay, in_notebook
from rlsys.runs.observe.summary import duration

# A phase that prints lines first reports its progress after FIRST_SIGN_S, then after twice the
# time of the previous report, at most LONGEST_SILENCE_S later.
FIRST_SIGN_S = 10.0
LONGEST_SILENCE_S = 60.0
TICK_S = 1.0
MB = 10**6
MIN_UPDATE_S = 1.0  # between two updates of a notebook's output


class Output(Console):
    """Standard output or standard error.

    Moving lines need a real terminal: FORCE_COLOR, which notebook kernels and CI systems set, makes
    rich take any stream for one. When the reader goes away, as in `recipe | head`, the output
    raises BrokenPipeError once and then discards everything.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(
            stderr=stderr,
            soft_wrap=True,
            highlight=False,
            force_jupyter=False,
            force_interactive=None if stream is not None and stream.isatty() else False,
        )

    def on_broken_pipe(self) -> None:
        """Discard all later output, and raise BrokenPipeError."""
        self.quiet = True
        raise BrokenPipeError("the reader of the output has closed it")


class Phases:
    """Display of phases, several at a time if they overlap.

    `clock` returns seconds. `tick_s` is the time between two updates of running phases; with None,
    the caller calls `tick`.
    """

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        *,
        tick_s: float | None = TICK_S,
    ) -> None:
        self.console = console
        self.clock = clock
        self._tick_s = tick_s
        self._lock = threading.RLock()
        self._running: list[Phase] = []
        self._stop_ticking: threading.Event | None = None
        self._view: View
        if console.is_interactive:
            self._view = MovingLines(console, clock)
        elif isinstance(console, Output) and in_notebook():
            self._view = UpdatedOutput(console, clock)
        else:
            self._view = PrintedLines(console)

    def phase(self, name: str, *, keep: bool = True) -> Phase:
        """Return a context that is shown while it runs. `keep`: a line of it stays afterwards."""
        return Phase(self, name, keep=keep)

    def started(self, phase: Phase) -> None:
        """Show a phase."""
        with self._lock:
            self._running.append(phase)
            self._view.started(phase)
            if self._stop_ticking is None and self._tick_s is not None:
                self._stop_ticking = threading.Event()
                arguments = (self._stop_ticking, self._tick_s)
                start_thread(self._tick_until, *arguments, name="phases", fail=report)

    def updated(self, phase: Phase) -> None:
        """Show the progress of a phase."""
        with self._lock:
            self._view.updated(phase)

    def ended(self, phase: Phase, line: Text | None) -> None:
        """Stop showing a phase. Keep `line` of it, if it is to be kept."""
        with self._lock:
            if phase not in self._running:  # stopped before
                return
            self._running.remove(phase)
            if not self._running and self._stop_ticking is not None:
                self._stop_ticking.set()
                self._stop_ticking = None
            self._view.ended(phase, line if phase.keep else None)

    def tick(self) -> None:
        """Show that running phases are alive."""
        with self._lock:
            for phase in self._running:
                self._view.tick(phase)

    def stop(self) -> None:
        """Stop showing all phases. A terminal gets its cursor back."""
        with self._lock:
            if self._stop_ticking is not None:
                self._stop_ticking.set()
                self._stop_ticking = None
            self._running.clear()
            self._view.stop()

    def _tick_until(self, stopped: threading.Event, tick_s: float) -> None:
        while not stopped.wait(tick_s):
            try:
                self.tick()
            except OSError:  # raised again by the next line of the run itself
                self.console.quiet = False
                return


class Phase:
    """Context of one phase."""

    def __init__(self, phases: Phases, name: str, *, keep: bool) -> None:
        self._phases = phases
        self.name = name
        self.keep = keep
        self.detail = ""
        self.done: int | None = None
        self.total: int | None = None
        self.start_s = 0.0
        self.next_sign_s = FIRST_SIGN_S  # after its start

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._phases.clock() - self.start_s

    def __enter__(self) -> Phase:
        self.start_s = self._phases.clock()
        self._phases.started(self)
        return self

    def update(self, done: int, total: int | None = None, detail: str = "") -> None:
        """Show `done` of `total` units, and a detail such as "loss 0.53"."""
        count = f"{done}/{total}" if total is not None else f"{done}"
        self.done, self.total, self.detail = done, total, f"{count} {detail}".rstrip()
        self._phases.updated(self)

    def update_bytes(self, done: int, total: int) -> None:
        """Show numbers of bytes, in MB."""
        self.update(done // MB, total // MB, "MB")

    def begin_again(self, name: str) -> None:
        """Restart the time under another name, for the next of many similar phases."""
        self.name, self.detail, self.done, self.total = name, "", None, None
        self.start_s, self.next_sign_s = self._phases.clock(), FIRST_SIGN_S
        self._phases.updated(self)

    def inner(self, name: str) -> Phase:
        """Return a context that is shown in addition while it runs."""
        return self._phases.phase(name, keep=False)

    def end(self) -> None:
        """End the phase before the block ends, without a line."""
        self._phases.ended(self, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        line = Text(f"{self.name}: ")
        if self.detail:
            line.append(f"{self.detail}, ")
        elapsed = duration(self.elapsed_s)
        if kind is None:
            line.append(elapsed, style="green")
        elif issubclass(kind, Exception):
            line.append(f"failed after {elapsed}", style="bold red")
        else:  # Ctrl-C, or the cancellation of a task
            line.append(f"stopped after {elapsed}", style="yellow")
        self._phases.ended(self, line)


class View(Protocol):
    """Interface of the three displays. Calls come from one thread at a time."""

    def started(self, phase: Phase) -> None:
        """Show a phase."""

    def updated(self, phase: Phase) -> None:
        """Show the progress of a phase."""

    def tick(self, phase: Phase) -> None:
        """Show that a phase is alive."""

    def ended(self, phase: Phase, line: Text | None) -> None:
        """Stop showing a phase, and keep `line`, if any."""

    def stop(self) -> None:
        """Stop showing all phases."""


class PrintedLines:
    """Lines at the start and at the end of a phase, and some in between."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def started(self, phase: Phase) -> None:
        """Print the name."""
        if phase.keep:
            _print(self._console, Text(f"{phase.name} ..."))

    def updated(self, phase: Phase) -> None:
        """Do nothing: the next tick prints the progress."""

    def tick(self, phase: Phase) -> None:
        """Print the progress, in growing intervals."""
        elapsed_s = phase.elapsed_s
        if elapsed_s < phase.next_sign_s:
            return
        phase.next_sign_s = elapsed_s + min(elapsed_s, LONGEST_SILENCE_S)
        comment = "# " if self._console.stderr else ""
        _print(self._console, Text(comment + _so_far(phase, elapsed_s)))

    def ended(self, phase: Phase, line: Text | None) -> None:
        """Print `line`, if any."""
        if line is not None:
            _print(self._console, line)

    def stop(self) -> None:
        """Do nothing."""


class MovingLines:
    """Spinner, bar and elapsed time of each running phase, on a terminal."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._tasks: dict[Phase, TaskID] = {}
        self.progress = Progress(
            SpinnerColumn("line" if console.options.ascii_only else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[detail]}", markup=False, style="dim"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            get_time=clock,
            redirect_stdout=not console.stderr,
        )

    def started(self, phase: Phase) -> None:
        """Add a moving line."""
        if not self._tasks:
            self.progress.start()
        self._tasks[phase] = self.progress.add_task(phase.name, total=None, detail="")

    def updated(self, phase: Phase) -> None:
        """Update the bar."""
        if phase not in self._tasks:
            return
        task = self._tasks[phase]
        if phase.done is None:  # it was restarted
            self.progress.reset(task, total=None, description=phase.name, detail="")
        self.progress.update(task, completed=phase.done, total=phase.total, detail=phase.detail)

    def tick(self, phase: Phase) -> None:
        """Do nothing: rich updates the lines."""

    def ended(self, phase: Phase, line: Text | None) -> None:
        """Remove the moving line, and print `line`, if any."""
        self.progress.remove_task(self._tasks.pop(phase))
        if not self._tasks:
            self.progress.stop()
        if line is not None:
            _print(self._console, line)

    def stop(self) -> None:
        """Remove all moving lines."""
        if self._tasks:
            self._tasks.clear()
            self.progress.stop()


class UpdatedOutput:
    """An output of a notebook cell for all overlapping phases."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._display = NotebookDisplay()
        self._running: list[Phase] = []
        self._ended: list[str] = []
        self._shown_s = -MIN_UPDATE_S

    def started(self, phase: Phase) -> None:
        """Add a line, in a new output if no phase is running."""
        if not self._running:  # after what was printed since
            self._display, self._ended = NotebookDisplay(), []
        self._running.append(phase)
        self._show()

    def updated(self, phase: Phase) -> None:
        """Update the output."""
        self.tick(phase)

    def tick(self, phase: Phase) -> None:
        """Update the output, at most once per MIN_UPDATE_S."""
        if self._clock() - self._shown_s >= MIN_UPDATE_S:
            self._show()

    def ended(self, phase: Phase, line: Text | None) -> None:
        """Replace the line of the phase by `line`, if any."""
        self._running.remove(phase)
        if line is not None:
            self._ended.append(line.plain)
        self._show()

    def stop(self) -> None:
        """Remove the lines of running phases."""
        self._running.clear()
        self._show()

    def _show(self) -> None:
        self._shown_s = self._clock()
        running = [_so_far(phase, phase.elapsed_s) for phase in self._running]
        self._display.show("\n".join([*self._ended, *running]))


def progress_on_stderr(name: str) -> Phase:
    """Return a phase on standard error, for commands whose standard output is a TOML file.

    Its lines are TOML comments, in case both go to one file.
    """
    return Phases(Output(stderr=True)).phase(name, keep=False)


def remaining_s(done: int | None, total: int | None, elapsed_s: float) -> float | None:
    """Return the seconds that the rest takes at the mean speed so far, or None if unknown."""
    if not done or not total or done >= total:
        return None
    return elapsed_s * (total - done) / done


def _so_far(phase: Phase, elapsed_s: float) -> str:
    detail = f"{phase.detail}, " if phase.detail else ""
    rest_s = remaining_s(phase.done, phase.total, elapsed_s)
    rest = f", about {duration(rest_s)} left" if rest_s is not None else ""
    return f"{phase.name}: {detail}{duration(elapsed_s)} so far{rest}"


def _print(console: Console, line: Text) -> None:
    # The terminal wraps long lines. A log file keeps them in one piece.
    console.print(line, soft_wrap=True, highlight=False)

"""Console output of a run.

    phases while it starts ─► a line per optimizer step, samples, warnings ─► a closing summary

Input: the phases' names, each step's metrics, recorded rollouts. Output: text on a rich console.
diagnosis.py decides what is worth a warning, and summary.py computes the summary.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.text import Text

from rlsys import metrics
from rlsys.common.number_text import counted
from rlsys.common.user_functions import printable
from rlsys.runs.observe.advised_settings import AdvisedSettings
from rlsys.runs.observe.diagnosis import (
    HISTORY,
    WINDOW,
    EvaluationPoint,
    diagnose,
    overfits,
)
from rlsys.runs.observe.finding import Finding
from rlsys.runs.observe.phases import TICK_S, Output, Phase, Phases
from rlsys.runs.observe.records import RolloutRecord
from rlsys.runs.observe.summary import (
    describe_evaluation,
    duration,
    evaluation_rows,
    summarize,
    summary_rows,
)
from rlsys.runs.run_outcome import Outcome

HEADER_EVERY = 20  # step lines
GONE_AFTER = 20  # steps without a finding after which it is shown again when it comes back
TREND_CELLS = 8  # each the mean of an eighth of the run so far
STEPS_OF_ESTIMATE = 20  # whose mean time estimates the time of later steps
MAX_SAMPLE_CHARACTERS = 600  # of a prompt or completion; rollouts.jsonl has all of it
MAX_SAMPLE_TURNS = 16  # of an episode

Line = Mapping[str, float]


@dataclass(frozen=True)
class ConsoleColumn:
    """A column of the step lines."""

    title: str
    width: int
    cell: Callable[[Line], str]


def _number(name: str, spec: str) -> Callable[[Line], str]:
    """Return the cell of a metric; a negative number that rounds to zero has no sign."""
    return lambda line: format(float(line[name]), f"z{spec}") if name in line else "-"


def _staleness(line: Line) -> str:
    if metrics.STALENESS_MEAN not in line or metrics.STALENESS_MAX not in line:
        return "-"
    return f"{line[metrics.STALENESS_MEAN]:.2f}/{line[metrics.STALENESS_MAX]:.0f}"


def _idle(line: Line) -> str:
    if metrics.TIME_TRAINER_IDLE_S not in line or not line.get(metrics.TIME_STEP_S):
        return "-"
    return f"{line[metrics.TIME_TRAINER_IDLE_S] / line[metrics.TIME_STEP_S]:.0%}"


SAMPLER_KL, ENTROPY, LENGTH = "sampler kl", "entropy", "length"
SAMPLER_COLUMNS = (SAMPLER_KL, ENTROPY, LENGTH)

# docs/metrics.md explains each of them.
COLUMNS = (
    ConsoleColumn(LENGTH, 6, _number(metrics.COMPLETION_TOKENS_MEAN, ".0f")),
    ConsoleColumn(ENTROPY, 7, _number(metrics.ENTROPY, ".3f")),
    ConsoleColumn("stale", 7, _staleness),
    ConsoleColumn("tokens/s", 8, _number(metrics.THROUGHPUT_TRAINED_TOKENS, ",.0f")),
    ConsoleColumn("idle", 4, _idle),
    ConsoleColumn("loss", 8, _number(metrics.LOSS, ".4f")),
    ConsoleColumn("grad", 7, _number(metrics.GRAD_NORM, ".3g")),
    ConsoleColumn(SAMPLER_KL, 10, _number(metrics.KL_SAMPLER_TRAINER, ".1e")),
    ConsoleColumn("seconds", 7, _number(metrics.TIME_STEP_S, ".2f")),
)
LEFT_WIDTH = 5  # of the last column, the time that the run will still take


@dataclass
class ShownWarning:
    """A problem that was shown, and the step at which it was last found."""

    kind: str
    found_at: int


class RunConsole:
    """Output of one run.

    Args:
        num_steps: Steps of the run.
        settings: Settings of the run, on which advice depends. They may be set anew.
        rollouts_per_step: Rollouts of a step, for its progress.
        samples: Whether rollouts are sampled, not read from a dataset.
        print_every: Steps between samples.
        print_samples: Samples to print.
        console: Where to print. By default, the standard output.
        clock: Returns seconds.
        tick_s: See `Phases`.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        settings: AdvisedSettings,
        rollouts_per_step: int,
        samples: bool = True,
        print_every: int,
        print_samples: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float | None = TICK_S,
    ) -> None:
        self._console = console or Output()
        self._clock = clock
        self.phases = Phases(self._console, clock, tick_s=tick_s)
        self._num_steps = num_steps
        self.settings = settings
        self._rollouts_per_step = rollouts_per_step
        self._samples = samples
        self._print_every = print_every
        self._print_samples = print_samples
        self._first: list[Line] = []  # lines of the first WINDOW steps
        self._recent: deque[Line] = deque(maxlen=HISTORY)
        self._evaluations: list[EvaluationPoint] = []
        self._leading = "reward"  # the first number of a step: which of metrics.LEADING
        self._trend: dict[int, float] = {}  # the leading number, by step
        self._steps_s: deque[float] = deque(maxlen=STEPS_OF_ESTIMATE)
        self._step: Phase | None = None  # the current one
        self._num_sampled = 0  # rollouts, in this step
        self._dropped: Mapping[str, float] | None = None
        self._lines_printed = 0
        self._shown_warnings: dict[str, ShownWarning] = {}  # by topic
        self._started_s = clock()
        self._first_step_s: float | None = None
        self._last_step = num_steps
        self._stopped = ""  # why the run stops early

    def phase(self, name: str) -> Phase:
        """Return a phase to show, a context; see rlsys.runs.observe.phases."""
        return self.phases.phase(name)

    def resumed(self, lines: Sequence[Line]) -> None:
        """Continue the trend of earlier steps, which have these lines."""
        if not self._samples:
            self._leading = metrics.leading(lines)
        name = metrics.LEADING[self._leading]
        self._trend = {int(line[metrics.STEP]): line[name] for line in lines if name in line}
        self._first = [*lines[:WINDOW]]
        self._recent.extend(lines[-HISTORY:])

    @contextmanager
    def training(self, *, after_step: int) -> Iterator[None]:
        """Show the progress of each step while the block runs."""
        with self.phases.phase(self._title(after_step + 1), keep=False) as self._step:
            if after_step == self._last_step:
                self._step.end()
            try:
                yield
            finally:
                self._step = None

    def sampled(self, num_rollouts: int) -> None:
        """Count completed rollouts of the current step."""
        self._num_sampled += num_rollouts
        if self._step is not None:
            self._step.update(self._num_sampled, self._rollouts_per_step, "rollouts")

    def step(self, line: Line, samples: Sequence[RolloutRecord] = ()) -> None:
        """Show the line of an optimizer step, warnings, and some of its rollouts."""
        if self._first_step_s is None:
            self._first_step_s = self._clock() - self._started_s
        if len(self._first) < WINDOW:
            self._first.append(line)
        self._recent.append(line)
        step = int(line[metrics.STEP])
        if metrics.TIME_STEP_S in line:
            self._steps_s.append(line[metrics.TIME_STEP_S])
        self._num_sampled = 0
        if self._step is not None and step < self._last_step:
            self._step.begin_again(self._title(step + 1))
        elif self._step is not None:
            self._step.end()
        if not self._samples and not self._trend:
            self._leading = metrics.leading([line])
        if self._lines_printed % HEADER_EVERY == 0:
            self._print(self._header(), style="bold")
        self._lines_printed += 1
        self._print(self._row(line))
        findings = diagnose(
            list(self._recent),
            first=self._first,
            settings=self.settings,
            samples=self._samples,
            evaluations=self._evaluations,
        )
        for finding in findings:
            self._warn(finding, step)
        if step == 1 or step % self._print_every == 0:
            for record in samples[: self._print_samples]:
                self._sample(record)

    def stopping(self, reason: str, *, last_step: int) -> None:
        """Show that the run stops early after `last_step`, and why."""
        self._stopped, self._last_step = reason, last_step
        self._print(f"Stopping after step {last_step} of {self._num_steps}: {reason}")

    def evaluated(self, line: Line) -> None:
        """Show a line of evaluations.jsonl."""
        best = "; best so far" if line[metrics.EVAL_IS_BEST] else ""
        self._print(f"held-out, step {line[metrics.STEP]}: {describe_evaluation(line)}{best}")
        reward = metrics.recent_mean([*self._recent][-WINDOW:], metrics.REWARD_MEAN)
        self._evaluations.append(EvaluationPoint(line=line, reward=reward))
        for finding in overfits(self._evaluations):
            self._warn(finding, int(line[metrics.STEP]))

    def note(self, message: str) -> None:
        """Show something that needs no action."""
        self._print(message)

    def dropped(self, rollouts: Mapping[str, float]) -> None:
        """Set the numbers of dropped rollouts by reason, for the summary."""
        self._dropped = rollouts

    def warn(self, message: str) -> None:
        """Show a warning."""
        self._print(f"warning: {message}", style="yellow")

    @contextmanager
    def showing_log_warnings(self) -> Iterator[None]:
        """Show warnings that rlsys's modules log in the block."""
        logger, handler = logging.getLogger("rlsys"), logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warn(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def close(
        self,
        outcome: Outcome,
        *,
        lines: Sequence[Line],
        evaluations: Sequence[Line] = (),
        predicted: Sequence[tuple[str, str]] = (),
        directory: Path,
        written_next: Sequence[str] = (),
        next_command: str,
    ) -> None:
        """Show the closing summary, and stop showing phases.

        Args:
            outcome: How the run ended.
            lines: All lines of metrics.jsonl, those before a resume included.
            evaluations: All lines of evaluations.jsonl.
            predicted: Labels and texts that compare the planner's prediction with the run.
            directory: The run directory.
            written_next: Names of files that are written into it after the summary.
            next_command: What the user can do next.
        """
        self.phases.stop()
        summary = summarize(lines, self._dropped)
        done = int(lines[-1][metrics.STEP]) if lines else 0
        title = f"{outcome.capitalize()}: {done} of {counted(self._num_steps, 'step')}."
        if self._first_step_s is not None:
            title += f" The first step was finished after {duration(self._first_step_s)}."
        rows = summary_rows(summary) if lines or summary.dropped else []
        if self._stopped:
            rows.insert(0, ("stopped", self._stopped))
        rows += [*predicted, *evaluation_rows(evaluations)]
        rows.append(
            ("files", f"{directory}: {', '.join(_contents(directory, written_next)) or 'none'}")
        )
        rows.append(("next", next_command))
        self._print("")
        self._print(title, style="bold green" if outcome == "finished" else "bold yellow")
        for label, text in rows:
            self._print(f"  {label:<10} {text}")

    @property
    def _columns(self) -> tuple[ConsoleColumn, ...]:
        """Return the columns after the leading number, without those of samplers if none sample."""
        left_out = (self._leading, *(() if self._samples else SAMPLER_COLUMNS))
        return tuple(column for column in COLUMNS if column.title not in left_out)

    def _header(self) -> str:
        cells = "".join(f"  {column.title:>{column.width}}" for column in self._columns)
        first = f"{'step':>{self._step_width}}  {self._leading:>{self._leading_width}}"
        return f"{first} {'trend':<{TREND_CELLS}}{cells}  {'left':>{LEFT_WIDTH}}"

    def _row(self, line: Line) -> str:
        metric = metrics.LEADING[self._leading]
        if metric in line:
            self._trend[int(line[metrics.STEP])] = line[metric]
        ascii_only = self._console.options.ascii_only
        values = list(self._trend.values())
        trend = sparkline(bucket_means(values, TREND_CELLS), ascii_only=ascii_only)
        number = _number(metric, ".3f")(line)
        cells = "".join(f"  {column.cell(line):>{column.width}}" for column in self._columns)
        step = f"{line[metrics.STEP]}/{self._num_steps}"
        first = f"{step:>{self._step_width}}  {number:>{self._leading_width}}"
        left = self._left(int(line[metrics.STEP]))
        return f"{first} {trend:<{TREND_CELLS}}{cells}  {left:>{LEFT_WIDTH}}"

    def _left(self, step: int) -> str:
        """Return the time that the steps after this one will take, by the mean of the last."""
        if not self._steps_s:
            return "-"
        mean_s = sum(self._steps_s) / len(self._steps_s)
        return short_duration(mean_s * (self._last_step - step))

    def _title(self, step: int) -> str:
        return f"Step {step} of {self._num_steps}"

    @property
    def _step_width(self) -> int:
        return max(2 * len(str(self._num_steps)) + 1, 4)

    @property
    def _leading_width(self) -> int:
        return max(len(self._leading), 7)

    def _warn(self, finding: Finding, step: int) -> None:
        """Show a finding once, and again only after it has not been found for GONE_AFTER steps.

        Two findings may contradict each other, such as two bottlenecks of a balanced run. The one
        that was shown first is kept until it has not been found for as long.
        """
        topic = finding.topic or finding.kind
        shown = self._shown_warnings.get(topic)
        if shown is None or step - shown.found_at >= GONE_AFTER:
            self._shown_warnings[topic] = ShownWarning(finding.kind, step)
            self.warn(finding.message)
        elif shown.kind == finding.kind:
            shown.found_at = step

    def _sample(self, record: RolloutRecord) -> None:
        components = ", ".join(f"{name} {value:z.3g}" for name, value in record.rewards.items())
        title = f"sample of step {record.step}"
        if record.reward is not None:
            title += f": reward {record.reward:z.3g}"
        self._print(f"{title} ({components})" if len(record.rewards) > 1 else title, style="cyan")
        if record.turns:
            self._transcript(record)
            return
        self._print(_indented("prompt", record.prompt))
        self._print(_indented("completion", record.completion))

    def _transcript(self, record: RolloutRecord) -> None:
        """Show the turns of an episode, branch by branch. A long one is cut in the middle."""
        turns = [*record.turns]
        left_out = len(turns) - MAX_SAMPLE_TURNS
        half = MAX_SAMPLE_TURNS // 2
        for number, turn in enumerate(turns):
            if left_out > 0 and half <= number < half + left_out:
                if number == half:
                    self._print(f"  [... {counted(left_out, 'turn')} ...]")
                continue
            if number == 0 or turns[number - 1]["branch"] != turn["branch"]:
                names = [f"branch {turn['branch']}"] if turn["branch"] else []
                names += [f"seat {turn['seat']}"] if "seat" in turn else []
                if names:
                    self._print(f"  {', '.join(names)}")
            self._print(_indented(turn["role"], turn["text"]))

    def _print(self, text: str, style: str = "") -> None:
        # Control characters in templates and traces must not reach the terminal. A character that
        # it cannot show becomes "?", so that no completion ends the run.
        encoding = self._console.encoding
        shown = printable(text).encode(encoding, errors="replace").decode(encoding)
        # A Text, not a string: brackets in a completion are not markup.
        self._console.print(Text(shown, style=style), soft_wrap=True, highlight=False)


def bucket_means(values: Sequence[float], num_buckets: int) -> list[float]:
    """Return the means of `num_buckets` equal parts of the values, in order.

    If there are fewer values, each is its own part.
    """
    num = min(num_buckets, len(values))
    bounds = [len(values) * i // num for i in range(num + 1)] if num else [0]
    return [fmean(values[start:end]) for start, end in itertools.pairwise(bounds)]


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Return one character per value, scaled from the lowest to the highest value."""
    levels = "_.-=*#" if ascii_only else "▁▂▃▄▅▆▇█"
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in values)


def short_duration(seconds: float) -> str:
    """Return a time in one piece, for a table: 42s, 12m, 3h05, 2d04."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f}s"
    if minutes < 100:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}"


def _indented(label: str, text: str) -> str:
    """Return a labelled text, cut in the middle if it is long.

    Control characters, such as colours, are escaped, because they could affect the terminal.
    """
    if len(text) > MAX_SAMPLE_CHARACTERS:
        half = MAX_SAMPLE_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
    safe = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return f"  {label:<10} " + safe.replace("\n", "\n" + " " * 13)


def _contents(directory: Path, written_next: Sequence[str]) -> list[str]:
    """Return the entries of the run directory, without dot files and empty folders."""
    if not directory.is_dir():  # it was deleted
        return []
    names = set(written_next)
    for path in directory.iterdir():
        if path.name.startswith(".") or (path.is_dir() and not any(path.iterdir())):
            continue
        names.add(path.name + ("/" if path.is_dir() else ""))
    return sorted(names)

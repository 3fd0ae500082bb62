"""The model of a report page: everything that the page shows, as JSON.

    run directory ── RunReader.read ──► model of a run ── several ──► page_model ──► page.py

Nothing in the directory is changed. Each file may be missing, incomplete, damaged or of an older
version: the page shows the rest, and says what is wrong. A reader can be used again while the run
continues; it reads what was added.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlsys import metrics
from rlsys.common.number_text import counted, verb
from rlsys.common.safe_json import parse_json
from rlsys.config import RunConfig
from rlsys.config.fields import leaf_defaults
from rlsys.errors import InvalidValue
from rlsys.planner.run_record import read_record
from rlsys.report import curve_sampling
from rlsys.report.advisory_titles import ABOUT, SPEED, TITLES, anchor
from rlsys.report.curve_sampling import reward_bands, rounded, sample_curves
from rlsys.report.damaged_lines import LineFile
from rlsys.report.event_rows import event_rows
from rlsys.report.ledger_funnel import LedgerReader
from rlsys.report.page import LARGEST, size_in_page
from rlsys.report.page_budget import DIFFERENCES_BYTES, rows_within, shortened, within_budget
from rlsys.report.reward_forecast import reward_forecast
from rlsys.report.rollout_choice import RolloutIndex
from rlsys.report.run_state import RunState, header_rows, run_state
from rlsys.report.timeline import MAX_SPANS, TraceReader
from rlsys.report.token_texts import token_texts
from rlsys.runs.config_changes import differences
from rlsys.runs.observe.advised_settings import advised_settings
from rlsys.runs.observe.diagnosis import WINDOW, EvaluationPoint, diagnose, overfits, stalled
from rlsys.runs.observe.summary import duration
from rlsys.runs.run_files import FORMER_CONFIG, RunFiles, read_config

MAX_ROLLOUT_BYTES = 2_000_000  # of all runs of a page
MAX_CURVE_BYTES = 1_000_000  # of all runs of a page
VALUE_BYTES = 8  # of a value of a curve, on average
MAX_EVALUATED = 1_000  # metrics of an evaluation
MAX_RUNS = 4

Line = dict[str, float]


class RunReader:
    """Reader of one run directory.

    Raises:
        InvalidValue: The directory holds no run.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        read_config(path / "config.json")
        self.files = files = RunFiles(path)
        self._clock = clock
        self._lines: dict[int, Line] = {}
        self._evaluations: dict[int, Line] = {}
        self._ledger = LedgerReader()
        self._trace = TraceReader()
        self._rollouts = RolloutIndex(files.rollouts)
        self._readers = [
            LineFile(files.metrics, _into(self._lines), self._lines.clear),
            LineFile(files.evaluations, _into(self._evaluations), self._evaluations.clear),
            LineFile(files.ledger, self._ledger.accept, self._ledger.restart),
            LineFile(files.rollouts, self._rollouts.accept, self._rollouts.restart),
            LineFile(files.trace, self._trace.accept, self._trace.restart, in_array=True),
        ]

    def read(self, *, share: float = 1.0) -> dict[str, Any]:
        """Return the model of the run, with a share of the page's budget."""
        for reader in self._readers:
            reader.read()
        files = self.files
        entry = parse_json(files.config.read_bytes())
        config = read_config(files.config)
        lines = [self._lines[step] for step in sorted(self._lines)]
        evaluations = [self._evaluations[step] for step in sorted(self._evaluations)]
        last = lines[-1] if lines else {}
        num_steps = _integer(config.get("num_steps"))
        state = run_state(files, step=int(last.get(metrics.STEP, 0)), num_steps=num_steps)
        groups_per_step = _integer(config.get("prompts_per_step")) or 1
        damages = [damage for reader in self._readers for damage in reader.damages]
        timeline = self._trace.lanes(max_spans=int(MAX_SPANS * share))
        texts = token_texts([files.hf, files.best / "hf", files.best, Path(_model_path(config))])
        groups = self._rollouts.choose(texts, max_bytes=int(MAX_ROLLOUT_BYTES * share))
        changes = _config_changes(files)
        curves = _curves(lines, groups_per_step, share)
        model = {
            "name": files.path.resolve().name,
            "path": str(files.path),
            "state": asdict(state),
            "facts": _facts(lines, evaluations, num_steps),
            "header": header_rows(config, entry),
            "advisories": self._advisories(config, lines, evaluations, state),
            "curves": curves,
            "evaluations": [
                {name: rounded(line[name]) for name in itertools.islice(line, MAX_EVALUATED)}
                for line in evaluations
            ],
            "forecast": reward_forecast(lines),
            "staleness": {"groups": self._ledger.staleness(), "bound": _bound(config)},
            "timeline": timeline,
            "origin_unix_s": self._trace.origin_s,
            "shares": _shares(lines),
            "groups": groups,
            "dropped": [asdict(one) for one in self._ledger.dropped],
            "num_dropped": self._ledger.num_dropped,
            "funnel": self._ledger.funnel(),
            "group_size": _integer(config.get("group_size")) or 1,
            "events": event_rows(self._trace, lines, resumes=self._ledger.resumes, changes=changes),
            "config": _config_rows(config),
            "left_out": self._left_out(lines, curves, groups, timeline),
            "damages": [asdict(one) for one in damages],
            "num_damaged": sum(reader.num_damaged for reader in self._readers),
        }
        return within_budget(model, share)

    def _advisories(
        self,
        config: Mapping[str, Any],
        lines: Sequence[Line],
        evaluations: Sequence[Line],
        state: RunState,
    ) -> list[dict[str, Any]]:
        """Return what the rules of rlsys.runs.observe.diagnosis find at the end of the run."""
        findings = []
        if state.state == "running":
            started_s = self.files.config.stat().st_mtime
            findings += stalled(lines, started_s=started_s, now_s=self._clock())
        points = _points(lines, evaluations)
        findings += diagnose(
            lines,
            settings=advised_settings(config, _cluster(self.files)),
            samples=any(metrics.KL_SAMPLER_TRAINER in line for line in lines[-WINDOW:]),
            evaluations=points,
        )
        findings += overfits(points)
        return [
            {
                "kind": one.kind,
                "title": TITLES[one.kind],
                "cause": f"{one.cause[0].upper()}{one.cause[1:]}.",
                "fix": one.fix,
                "link": anchor(one.kind),
                "about": ABOUT[one.kind],
                "level": "speed" if one.kind in SPEED else "learning",
            }
            for one in findings
        ]

    def _left_out(
        self,
        lines: Sequence[Line],
        curves: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        timeline: Mapping[str, Any],
    ) -> list[str]:
        """Return sentences about data that the page does not contain."""
        notes = []
        if num_lanes := timeline["left_out"]:
            lanes = f"{counted(num_lanes, 'lane')} of the timeline"
            notes.append(f"{lanes} {verb(num_lanes)} in trace.json only.")
        if len(curves["steps"]) < len(lines):
            notes.append(
                f"Curves show {len(curves['steps']):,} points of {len(lines):,} steps: the lowest "
                "and the highest value of each interval."
            )
        if left := curves["left_out"]:
            notes.append(f"{counted(left, 'metric')} {verb(left)} in metrics.jsonl only.")
        if len(groups) < self._rollouts.num_groups:
            notes.append(
                f"{len(groups):,} of {self._rollouts.num_groups:,} recorded groups are shown, "
                "spread evenly over the run. rollouts.jsonl has all of them."
            )
        if timeline["resolution"]:
            notes.append(
                f"The timeline merges spans that are closer than {timeline['resolution']:.2g} s "
                f"({timeline['num_spans']:,} spans in trace.json)."
            )
        return notes


def page_model(readers: Sequence[RunReader], *, now_s: float, live: bool) -> dict[str, Any]:
    """Return the model of a page about one run, or about up to MAX_RUNS runs side by side."""
    runs = [reader.read(share=1 / len(readers)) for reader in readers]
    differences = _compared(readers) if len(readers) > 1 else []
    shown = rows_within(shortened(differences), DIFFERENCES_BYTES, "first")
    return {
        "version": 1,
        "written_unix_s": now_s,
        "live": live,
        "runs": runs,
        "differences": shown,
        "num_differences": len(differences),
    }


def check_runs(paths: Sequence[Path]) -> None:
    """Check the number of runs.

    Raises:
        InvalidValue: There is none, or there are more than MAX_RUNS, or one is repeated.
    """
    if not 1 <= len(paths) <= MAX_RUNS:
        raise InvalidValue(
            "runs",
            [str(path) for path in paths],
            rule=f"a page shows 1 to {MAX_RUNS} runs",
            fix="Name these directories, such as runs/quickstart.",
        )
    if len({path.resolve() for path in paths}) < len(paths):
        raise InvalidValue(
            "runs",
            [str(path) for path in paths],
            rule="a run is named twice",
            fix="Name each run once.",
        )


def _into(lines: dict[int, Line]) -> Callable[[Any, int], None]:
    """Return a function that adds the numbers of a line by its step."""

    def accept(value: Any, offset: int) -> None:
        step = value[metrics.STEP]
        if type(step) is not int or not 0 <= step < LARGEST:
            raise ValueError(f"step is {step!r}")
        lines[step] = {
            name: number
            for name, number in value.items()
            if isinstance(number, int | float) and -LARGEST < number < LARGEST
        }

    return accept


def _curves(lines: Sequence[Line], groups_per_step: int, share: float) -> dict[str, Any]:
    """Return the curves of all metrics that fit into the budget, and the band of the reward."""
    bands = reward_bands(lines, groups_per_step)
    with_bands = [{**line, **band} for line, band in zip(lines, bands, strict=True)]
    sampled = sample_curves(with_bands, max_points=int(curve_sampling.MAX_POINTS * max(share, 0.5)))
    names = sorted(sampled["series"], key=lambda name: (_priority(name), len(name), name))
    sizes = (size_in_page(name) + VALUE_BYTES * len(sampled["steps"]) for name in names)
    most = sum(total <= MAX_CURVE_BYTES * share for total in itertools.accumulate(sizes))
    sampled["left_out"] = len(names) - most
    sampled["series"] = {name: sampled["series"][name] for name in names[:most]}
    return sampled


def _priority(name: str) -> int:
    """Return the rank of a metric: those of the page's own charts come first."""
    if name.startswith(("page/", "reward/", "kl/", "ratio/", "staleness/")):
        return 0
    return 2 if name.startswith(metrics.TIMING_FAMILIES) and name.count("/") > 1 else 1


def _cluster(files: RunFiles) -> str:
    """Return the devices of a run, or "" if they are unknown."""
    try:
        return read_record(files.plan).cluster
    except ValueError:
        return ""


def _points(lines: Sequence[Line], evaluations: Sequence[Line]) -> list[EvaluationPoint]:
    """Return the evaluations with the reward of the steps before each."""
    points = []
    for line in evaluations:
        before = [one for one in lines if one[metrics.STEP] <= max(line[metrics.STEP], 1)]
        reward = metrics.recent_mean(before[-WINDOW:], metrics.REWARD_MEAN)
        points.append(EvaluationPoint(line=line, reward=reward))
    return points


def _facts(
    lines: Sequence[Line], evaluations: Sequence[Line], num_steps: int | None
) -> list[dict[str, str]]:
    """Return the numbers at the top of the page."""
    last = lines[-1] if lines else {}
    recent = lines[-10:]
    spent_s = sum(line.get(metrics.TIME_STEP_S, 0.0) for line in lines)
    idle_s = sum(line.get(metrics.TIME_TRAINER_IDLE_S, 0.0) for line in lines)
    leading = metrics.leading(lines)
    number = metrics.recent_mean(recent, metrics.LEADING[leading])
    tokens = metrics.recent_mean(recent, metrics.THROUGHPUT_TRAINED_TOKENS)
    step = f"{int(last.get(metrics.STEP, 0)):,}" + (f" / {num_steps:,}" if num_steps else "")
    facts = [("step", step, "")]
    if number is not None:
        facts.append((leading, f"{number:.3g}", "mean of the last 10 steps"))
    if evaluations:
        scores = {n: v for n, v in evaluations[-1].items() if metrics.is_mean_at(n)}
        for name, value in scores.items():
            at = f"step {evaluations[-1][metrics.STEP]:.0f}"
            facts.append(("held-out", f"{value:.3g}", f"{name.removeprefix('eval/')}, {at}"))
    facts.append(("time", duration(spent_s), "in optimizer steps"))
    if tokens is not None:
        facts.append(("tokens/s", f"{tokens:,.0f}", "trained, last 10 steps"))
    if spent_s:
        facts.append(("trainer idle", f"{idle_s / spent_s:.0%}", "of the time"))
    highest = [line[metrics.STALENESS_MAX] for line in lines if metrics.STALENESS_MAX in line]
    if highest:
        facts.append(("staleness", f"{max(highest):.0f}", "highest"))
    return [{"label": label, "value": value, "note": note} for label, value, note in facts]


def _shares(lines: Sequence[Line]) -> dict[str, list[dict[str, Any]]]:
    """Return the seconds of work and of waiting by actor, and of waiting by stage and reason."""
    totals: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("time/"):
                totals[name] = totals.get(name, 0.0) + value
    actors, stages = [], []
    for name, seconds in sorted(totals.items()):
        work, wait = metrics.actor_work_s(""), metrics.actor_wait_s("")
        if name.startswith(work):
            actor = name.removeprefix(work)
            waited = totals.get(metrics.actor_wait_s(actor), 0.0)
            actors.append({"name": actor, "work": rounded(seconds), "wait": rounded(waited)})
        elif name.startswith(wait) and "/" in name.removeprefix(wait):
            stage, _, reason = name.removeprefix(wait).partition("/")
            stages.append({"name": f"{stage} waits for {reason}", "wait": rounded(seconds)})
    names = (
        (metrics.TIME_STEP_S, "optimizer steps"),
        (metrics.TIME_TRAIN_S, "training"),
        (metrics.TIME_TRAINER_IDLE_S, "trainer waits for rollouts"),
        (metrics.TIME_WEIGHT_SYNC_S, "weight updates"),
        (metrics.TIME_GENERATION_PAUSE_S, "pauses of generation for weight updates"),
    )
    sums = [{"name": text, "wait": rounded(totals[name])} for name, text in names if name in totals]
    return {"actors": actors, "stages": stages, "totals": sums}


def _bound(config: Mapping[str, Any]) -> int | None:
    """Return the staleness bound in optimizer steps, as the ledger counts."""
    bound = _integer(_value(config, "asynchrony.max_staleness"))
    minibatches = _integer(_value(config, "trainer.num_minibatches")) or 1
    updates = minibatches * (_integer(_value(config, "trainer.num_epochs")) or 1)
    return None if bound is None else (bound + 1) // updates - 1


def _config_rows(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields with value and default, those that differ first."""
    nested: dict[str, Any] = {}
    for name, value in leaf_defaults(RunConfig).items():
        at = nested
        *sections, field = name.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        at[field] = value
    changed = differences(nested, config)
    everything = differences({}, config)
    rows = [
        {"field": name, "value": now, "default": before, "changed": True}
        for name, (before, now) in changed.items()
        if now != "unset"
    ]
    rows += [
        {"field": name, "value": now, "default": now, "changed": False}
        for name, (_, now) in everything.items()
        if name not in changed
    ]
    return rows


def _config_changes(files: RunFiles) -> list[list[dict[str, str]]]:
    """Return what each resume has changed in the configuration."""
    former = [
        (int(m[1]), p) for p in files.path.iterdir() if (m := FORMER_CONFIG.fullmatch(p.name))
    ]
    configs = []
    for path in [*(path for _, path in sorted(former)), files.config]:
        try:
            configs.append(read_config(path))
        except InvalidValue:
            configs.append({})
    return [
        [
            {"field": name, "before": old, "now": new}
            for name, (old, new) in differences(before, now).items()
            if name != "resume"
        ]
        for before, now in itertools.pairwise(configs)
    ]


def _compared(readers: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Return the fields in which the runs differ, with the value of each run."""
    configs = [differences({}, read_config(reader.files.config)) for reader in readers]
    rows = []
    for field in sorted({name for config in configs for name in config}):
        values = [config[field][1] if field in config else "unset" for config in configs]
        if len(set(values)) > 1 and field not in ("name", "runs_dir", "resume"):
            rows.append({"field": field, "values": values})
    return rows


def _value(config: Mapping[str, Any], name: str) -> Any:
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _model_path(config: Mapping[str, Any]) -> str:
    path = _value(config, "model.path")
    return path if isinstance(path, str) and path else "/nonexistent"

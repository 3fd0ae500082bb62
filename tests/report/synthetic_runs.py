"""Run directories with chosen contents, written in milliseconds.

`write_run(path)` writes a healthy run. Keyword arguments and `shape` make it sick, long, crashed or
hostile. The same seed gives the same files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.config import RunConfig
from rlsys.config.fields import to_dict
from rlsys.runs.run_outcome import write_outcome

START_S = 1_795_700_000.0
RUN_ID = "0123456789abcdef"
GROUPS_PER_STEP = 4
GROUP_SIZE = 4

Line = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """Contents of the rollouts."""

    prompt: Callable[[int], str] = lambda group: f"{group}+1="
    completion: Callable[[int, int], str] = lambda group, index: str(group + 1)
    turns: Sequence[Mapping[str, Any]] = ()
    num_tokens: int = 3


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """A run to write."""

    num_steps: int = 60
    planned_steps: int | None = None  # None: as many
    seed: int = 0
    step_s: float = 2.0
    max_staleness: int = 1
    replicas: int = 1
    outcome: str | None = "finished"
    reason: str = ""
    shape: Callable[[int, Line], Mapping[str, float]] = lambda step, line: {}
    evaluations: Callable[[int], float] | None = None  # mean reward by step
    episode: Episode = field(default_factory=Episode)
    changes: Mapping[str, Any] = field(default_factory=dict)  # top-level fields of the config
    trace_spans: int = 3  # per step


def write_run(path: Path, run: SyntheticRun | None = None) -> Path:
    """Write the files of a run, and return its directory."""
    run = run or SyntheticRun()
    path.mkdir(parents=True)
    _write_config(path / "config.json", run)
    rng = random.Random(run.seed)
    lines = [_line(step, run, rng) for step in range(1, run.num_steps + 1)]
    _write_lines(path / "metrics.jsonl", lines)
    _write_lines(path / "ledger.jsonl", _ledger(run))
    with (path / "rollouts.jsonl").open("w") as file:
        for step in range(1, run.num_steps + 1):
            for record in _records(step, run):
                file.write(dump_json(record) + "\n")
    if run.evaluations is not None:
        steps = range(0, run.num_steps + 1, max(1, run.num_steps // 6))
        _write_lines(
            path / "evaluations.jsonl", [_evaluation(step, run.evaluations(step)) for step in steps]
        )
    _write_trace(path / "trace.json", run)
    if run.outcome is not None:
        write_outcome(path / "outcome.json", run.outcome, reason=run.reason)  # type: ignore[arg-type]
    return path


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(dump_json(line) + "\n" for line in lines))


def _write_config(path: Path, run: SyntheticRun) -> None:
    config = to_dict(RunConfig())
    config |= {
        "name": path.parent.name,
        "num_steps": run.planned_steps or run.num_steps,
        "prompts_per_step": GROUPS_PER_STEP,
        "group_size": GROUP_SIZE,
        **run.changes,
    }
    config["asynchrony"] = {**config["asynchrony"], "max_staleness": run.max_staleness}
    entry = {"config": config, "run_id": RUN_ID, "versions": {"rlsys": "0.1.0"}}
    path.write_text(dump_json({**entry, "git_revision": "a" * 40}, indent=2))


def _line(step: int, run: SyntheticRun, rng: random.Random) -> Line:
    """Return a healthy line, changed by the run's shape."""
    progress = 1 - math.exp(-step / 40)
    num = step * GROUPS_PER_STEP * GROUP_SIZE
    line: Line = {
        "step": step,
        "policy_version": step,
        "reward/mean": 0.2 + 0.6 * progress + rng.gauss(0, 0.02),
        "reward/std": 0.4,
        "groups/zero_advantage_frac": 0.3 + rng.uniform(-0.05, 0.05),
        "completion/tokens_mean": 40 + rng.gauss(0, 2),
        "completion/truncated_frac": 0.02,
        "loss": rng.gauss(0, 0.01),
        "grad_norm": math.exp(rng.gauss(-1, 0.2)),
        "learning_rate": 1e-5,
        "staleness/mean": 0.6,
        "staleness/max": 1.0,
        "entropy": 1.2 * math.exp(-step / 400) + rng.gauss(0, 0.02),
        "kl/sampler_trainer": rng.gauss(0, 1e-3),
        "kl/sampler_trainer_k3": 1e-4,
        "ratio/clipped_frac": 0.02,
        "rollouts/issued": num + GROUP_SIZE,
        "rollouts/trained": num,
        "rollouts/dropped": GROUP_SIZE,
        "rollouts/dropped/stale": GROUP_SIZE,
        "rewards/failed": 0,
        "time/step_s": run.step_s * rng.uniform(0.95, 1.05),
        "time/train_s": run.step_s * 0.7,
        "time/trainer_idle_s": run.step_s * 0.25,
        "time/weight_sync_s": 0.05,
        "time/generation_pause_s": 0.01,
        "time/wait_s/generate/gate": 0.3,
        "time/work_s/trainer-0": run.step_s * 0.75,
        "time/wait_s/trainer-0": run.step_s * 0.25,
        "time/unix_s": START_S + step * run.step_s,
        "throughput/trained_tokens_per_s": 320.0,
        "queue/train": 0,
    }
    for number in range(run.replicas):
        line |= {
            f"time/work_s/rollout-{number}": run.step_s * 0.6,
            f"time/wait_s/rollout-{number}": run.step_s * 0.4,
            f"engine/running/rollout-{number}": 12.0,
            f"engine/waiting/rollout-{number}": 1.0,
        }
    return {**line, **run.shape(step, line)}


def _ledger(run: SyntheticRun) -> list[dict[str, Any]]:
    """Return events: each step trains its groups, and one group is dropped in all."""
    events: list[dict[str, Any]] = []
    group = 0
    for step in range(1, run.num_steps + 1):
        version = max(0, step - 1 - run.max_staleness)
        groups = list(range(group, group + GROUPS_PER_STEP))
        group += GROUPS_PER_STEP
        events += [
            {"event": "issued", "group": one, "prompt": one, "version": version} for one in groups
        ]
        events.append(
            {
                "event": "trained",
                "step": step,
                "groups": groups,
                "oldest_versions": [version] * len(groups),
            }
        )
    events.append({"event": "issued", "group": group, "prompt": group, "version": run.num_steps})
    events.append({"event": "dropped", "group": group, "reason": "stale"})
    return events


def _records(step: int, run: SyntheticRun) -> list[dict[str, Any]]:
    group = (step - 1) * GROUPS_PER_STEP
    episode = run.episode
    return [
        {
            "step": step,
            "group_id": group,
            "index": index,
            "prompt": episode.prompt(group),
            "completion": episode.completion(group, index),
            "token_ids": list(range(episode.num_tokens)),
            "policy_versions": [max(0, step - 2)] * episode.num_tokens,
            "logprob_gaps": [round(0.01 * (i - 1), 5) for i in range(episode.num_tokens)],
            "staleness": min(1, step - 1),
            "reward": float(index % 2),
            "rewards": {"right": float(index % 2)},
            "advantage": float(index % 2) - 0.5,
            "finish_reason": "stop",
            "columns": {},
            "row": {"answer": str(group + 1)},
            "turns": [*episode.turns],
            "run_id": RUN_ID,
        }
        for index in range(GROUP_SIZE)
    ]


def _evaluation(step: int, score: float) -> Line:
    name = "eval/mean@4"
    ends = {f"{name}/low": score - 0.04, f"{name}/high": score + 0.04}
    return {"step": step, name: score, **ends, "eval/prompts": 64, "eval/is_best": 0}


def _write_trace(path: Path, run: SyntheticRun) -> None:
    def named(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}

    events = [
        named("origin", 0, 0, unix_ns=int(START_S * 1e9)),
        named("process_name", 1, 0, name="controller"),
        named("process_name", 2, 0, name="trainer-0"),
        named("thread_name", 1, 1, name="train"),
        named("thread_name", 2, 2, name="trainer"),
        named("thread_name", 1, 3, name="controller"),
    ]
    for step in range(run.num_steps):
        start = step * run.step_s * 1e6
        length = run.step_s * 1e6 / (run.trace_spans + 1)
        for part in range(run.trace_spans):
            events.append(
                {
                    "ph": "X",
                    "name": ("accumulate", "optimizer_step", "publish")[part % 3],
                    "ts": start + part * length,
                    "pid": 2,
                    "tid": 2,
                    "dur": 0.9 * length,
                }
            )
    text = ",\n".join(dump_json(event, separators=(",", ":")) for event in events)
    path.write_text(f"[\n{text}\n]\n")

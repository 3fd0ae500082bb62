"""Evaluation beside training: what is evaluated, when, and which model was the best.

    every so many steps: the model, exported ─┬► model_evaluation.py ─┬► Scoreboard
                                              └► held_out_loss.py ────┘      │
                                          evaluations.jsonl, best/ ◄─────────┘

Evaluated are the files that a user would load, so that scripts/evaluate.py finds the same rewards.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlsys import metrics
from rlsys.checkpoint import swapped_in
from rlsys.config import FrozenModelConfig, RunConfig
from rlsys.data.rows import LOADERS
from rlsys.dataflow.graph import Dataflow
from rlsys.dataflow.stages import RewardFn, ScoreStage
from rlsys.json_text import parse_json
from rlsys.launching import HeldOut
from rlsys.model_evaluation import EvaluationConfig
from rlsys.observe.step_log import StepLog, read_lines
from rlsys.run_directory import RunFiles

# In best/, beside the model.
EVALUATION_FILE = "evaluation.json"

EXPORT_NAME = re.compile(r"step_(\d{6,})")


def rewards_of(flow: Dataflow, held_out: HeldOut) -> list[RewardFn]:
    """What a sampled completion is scored with; may be none."""
    scored = flow.all(ScoreStage)
    rewards: list[RewardFn] = [*(scored[0].rewards if scored and held_out.rewards is None else [])]
    return rewards + list(held_out.rewards or [])


def evaluation_config(run: RunConfig, model: Path | str) -> EvaluationConfig:
    """Of one model of the run: its files, and else what the run says."""
    own = run.evaluation
    return EvaluationConfig(
        num_samples=own.num_samples,
        k=own.k,
        greedy=own.greedy,
        num_prompts=own.num_prompts,
        seed=run.seed,
        model=FrozenModelConfig(path=str(model), dtype=run.model.dtype),
        data=replace(
            run.data,
            source=own.source or run.data.source,
            subset=None if Path(own.source).suffix in LOADERS else run.data.subset,
            split=own.split,
            shuffle=False,
        ),
        sampling=run.sampling,
        rollout=replace(
            run.rollout,
            num_cpus=own.num_cpus or run.rollout.num_cpus,
            num_gpus=own.num_gpus,
            tensor_parallel=1,
        ),
        reward=run.reward,
    )


def is_due(run: RunConfig, step: int) -> bool:
    """After so many optimizer steps."""
    every = run.evaluation.every
    return every > 0 and (step % every == 0 or step == run.num_steps)


class Scoreboard:
    """What the evaluations of a run came to: evaluations.jsonl, a line each, and the best model.

    The best is that of the highest mean reward, or where nothing is sampled of the lowest loss; of
    equal ones the earliest. Lines of steps beyond
    `after_step` are removed, as those steps are trained again; best/ stays: it is what it says.
    """

    def __init__(self, files: RunFiles, *, after_step: int) -> None:
        self._files = files
        self._log = StepLog(files.evaluations, after_step=after_step)
        self._steps = {int(line[metrics.STEP]) for line in read_lines(files.evaluations)}

    def has(self, step: int) -> bool:
        return step in self._steps

    def go_back(self, step: int) -> None:
        """Training went back to `step`."""
        self._log.go_back(step)
        self._steps = {one for one in self._steps if one <= step}

    def add(self, step: int, found: Mapping[str, float], exported: Path) -> dict[str, float]:
        """Record what was found; `exported` is kept as best/ or removed. Returns the line."""
        line = {metrics.STEP: step, **found}
        best = best_of(self._files)
        line[metrics.EVAL_IS_BEST] = int(best is None or goodness(line) > goodness(best))
        if line[metrics.EVAL_IS_BEST]:
            (exported / EVALUATION_FILE).write_text(json.dumps(line, indent=1) + "\n")
            swapped_in(exported, self._files.best)
        else:
            shutil.rmtree(exported, ignore_errors=True)
        if step not in self._steps:
            self._log.append(line)
            self._steps.add(step)
        return line

    def close(self) -> None:
        self._log.close()


def best_of(files: RunFiles) -> dict[str, float] | None:
    """What the evaluation of best/ came to; None where there is none."""
    try:
        best: dict[str, float] = parse_json((files.best / EVALUATION_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return best


def goodness(line: Mapping[str, float]) -> float:
    """Of an evaluation: its mean reward, where it has one."""
    for name, value in line.items():
        if metrics.is_mean_at(name):
            return value
    return -line[metrics.EVAL_LOSS]


def pending_exports(directory: Path) -> dict[int, Path]:
    """Models that wait to be evaluated, by their step."""
    if not directory.is_dir():
        return {}
    found = {path: EXPORT_NAME.fullmatch(path.name) for path in sorted(directory.iterdir())}
    return {int(match[1]): path for path, match in found.items() if match}


def export_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


def read_evaluations(path: Path) -> list[dict[str, float]]:
    """The lines of an evaluations.jsonl; none where there is no such file."""
    return list(read_lines(path)) if path.exists() else []

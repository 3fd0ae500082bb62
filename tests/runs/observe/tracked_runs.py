"""Files of a small run, written step by step as a run writes them, for the tests of trackers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.runs.observe.metrics_file import MetricsWriter
from rlsys.runs.observe.records import RolloutRecord, RolloutWriter
from rlsys.runs.observe.step_log import StepLog

SAMPLES_EVERY = 2
HOSTILE = "1 | 2\n<script>alert(1)</script> 中 \N{PILE OF POO}"
# Names and values that are hard for one tracker or the other.
VALUES = {
    "reward/mean": 0.123456789,
    "rollouts/dropped/replica died": 3,
    "odd@name (x)": -1e-30,
    "tokens": 2**40,
}


class TrackedFiles:
    """Writers of a run, which continue after `first_step`."""

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        config = {"name": "demo", "observe": {"print_every": SAMPLES_EVERY}, "data": {"k": [1, 2]}}
        (directory / "config.json").write_text(dump_json({"config": config, "run_id": "x"}))
        self._metrics = MetricsWriter(directory / "metrics.jsonl", after_step=first_step)
        self._rollouts = RolloutWriter(directory / "rollouts.jsonl", after_step=first_step)
        self._evaluations = StepLog(directory / "evaluations.jsonl", after_step=first_step)

    def write(self, step: int, *, salt: float = 0.0) -> None:
        """Write a step with two rollouts."""
        self._metrics.write(
            {
                "step": step,
                "policy_version": step,
                **VALUES,
                "loss": step + salt,
                "time/unix_s": time.time(),
            }
        )
        self._rollouts.write(_record(step, index) for index in range(2))

    def evaluate(self, step: int) -> None:
        """Write the evaluation of a step."""
        line = {"step": step, "eval/pass@1": step / 10, "eval/is_best": 1}
        self._evaluations.append(line)

    def train(self, steps: range, announce: Callable[[int], None], *, salt: float = 0.0) -> None:
        """Write steps and announce each."""
        for step in steps:
            self.write(step, salt=salt)
            announce(step)

    def go_back(self, step: int) -> None:
        """Remove later lines."""
        for log in (self._metrics, self._rollouts, self._evaluations):
            log.go_back(step)

    def close(self) -> None:
        """Close the files."""
        for log in (self._metrics, self._rollouts, self._evaluations):
            log.close()


def _record(step: int, index: int) -> RolloutRecord:
    fields: dict[str, Any] = {
        "prompt": HOSTILE,
        "completion": f"{step}.{index}",
        "token_ids": [1],
        "policy_versions": [step],
        "staleness": 0,
        "reward": index / 2,
        "rewards": {},
        "advantage": None,
        "finish_reason": "stop",
    }
    return RolloutRecord(step=step, group_id=step, index=index, **fields)

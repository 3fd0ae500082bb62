"""MLflow, against the server at MLFLOW_TRACKING_URI. This is the only module that imports mlflow.

The package mlflow-skinny suffices. MLflow accepts letters, digits, spaces and _-./: in names, so
"eval/pass@4" becomes "eval/pass_at_4" and any other character an underscore. It cannot remove what
was logged. Samples are artifacts, in the format of mlflow.log_table.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.metrics import EVAL_STEP, STEP, TIME_UNIX_S
from rlsys.runs.observe.trackers.tracker_protocol import (
    COLUMNS,
    PROJECT,
    SAMPLES,
    Evaluation,
    Event,
    Opened,
    Position,
    Samples,
    StepMetrics,
    TrackedRun,
    flat_config,
    table,
)

# The library's own retries take minutes. The supervisor repeats a failed event anyway.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
MAX_VALUE = 500  # characters of a parameter
BATCH = 100  # parameters of a request
MAX_BATCH_METRICS = 1000
TABLES_TAG = "mlflow.loggedArtifacts"  # the tables that the page of a run offers
MAX_TABLES = 50  # in that tag, the newest ones


class MlflowTracker:
    """A run of the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        """Create or continue the run on the server."""
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self._run_id = run_id or self._create(run)
        found = self._client.get_run(self._run_id)
        self._client.update_run(self._run_id, status="RUNNING")
        known = found.data.metrics
        position = replace(
            recorded,
            metrics=int(known.get(STEP, 0)),
            evaluation=int(known.get(EVAL_STEP, -1)),
        )
        uri = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
        page = f"{uri}/#/experiments/{found.info.experiment_id}/runs/{self._run_id}"
        address = page if uri.startswith("http") else f"{uri}, run {self._run_id}"
        return Opened(run_id=self._run_id, address=address, position=position)

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        run_id = str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)
        params = [
            Param(accepted_name(name), str(value)[:MAX_VALUE])
            for name, value in flat_config(run.config).items()
        ]
        for start in range(0, len(params), BATCH):
            self._client.log_batch(run_id, params=params[start : start + BATCH])
        return run_id

    def rewind(self, step: int) -> bool:
        """Return False."""
        return False

    def log(self, event: Event) -> None:
        """Send an event to the server and wait for its answer."""
        match event:
            case StepMetrics(values=values):
                self._log(event.step, values, values.get(TIME_UNIX_S, time.time()))
            case Evaluation(values=values):
                self._log(event.step, {**values, EVAL_STEP: event.step}, time.time())
            case Samples():
                self._log_table(event)

    def _log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """Log a line, STEP or EVAL_STEP last, by which `open` recognises what is complete."""
        from mlflow.entities import Metric

        names = sorted(values, key=lambda name: name in (STEP, EVAL_STEP))
        metrics = [
            Metric(accepted_name(name), float(values[name]), int(time_s * 1000), step)
            for name in names
        ]
        for start in range(0, len(metrics), MAX_BATCH_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_BATCH_METRICS])

    def _log_table(self, samples: Samples) -> None:
        path = f"{SAMPLES}/step-{samples.step:08}.json"
        self._client.log_dict(
            self._run_id, {"columns": list(COLUMNS), "data": table(samples)}, path
        )
        tags = self._client.get_run(self._run_id).data.tags
        known = parse_json(tags.get(TABLES_TAG, "[]"))
        tables = [one for one in known if one["path"] != path]
        tables = [*tables, {"path": path, "type": "table"}][-MAX_TABLES:]
        self._client.set_tag(self._run_id, TABLES_TAG, dump_json(tables))

    def finish(self, *, failed: bool) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def accepted_name(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"), flags=re.ASCII)

"""Writers of the files that a run appends to while it trains.

ledger.jsonl, metrics.jsonl and rollouts.jsonl continue where the resumed history ended. A
checkpoint records a tally (length and checksum) of each of them and of external.jsonl
(rlsys/data/swarm/external_prompts.py), so that a resume can verify them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rlsys.common.append_only_file import Tally
from rlsys.common.async_condition import AsyncCondition
from rlsys.config import RunConfig
from rlsys.dataflow.scheduling.ledger import Ledger, LedgerFile
from rlsys.runs.evaluation_log import EvaluationLog
from rlsys.runs.observe.console import RunConsole
from rlsys.runs.observe.metrics_file import MetricsWriter
from rlsys.runs.observe.recorder import Recorder
from rlsys.runs.observe.records import RolloutWriter
from rlsys.runs.observe.trace import Tracer
from rlsys.runs.observe.trackers.run_trackers import RunTrackers
from rlsys.runs.resume import History
from rlsys.runs.run_directory import RunDirectory

from ..cluster.gauges import Gauges


@dataclass(frozen=True, kw_only=True)
class RunWriters:
    """Ledger, recorder and evaluation log of a run."""

    ledger: Ledger
    recorder: Recorder
    tallies: Callable[[], Mapping[str, Tally]]
    """Returns the tally of each file, by file name."""
    evaluation_log: EvaluationLog | None
    """None if the run neither evaluates nor has evaluations."""


@contextlib.contextmanager
def open_writers(
    config: RunConfig,
    directory: RunDirectory,
    history: History | None,
    console: RunConsole,
    *,
    tracer: Tracer,
    queue_depths: Callable[[], Mapping[str, int]],
    stepped: AsyncCondition,
    on_step: Callable[[Mapping[str, float]], None],
) -> Iterator[RunWriters]:
    """Open the writers of a run until the block ends.

    `stepped` is notified after each optimizer step, and `on_step` gets its metrics. If the block
    raises, the recorder marks the run as failed.
    """
    first_step = history.checkpoint.step if history else 0
    kept: Mapping[str, Tally] = history.state.records if history else {}
    ledger_file = LedgerFile(directory.ledger)
    ledger = Ledger.replay(
        history.events if history else (), ledger_file, groups_per_step=config.prompts_per_step
    )
    if history:
        ledger.resume(step=first_step)
    metrics = MetricsWriter(
        directory.metrics, after_step=first_step, kept=kept.get(directory.metrics.name)
    )
    rollouts = RolloutWriter(
        directory.rollouts,
        run_id=directory.run_id,
        after_step=first_step,
        kept=kept.get(directory.rollouts.name),
    )
    evaluation_log = None
    if config.evaluation.every or directory.evaluations.exists():
        evaluation_log = EvaluationLog(directory, after_step=first_step)
    gauges = Gauges(config.name, "controller")
    recorder = Recorder(
        metrics_writer=metrics,
        rollout_writer=rollouts,
        publish=gauges.set_all,
        trackers=RunTrackers(config.trackers, directory.path, first_step=first_step),
        console=console,
        ledger=ledger,
        group_size=config.group_size,
        groups_per_step=config.prompts_per_step,
        queue_depths=queue_depths,
        tracer=tracer,
        stepped=stepped,
        on_step=on_step,
    )

    def tallies() -> Mapping[str, Tally]:
        return {
            directory.ledger.name: ledger_file.tally,
            directory.metrics.name: metrics.tally,
            directory.rollouts.name: rollouts.tally,
        }

    failed = True
    try:
        yield RunWriters(
            ledger=ledger, recorder=recorder, tallies=tallies, evaluation_log=evaluation_log
        )
        failed = False
    finally:
        gauges.close()
        recorder.close(failed=failed)
        ledger_file.close()
        if evaluation_log is not None:
            evaluation_log.close()

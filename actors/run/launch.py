"""Check a recipe and its configuration, run the job, and end every process.

    launch(config, flow) ─► check ─► run directory ─► Ray ─► actors ─► warm start ─► Controller.run
                                                                       checkpoint, export ◄─┘

Every process that was started here is ended after the last step, an error or Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from rlsys.common.manifest import OnBytes, ignore_bytes
from rlsys.common.number_text import counted, span, verb
from rlsys.common.option_names import on_command_line, option
from rlsys.common.run_sync import run_to_end
from rlsys.common.user_functions import FunctionFailed
from rlsys.config import RunConfig
from rlsys.config.fields import leaf_defaults, to_dict
from rlsys.config.toml_document import comment, stdout_to_stderr
from rlsys.controller.controller import StallError
from rlsys.controller.failures import RewardsFailed
from rlsys.controller.worker_protocols import PoolDied, ReplicaDied, RowsLost, TrainerDied
from rlsys.data.row_source import RowSource
from rlsys.data.swarm.external_log import check_issued
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import GenerateStage
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.engines.models.model_shape import ModelShape
from rlsys.errors import RunFailed, require
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.launcher.built_in_shape import preflight_of_shape, unread_reason, write_config
from rlsys.launcher.launching import RunResult, WarmStart
from rlsys.launcher.memory_estimate import RECORDS_BYTES, disk_bytes
from rlsys.launcher.preflight import (
    at_model,
    hub_of,
    models_written_since,
    preflight,
    with_model,
)
from rlsys.launcher.tiny_models import OwnModel
from rlsys.metrics import STEP
from rlsys.runs.callbacks import NO_CALLBACKS, Callbacks
from rlsys.runs.checkpoint import Checkpoints, first_few
from rlsys.runs.evaluation_log import find_damage, find_missing, read_evaluations
from rlsys.runs.export_seal import early_end, export_faults, exported_step, is_exported
from rlsys.runs.observe.advised_settings import advised_settings
from rlsys.runs.observe.configuration_advice import configuration_warnings
from rlsys.runs.observe.console import RunConsole
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.observe.phases import progress_on_stderr
from rlsys.runs.observe.step_log import read_lines
from rlsys.runs.resume import History, read_history
from rlsys.runs.run_directory import RunDirectory, check_open, check_room
from rlsys.runs.run_files import RunFiles
from rlsys.runs.run_outcome import Outcome

from ..cluster.calls import WorkerError
from ..cluster.cluster_checks import SUBMITTED, check_limits, check_runs_dir
from ..cluster.signals import cancel_on_signals, cancel_without_main_thread, signals_raise
from .capacity import check_run, cluster_of_dry_run, machines_to_check, require_fit
from .final_model import push_model
from .job import Job
from .plan_record import prediction_rows
from .run_end import record_end

# Failures of the environment, which are reported in one message. A ValueError is a user's mistake
# and is raised unchanged; any other exception is a bug and keeps its traceback.
FAILURES = (
    OSError,
    FloatingPointError,
    FunctionFailed,
    WorkerError,
    RowsLost,
    ReplicaDied,
    TrainerDied,
    PoolDied,
    EngineError,
    StallError,
    RewardsFailed,
)


def launch(
    config: RunConfig,
    flow: Dataflow,
    *,
    own_model: OwnModel | None = None,
    warm_start: WarmStart | None = None,
    held_out: HeldOut | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
    dry_run: bool | str = False,
) -> RunResult:
    """Run a job, or print its plan. `rlsys.launch` calls this for one run at a time."""
    require(
        sys.flags.optimize < 2,
        "PYTHONOPTIMIZE",
        sys.flags.optimize,
        rule="python -OO strips docstrings, which transformers reads",
        fix="Unset it or use 1.",
    )
    require(
        warm_start is None or flow.main.head == "logits",
        "warm_start",
        rule=f"it trains next-token prediction, but {flow.main.name!r} has the head "
        f"{flow.main.head!r}",
        fix="Launch without a warm start.",
    )
    held_out = held_out or HeldOut()
    if dry_run:
        work = functools.partial(_dry_run, config, flow, own_model, warm_start, held_out, dry_run)
    else:
        work = functools.partial(_run, config, flow, own_model, warm_start, held_out, callbacks)
    try:
        return run_to_end(work)
    except BrokenPipeError:  # the reader of stdout is gone, which is no failure of the run
        raise
    except FAILURES as error:
        raise RunFailed(str(error)) from error
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _dry_run(
    config: RunConfig,
    flow: Dataflow,
    own_model: OwnModel | None,
    warm_start: WarmStart | None,
    held_out: HeldOut,
    dry_run: str | bool,
) -> RunResult:
    """Print the plan of the run.

    `dry_run` is True or the machine that --dry-run names.

    Raises:
        InvalidValue: The run does not fit. The plan was printed before.
    """
    from .dry_run import describe

    machines = machines_to_check(config, flow, dry_run)
    check_runs_dir(config.runs_dir)
    files = RunFiles(Path(config.runs_dir) / config.name)
    missing_notes: list[str] = []
    with (
        signals_raise(),
        hub_of(config, flow),
        tempfile.TemporaryDirectory(prefix="rlsys-") as directory,
        stdout_to_stderr(),
        progress_on_stderr("Reading model and prompts") as phase,
    ):
        # A run on this machine needs the model, a plan for other machines only its shape.
        unread = unread_reason(config.model.path) if isinstance(dry_run, str) else ""
        if unread:
            ready = at_model(config, write_config(config.model.path, Path(directory)))
            warm_starts = warm_start is not None
            read = preflight_of_shape(ready, flow, unread, warm_starts=warm_starts)
        else:
            ready = with_model(
                config, own_model, lambda own: own.build(Path(directory, "model"), seed=config.seed)
            )
            read = preflight(
                ready,
                flow,
                held_out=held_out,
                warm_start=warm_start,
                lacking=missing_notes,
                show=phase.inner,
            )
        warnings = [
            *configuration_warnings(ready),
            *missing_notes,
            *read.warnings,
            *_name_warnings(config),
        ]
        continues = config.resume is not False and files.has_checkpoint
        if continues and not unread and not files.has_finished(config.num_steps, config.stop_when):
            _history(files, config, read.graph, read.prompts)
        capacity = None
        if machines is not None:
            # The disk of a named machine is unknown, and new checkpoints of a resumed run replace
            # old ones.
            required_bytes = None
            if not isinstance(dry_run, str) and not continues:
                required_bytes = disk_bytes(
                    ready, read.graph, read.shape, warm_start=warm_start is not None
                )
            capacity = check_run(ready, read.graph, read.shape, machines, disk_bytes=required_bytes)
        text = await asyncio.to_thread(  # a simulation has a loop of its own
            describe,
            ready,
            read.graph,
            read.shape,
            read.prompts,
            read.tokenizer,
            warnings,
            as_written=config,
            held_out=read.held_out.note,
            capacity=capacity,
            cluster=cluster_of_dry_run(config, dry_run, machines),
        )
    for warning in warnings:  # not only in a file that the user may not read
        print(comment(f"warning: {warning}"), file=sys.stderr)
    print(text, flush=True)
    if capacity is not None:
        capacity.require_fit()
    return RunResult(outcome="dry run", files=files, metrics=())


def _name_warnings(config: RunConfig) -> list[str]:
    """Return why a start under this name would be rejected.

    A dry run only warns about it, unless it resumes: its output may be used under another name.
    """
    defaults = leaf_defaults(type(config))
    try:
        check_open(
            config.runs_dir,
            config.name,
            to_dict(config),
            resume=config.resume,
            defaults=defaults,
        )
    except ValueError as error:
        if config.resume is not False:
            raise
        return [str(error)]
    return []


async def _run(
    config: RunConfig,
    flow: Dataflow,
    own_model: OwnModel | None,
    warm_start: WarmStart | None,
    held_out: HeldOut,
    callbacks: Callbacks,
) -> RunResult:
    cancel_on_signals()
    task = asyncio.current_task()
    assert task is not None
    watching = asyncio.create_task(cancel_without_main_thread(task))
    check_runs_dir(config.runs_dir)
    check_limits(config.cluster)
    console = RunConsole(
        num_steps=config.num_steps,
        settings=advised_settings(to_dict(config)),
        rollouts_per_step=config.rollouts_per_step,
        samples=bool(flow.all(GenerateStage)),
        print_every=config.observe.print_every,
        print_samples=config.observe.print_samples,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(watching.cancel)
        stack.enter_context(console.showing_log_warnings())
        with signals_raise():
            directory, job = _prepare(
                stack,
                console,
                config,
                flow,
                own_model,
                held_out,
                callbacks,
                warm_start=warm_start,
            )
        if job is None:
            return _result(directory)
        close = functools.partial(_close, console, directory, flow)
        outcome: Outcome = "failed"
        reason = ""
        try:
            await asyncio.sleep(0)  # lets a cancellation from another thread take effect
            await job.run(warm_start, close)
            await push_model(config, directory, console)
            outcome = "finished"
        except (asyncio.CancelledError, KeyboardInterrupt, BrokenPipeError):
            outcome = "interrupted"
            raise
        except Exception as error:
            reason = str(error)
            raise
        finally:
            close(outcome, reason)
        return _result(directory)


def _close(
    console: RunConsole, directory: RunDirectory, flow: Dataflow, outcome: Outcome, reason: str = ""
) -> None:
    """Record how the run ended, write its report page, and print the closing summary.

    The summary of a run that is ended early comes first, because the process may be killed soon. It
    lists the two files, and a warning follows if one cannot be written.
    """
    is_finished = outcome == "finished"
    warnings = record_end(directory, outcome) if is_finished else []
    lines = _readable(directory.metrics)
    console.close(
        outcome,
        lines=lines,
        predicted=prediction_rows(directory, lines),
        evaluations=_readable(directory.evaluations),
        directory=directory.path,
        written_next=() if is_finished else (directory.outcome.name, directory.report.name),
        next_command=next_command(directory, outcome),
    )
    if not is_finished:
        warnings = record_end(directory, outcome, reason=reason)
    for warning in warnings:
        console.warn(warning)


def _readable(path: Path) -> list[dict[str, float]]:
    """Return the lines before the first damaged one.

    A resume reports damage. An error here would hide the error that ended the run.
    """
    lines: list[dict[str, float]] = []
    with contextlib.suppress(ValueError, OSError):
        lines.extend(read_lines(path))
    return lines


def _prepare(
    stack: contextlib.ExitStack,
    console: RunConsole,
    config: RunConfig,
    flow: Dataflow,
    own_model: OwnModel | None,
    held_out: HeldOut,
    callbacks: Callbacks,
    *,
    warm_start: WarmStart | None,
) -> tuple[RunDirectory, Job | None]:
    """Open the run's directory until the end of `stack` and return it with the job.

    The job is None if the run has finished already.
    """
    with console.phase("Reading model and prompts") as phase:
        stack.enter_context(hub_of(config, flow))
        check_room(Path(config.runs_dir), RECORDS_BYTES)
        ready = with_model(
            config, own_model, lambda own: own.ensure(config.runs_dir, seed=config.seed)
        )

        def check_machine(graph: RunGraph, shape: ModelShape) -> None:
            machines = machines_to_check(config, graph, False)
            if machines is not None:
                require_fit(ready, graph, shape, machines)

        read = preflight(
            ready,
            flow,
            held_out=held_out,
            warm_start=warm_start,
            check_machine=check_machine,
            show=phase.inner,
        )
    directory = stack.enter_context(
        RunDirectory.open(
            config.runs_dir,
            config.name,
            to_dict(config),
            resume=config.resume,
            defaults=leaf_defaults(type(config)),
            required_bytes=disk_bytes(
                ready, read.graph, read.shape, warm_start=warm_start is not None
            ),
        )
    )
    console.note(f"Run directory: {directory.path}")
    continues = config.resume is not False
    is_finished = False
    if continues and is_exported(directory.hf, config.num_steps, config.stop_when):
        with console.phase("Reading the exported model") as phase:
            is_finished = directory.has_finished(
                config.num_steps, config.stop_when, on_bytes=phase.update_bytes
            )
    if is_finished:
        end, last_step = early_end(directory.hf), exported_step(directory.hf) or config.num_steps
        if end is None:
            console.note(f"{directory.path} already has {_all_steps(config.num_steps)}.")
        else:
            console.note(
                f"{directory.path} has stopped early after step {last_step}: {end.reason}. Change "
                "stop_when or num_steps to continue."
            )
        newest = Checkpoints(directory.checkpoints, config.keep_checkpoints).newest()
        if newest is None or newest.step < last_step:
            resumable = f"continue from step {newest.step}" if newest else "have to start again"
            console.warn(
                f"{directory.checkpoints} has no checkpoint of step {last_step}: a run with "
                f"more steps would {resumable}"
            )
        for fault in find_damage(directory) or find_missing(directory):
            console.warn(str(fault))
        return directory, None
    history = None
    if continues and directory.has_checkpoint:
        with console.phase("Reading the run's history") as phase:
            history = _history(directory, config, read.graph, read.prompts, phase.update_bytes)
        directory.write_config(to_dict(config))
        console.note(resume_note(history, config, directory))
        trained = _readable(directory.metrics)
        console.resumed([x for x in trained if x[STEP] <= history.checkpoint.step])
        for warning in models_written_since(history.checkpoint, read.graph):
            console.warn(warning)
    if read.held_out.note:
        console.note(f"Held-out data: {read.held_out.note}")
    for warning in [*configuration_warnings(config), *read.warnings]:
        console.warn(warning)
    return directory, Job(
        ready,
        read.graph,
        held_out,
        directory,
        history,
        read.prompts,
        read.tokenizer,
        console,
        callbacks,
    )


def _history(
    files: RunFiles,
    config: RunConfig,
    flow: RunGraph,
    prompts: RowSource,
    on_bytes: OnBytes = ignore_bytes,
) -> History:
    """Return the history of a run that resumes.

    Raises:
        ValueError: The run cannot be resumed.
    """
    history = read_history(
        files,
        groups_per_step=config.prompts_per_step,
        num_steps=config.num_steps,
        on_bytes=on_bytes,
    )
    prompts.check_order(history.state.prompts)
    if (shared := flow.source.prompts.shared) is not None:
        issued = [event["prompt"] for event in history.events if event["event"] == "issued"]
        check_issued(files.external, shared, config.prompts_per_step, issued)
    return history


def resume_note(history: History, config: RunConfig, directory: RunDirectory) -> str:
    """Return a sentence about where a resumed run continues."""
    step, last = history.checkpoint.step, history.last_step
    if step == config.num_steps:
        all_steps = _all_steps(step)
        trained = f"{all_steps[0].upper()}{all_steps[1:]} {verb(step)} trained."
        if not directory.hf.exists():
            return f"{trained} Exporting the model to {directory.hf}."
        faults = export_faults(directory.hf, run_id=directory.run_id)
        return (
            f"{trained} Exporting the model to {directory.hf} again "
            f"({first_few(faults or ['it is of an earlier step'])})."
        )
    again = ""
    if last > step:
        steps = f"{verb(last - step, 'Step', 'Steps')} {span(step + 1, last)}"
        again = f" {steps} {verb(last - step)} trained again."
    return f"Resuming from {history.checkpoint.path}.{again}"


def _all_steps(number: int) -> str:
    return f"{verb(number, 'its', 'all')} {counted(number, 'step')}"


def _result(directory: RunDirectory) -> RunResult:
    return RunResult(
        outcome="finished",
        files=RunFiles(directory.path),
        stopped=end.reason if (end := early_end(directory.hf)) else "",
        metrics=tuple(read_metrics(directory.metrics)),
        evaluations=tuple(read_evaluations(directory.evaluations)),
    )


def next_command(directory: RunDirectory, outcome: str) -> str:
    """Return the command that the closing summary proposes."""
    if outcome == "finished":
        return report_command(directory.path)
    again = "the same command" if on_command_line() else "launch again"
    if outcome == "failed":
        again = f"once the cause is fixed, {again}"
    if directory.has_checkpoint:
        return f"{again} with {option('resume', True)}"
    if not directory.has_steps:
        return again
    return (
        f"{again} with {option('resume', 'auto')}, which starts from step 0 (no checkpoint was "
        f"written), or with another {option('name')}"
    )


def report_command(directory: Path) -> str:
    """Return the shell command that writes the run's page.

    A submitted job has another working directory and another Python than the user's shell.
    """
    if SUBMITTED in os.environ:
        return shlex.join(["rlsys", "report", str(directory.absolute())])
    python = this_python()
    start = ["rlsys"] if python == "python" else [python, "-m", "rlsys"]
    return shlex.join([*start, "report", str(directory)])


def this_python() -> str:
    """Return how a shell in this directory calls the running interpreter, if possible `python`."""
    found, own = shutil.which("python"), sys.executable
    # Compare the directories too: each environment links to the same file.
    if not own or (
        found and os.path.samefile(found, own) and Path(found).parent.samefile(Path(own).parent)
    ):
        return "python"
    return min(own, _from_here(own), key=len)


def _from_here(path: str | Path) -> str:
    try:
        return os.path.relpath(path)
    except FileNotFoundError:  # the working directory is gone
        return str(path)

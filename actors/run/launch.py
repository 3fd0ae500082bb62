"""From a recipe and its configuration to a placed, running job; and everything ended at its end.

    launch(config, flow) ─► check ─► run directory ─► Ray ─► actors ─► warm start ─► Controller.run
                                                                       checkpoint, export ◄─┘

Whatever happens (a last step, an error, Ctrl-C), every process that was started here is ended.
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

from rlsys.common.option_names import on_command_line, option
from rlsys.common.run_sync import run_to_end
from rlsys.common.user_functions import FunctionFailed
from rlsys.config import RunConfig, require
from rlsys.config.fields import leaf_defaults, to_dict
from rlsys.controller import RewardsFailed, StallError
from rlsys.controller.worker_protocols import PoolDied, ReplicaDied, RowsLost, TrainerDied
from rlsys.data.prompts import load_policy_tokenizer
from rlsys.data.row_source import RowSource
from rlsys.data.swarm.external_log import check_issued
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import GenerateStage
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.engines.models.model_shape import model_shape
from rlsys.errors import RunFailed
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.launch.launching import RunResult, WarmStart
from rlsys.launch.memory_estimate import RECORDS_BYTES, disk_bytes
from rlsys.launch.preflight import (
    check_held_out,
    check_warm_start,
    hub_of,
    load_prompts,
    models_written_since,
    with_model,
)
from rlsys.launch.tiny_models import OwnModel
from rlsys.metrics import STEP
from rlsys.runs.checkpoint import Checkpoints, first_few
from rlsys.runs.evaluation_log import find_damage, find_missing, read_evaluations
from rlsys.runs.export_seal import export_faults, exported_step
from rlsys.runs.observe.console import Outcome, RunConsole
from rlsys.runs.observe.diagnosis import configuration_warnings
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.observe.phases import progress_on_stderr
from rlsys.runs.observe.step_log import read_lines
from rlsys.runs.resume import History, read_history
from rlsys.runs.run_directory import RunDirectory, RunFiles, check_open, check_room

from ..cluster.calls import WorkerError
from ..cluster.cluster_checks import SUBMITTED, check_limits, check_runs_dir
from ..cluster.signals import cancel_on_signals, cancel_without_main_thread, signals_raise
from .capacity import check_run, require_fit, stated_machine
from .job import Job
from .run_inputs import Inputs, check_exports, tried_rewards

# What goes wrong in the world: told in one message. A ValueError is a user's mistake, and told so
# too; anything else is a bug and keeps its trace.
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

# In a checkout; a wheel does without.
PLOT = Path(__file__).resolve().parents[2] / "scripts" / "plot_run.py"


def launch(
    config: RunConfig,
    flow: Dataflow,
    *,
    own_model: OwnModel | None = None,
    warm_start: WarmStart | None = None,
    held_out: HeldOut | None = None,
    dry_run: bool | str = False,
) -> RunResult:
    """See rlsys.launch, which calls it for one run at a time."""
    require(
        sys.flags.optimize < 2,
        "PYTHONOPTIMIZE=2 (python -OO) strips docstrings, which transformers reads; unset it, or "
        "use 1.",
    )
    require(
        warm_start is None or flow.main.head == "logits",
        f"a warm start teaches a model its next tokens, which {flow.main.name!r} (head "
        f"{flow.main.head!r}) does not give; launch it without one.",
    )
    held_out = held_out or HeldOut()
    if dry_run:
        work = functools.partial(_dry_run, config, flow, own_model, warm_start, held_out, dry_run)
    else:
        work = functools.partial(_run, config, flow, own_model, warm_start, held_out)
    try:
        return run_to_end(work)
    except BrokenPipeError:  # nobody reads what it prints: no failure of the run
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
    stated: str | bool,
) -> RunResult:
    """Print what the run would be. `stated`: the machine to compare with, as --dry-run names it.

    Raises ValueError after that where the run does not fit.
    """
    from .dry_run import describe

    machine = stated_machine(config, flow, stated)
    check_runs_dir(config.runs_dir)
    files = RunFiles(Path(config.runs_dir) / config.name)
    lacking: list[str] = []
    with (
        signals_raise(),
        hub_of(config, flow),
        tempfile.TemporaryDirectory(prefix="rlsys-") as directory,
        progress_on_stderr("Reading model and prompts"),
    ):
        ready = with_model(
            config, own_model, lambda own: own.build(Path(directory, "model"), seed=config.seed)
        )
        read = _read(ready, flow, held_out, warm_start, lacking)
        warnings = [*lacking, *read.warnings, *_taken(config)]
        continues = config.resume is not False and files.has_checkpoint
        if continues and not files.has_finished(config.num_steps):
            _history(files, config, flow, read.prompts)
        capacity = None
        if machine is not None:
            # The disk of a named machine is not known; new checkpoints of a run that continues take
            # the places of the old ones.
            room = None
            if not isinstance(stated, str) and not continues:
                room = disk_bytes(ready, flow, read.shape, warm_start=warm_start is not None)
            capacity = check_run(ready, flow, read.shape, [machine], disk_bytes=room)
        text = describe(
            ready,
            flow,
            read.shape,
            read.prompts,
            read.tokenizer,
            warnings,
            as_given=config,
            capacity=capacity,
        )
    print(text, flush=True)
    if capacity is not None:  # whose processes may take turns on fewer cores elsewhere
        require(not capacity.refusals, f"the run {capacity.verdict}")
    return RunResult(outcome="dry run", files=files, metrics=())


def _taken(config: RunConfig) -> list[str]:
    """Why a start under this name would be refused: for a dry run no mistake yet, where it does not
    resume, as what it prints may be started under another name.
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
) -> RunResult:
    cancel_on_signals()
    task = asyncio.current_task()
    assert task is not None
    watching = asyncio.create_task(cancel_without_main_thread(task))
    check_runs_dir(config.runs_dir)
    check_limits(config.cluster)
    console = RunConsole(
        num_steps=config.num_steps,
        max_staleness=config.asynchrony.max_staleness,
        rollouts_per_step=config.rollouts_per_step,
        samples=bool(flow.all(GenerateStage)),
        shares_devices=config.placement == "colocated",
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
                warm_start=warm_start,
            )
        if job is None:
            return _result(directory)
        close = functools.partial(_close, console, directory, flow)
        outcome: Outcome = "failed"
        try:
            await asyncio.sleep(0)  # another thread may have asked for the end meanwhile
            await job.run(warm_start, close)
            outcome = "finished"
        except (asyncio.CancelledError, KeyboardInterrupt, BrokenPipeError):
            outcome = "interrupted"
            raise
        finally:
            close(outcome)
        return _result(directory)


def _close(console: RunConsole, directory: RunDirectory, flow: Dataflow, outcome: Outcome) -> None:
    """Tell what the run came to."""
    console.close(
        outcome,
        lines=_readable(directory.metrics),
        evaluations=_readable(directory.evaluations),
        directory=directory.path,
        next_command=next_command(directory, outcome, flow),
    )


def _readable(path: Path) -> list[dict[str, float]]:
    """The lines before the first damaged one. Whether a damage matters, a resume says: an error
    here would stand in place of the one that the run ended with.
    """
    lines: list[dict[str, float]] = []
    with contextlib.suppress(ValueError, OSError):
        lines.extend(read_lines(path))
    return lines


def _read(
    config: RunConfig,
    flow: Dataflow,
    held_out: HeldOut,
    warm_start: WarmStart | None,
    lacking: list[str] | None = None,
) -> Inputs:
    """Read and check what the run begins with, and try its rewards. Raises ValueError for mistakes;
    see `load_prompts` for `lacking`.
    """
    shape = model_shape(config.model.path, flow.main.head)
    tokenizer = load_policy_tokenizer(config.model.path, config.data.template_options)
    # The list where there is one: then its model may be yet to come.
    prompts = load_prompts(config, flow, tokenizer, shape, *([] if lacking is None else [lacking]))
    check_held_out(config, flow, held_out, tokenizer, shape)
    check_warm_start(warm_start, tokenizer)
    warnings = check_exports(config, flow, shape, tokenizer)
    warnings += run_to_end(lambda: tried_rewards(config, flow, held_out, prompts, tokenizer))
    return Inputs(shape=shape, tokenizer=tokenizer, prompts=prompts, warnings=tuple(warnings))


def _prepare(
    stack: contextlib.ExitStack,
    console: RunConsole,
    config: RunConfig,
    flow: Dataflow,
    own_model: OwnModel | None,
    held_out: HeldOut,
    *,
    warm_start: WarmStart | None,
) -> tuple[RunDirectory, Job | None]:
    """The run's directory, open until the end of `stack`, and what is to be done there; None where
    all is done already.
    """
    with console.phase("Reading model and prompts"):
        stack.enter_context(hub_of(config, flow))
        check_room(Path(config.runs_dir), RECORDS_BYTES)
        ready = with_model(
            config, own_model, lambda own: own.ensure(config.runs_dir, seed=config.seed)
        )
        read = _read(ready, flow, held_out, warm_start)
    if (machine := stated_machine(config, flow, False)) is not None:
        with console.phase("Comparing the run with this machine"):
            require_fit(ready, flow, read.shape, [machine])
    directory = stack.enter_context(
        RunDirectory.open(
            config.runs_dir,
            config.name,
            to_dict(config),
            resume=config.resume,
            defaults=leaf_defaults(type(config)),
            required_bytes=disk_bytes(ready, flow, read.shape, warm_start=warm_start is not None),
        )
    )
    console.note(f"Run directory: {directory.path}")
    continues = config.resume is not False
    is_finished = False
    if continues and exported_step(directory.hf) == config.num_steps:
        with console.phase("Reading the exported model"):
            is_finished = directory.has_finished(config.num_steps)
    if is_finished:
        console.note(f"{directory.path} has all of its {config.num_steps} steps already.")
        newest = Checkpoints(directory.checkpoints, config.keep_checkpoints).newest()
        if newest is None or newest.step < config.num_steps:
            console.warn(
                f"{directory.checkpoints} lacks step {config.num_steps}: with more steps the "
                f"run would go on from {f'step {newest.step}' if newest else 'nowhere'}"
            )
        for fault in find_damage(directory) or find_missing(directory):
            console.warn(str(fault))
        return directory, None
    history = None
    if continues and directory.has_checkpoint:
        with console.phase("Reading the run's history"):
            history = _history(directory, config, flow, read.prompts)
        directory.write_config(to_dict(config))
        console.note(where_it_goes_on(history, config, directory))
        trained = _readable(directory.metrics)
        console.resumed([x for x in trained if x[STEP] <= history.checkpoint.step])
        for warning in models_written_since(history.checkpoint, flow):
            console.warn(warning)
    for warning in [*configuration_warnings(config), *read.warnings]:
        console.warn(warning)
    return directory, Job(
        ready, flow, held_out, directory, history, read.prompts, read.tokenizer, console
    )


def _history(files: RunFiles, config: RunConfig, flow: Dataflow, prompts: RowSource) -> History:
    """Of a run that goes on. Raises ValueError where it cannot."""
    history = read_history(
        files, groups_per_step=config.prompts_per_step, num_steps=config.num_steps
    )
    prompts.check_order(history.state.prompts)
    if (shared := flow.source.prompts.shared) is not None:
        issued = [event["prompt"] for event in history.events if event["event"] == "issued"]
        check_issued(files.external, shared, config.prompts_per_step, issued)
    return history


def where_it_goes_on(history: History, config: RunConfig, directory: RunDirectory) -> str:
    step, last = history.checkpoint.step, history.last_step
    if step == config.num_steps:
        if not directory.hf.exists():  # it ended before
            return f"All {step} steps are trained; their model is exported to {directory.hf}."
        faults = export_faults(directory.hf, run_id=directory.run_id)
        return (
            f"All {step} steps are trained; their model is exported to {directory.hf} again "
            f"({first_few(faults or ['it is of an earlier step'])})."
        )
    again = f"; what was trained behind it, up to step {last}, is trained again"
    return f"Going on from {history.checkpoint.path}{again if last > step else ''}."


def _result(directory: RunDirectory) -> RunResult:
    return RunResult(
        outcome="finished",
        files=RunFiles(directory.path),
        metrics=tuple(read_metrics(directory.metrics)),
        evaluations=tuple(read_evaluations(directory.evaluations)),
    )


def next_command(directory: RunDirectory, outcome: str, flow: Dataflow) -> str:
    if outcome == "finished" and PLOT.is_file():
        return plot_command(directory.path)
    if outcome == "finished":
        kind = "CausalLM" if flow.main.head == "logits" else "SequenceClassification"
        return f"AutoModelFor{kind}.from_pretrained({str(directory.hf)!r})"
    again = "the same command" if on_command_line() else "launch again"
    if outcome == "failed":
        again = f"once the cause is mended, {again}"
    if directory.has_checkpoint:
        return f"{again} with {option('resume', True)}"
    if not directory.has_steps:
        return again
    return (
        f"{again} with {option('resume', 'auto')}, which begins again (no checkpoint was written), "
        f"or with another {option('name')}"
    )


def plot_command(directory: Path) -> str:
    """Return the shell command that draws the run. In a submitted job PLOT is in Ray's temporary
    copy of the user's checkout, so the command names the script as the checkout does.
    """
    if SUBMITTED in os.environ:
        return shlex.join(["python", f"scripts/{PLOT.name}", str(directory.absolute())])
    return shlex.join([this_python(), _from_here(PLOT), str(directory)])


def this_python() -> str:
    """How a shell in this directory calls the interpreter that runs: `python`, where that is it."""
    found, own = shutil.which("python"), sys.executable
    # In one directory too: each environment has a link to the same file.
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

"""Start of a run from a script, a notebook or a thread, and its result.

    launch(config, flow) ─► RunResult; ValueError for a mistake, RunFailed for a failure

The run is carried out by the package of Ray actors, which is imported on first use: `actors` in a
checkout, `rlsys_actors` in a wheel. Importing rlsys does not import Ray.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from rlsys.common.broken_pipe import close_stdout
from rlsys.common.user_functions import printable
from rlsys.config import RunConfig
from rlsys.config.checks import check_at_least
from rlsys.config.fields import checked
from rlsys.config.machine import is_machine
from rlsys.config.plan_session import (
    PlanFound,
    check_served,
    current_session,
    is_plan_requested,
    plan_session,
    requested_dry_run,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import GenerateStage
from rlsys.errors import RunFailed, require
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.launcher.tiny_models import OwnModel
from rlsys.runs.callbacks import Callbacks, CheckpointRecord, EvaluationRecord, StepRecord
from rlsys.runs.run_files import RunFiles

# Held by a run: Ray, the imported libraries and the settings of the hub belong to the process.
_RUNNING = threading.Lock()

# Exit codes of a recipe besides 0 and 2 (wrong option).
FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps before reinforcement learning starts.

    Attributes:
        num_steps: Number of optimizer steps.
        batches: One list of (prompt, completion) pairs per step.
        learning_rate: Peak learning rate, reached linearly over the first tenth of the steps.
    """

    num_steps: int
    batches: Iterator[list[tuple[str, str]]]
    learning_rate: float
    # Batches that were read, for a restart of the warm start after a rank's death.
    _batches_read: list[list[tuple[str, str]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        checked(self.num_steps, int, "WarmStart.num_steps")
        checked(self.learning_rate, float, "WarmStart.learning_rate")
        require(
            isinstance(self.batches, Iterator),
            "WarmStart.batches",
            self.batches,
            rule="must be an iterator",
            fix="Give a generator, or iter([...]) of a list of batches.",
        )
        check_at_least("WarmStart.num_steps", self.num_steps, 0, fix="Use 0 for none.")
        require(
            0 < self.learning_rate <= 1,
            "WarmStart.learning_rate",
            self.learning_rate,
            rule="must be above 0 and at most 1",
            fix="Use a rate such as 1e-3.",
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.learning_rate * min(1.0, step / max(1, self.num_steps // 10))

    def batch(self, step: int) -> list[tuple[str, str]]:
        """Return the examples of a step, counted from 1. Repeated calls return the same list.

        Raises:
            InvalidValue: `batches` has no valid examples for the step.
        """
        while len(self._batches_read) < step:
            self._batches_read.append(self._next(len(self._batches_read) + 1))
        return self._batches_read[step - 1]

    def _next(self, step: int) -> list[tuple[str, str]]:
        examples = next(self.batches, None)
        require(
            examples is not None,
            "WarmStart.batches",
            rule=f"ended before step {step} of {self.num_steps}",
            fix="Give as many batches as steps, or use fewer steps.",
        )
        require(
            bool(examples),
            "WarmStart.batches",
            rule=f"has no example for step {step}",
            fix="Give at least one example per batch.",
        )
        assert examples is not None
        for example in examples:
            require(
                isinstance(example, list | tuple)
                and len(example) == 2
                and all(isinstance(text, str) for text in example),
                "WarmStart.batches",
                example,
                rule=f"an example of step {step} is not a pair of texts",
                fix="Give lists such as [(prompt, completion), ...].",
            )
        return examples


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """The result of a run.

    Attributes:
        outcome: "finished" or "dry run".
        files: Paths of the run's files, such as files.rollouts, files.ledger, files.checkpoints.
        metrics: Metrics of each optimizer step, including those before the run was resumed. The
            names are those of metrics.jsonl, such as "reward/mean".
        evaluations: Metrics of each evaluation, as in evaluations.jsonl: "step", "eval/pass@1".
        stopped: Why the run stopped before its last step, or "" if it did not.
    """

    outcome: Literal["finished", "dry run"]
    files: RunFiles
    metrics: tuple[Mapping[str, float], ...]
    evaluations: tuple[Mapping[str, float], ...] = ()
    stopped: str = ""

    def __repr__(self) -> str:
        """Return one line, which notebooks show."""
        steps = f"{len(self.metrics)} steps"
        return f"RunResult({self.outcome}, {steps}, {str(self.directory)!r})"

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self.files.path

    @property
    def model(self) -> Path:
        """Directory of the trained model, for AutoModelForCausalLM.from_pretrained."""
        return self.files.hf

    @property
    def best_model(self) -> Path:
        """Directory of the model with the highest mean reward in the evaluations, if any."""
        return self.files.best


class StartRun(Protocol):
    """The function `run.launch.launch` of the Ray package, which `launch` calls."""

    def __call__(
        self,
        config: RunConfig,
        flow: Dataflow,
        *,
        own_model: OwnModel | None,
        warm_start: WarmStart | None,
        held_out: HeldOut | None,
        callbacks: Callbacks,
        dry_run: bool | str,
    ) -> RunResult:
        """Run a job, or print its plan."""


def launch(
    config: RunConfig,
    flow: Dataflow,
    *,
    own_model: OwnModel | None = None,
    warm_start: WarmStart | None = None,
    held_out: HeldOut | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
    on_evaluation: Callable[[EvaluationRecord], object] | None = None,
    on_checkpoint: Callable[[CheckpointRecord], object] | None = None,
    dry_run: bool | str | None = None,
) -> RunResult:
    """Run until the last optimizer step and return the result.

    The function works in any thread and in notebooks, for one run at a time. All processes of the
    run have ended when it returns or raises.

    In one case this process ends, even a notebook's kernel: a run that started its own Ray waits
    for a call that Ray never answers, because Ray's processes died or all received a signal. The
    summary is printed first. The exit code is 130 after a signal, else 1.

    Args:
        config: The configuration.
        flow: The algorithm's graph.
        own_model: Model to build and train if config.model.path is empty.
        warm_start: Supervised steps before reinforcement learning.
        held_out: Evaluation during training, in addition to config.evaluation.
        on_step: Called after each optimizer step with its metrics, in a thread of this process. It
            may return rlsys.STOP to end the run early. Steps do not wait for it (docs/training.md).
        on_evaluation: Called likewise after each evaluation.
        on_checkpoint: Called likewise after each checkpoint.
        dry_run: Print the configuration, the graph, the placement, the memory estimate and one
            prompt, without starting or writing anything. A text such as "8xH100", "2x8xH100" or
            "4x24GiB" names the machines to check the memory against, instead of this one. None, the
            default, is the --dry-run that rlsys.parse has read, if it was given.

    Returns:
        The result of the finished run or of the dry run.

    Raises:
        ValueError: A mistake in the configuration, the model, the data or the rewards, found before
            Ray starts if possible; or the run does not fit on its machines.
        RunFailed: The run could not continue.
        KeyboardInterrupt: Ctrl-C or SIGTERM, in the main thread; in another thread, the main thread
            has ended.
    """
    _check_kind("config", config, RunConfig, "a RunConfig, such as rlsys.parse(...).config")
    _check_kind("flow", flow, Dataflow, "the Dataflow that the recipe's function returns")
    if own_model is not None:
        _check_kind("own_model", own_model, OwnModel, "rlsys.OwnModel(name=...), or leave it out")
    if warm_start is not None:
        fix = "rlsys.WarmStart(num_steps=..., batches=..., learning_rate=...), or leave it out"
        _check_kind("warm_start", warm_start, WarmStart, fix)
    if held_out is not None:
        fix = "rlsys.HeldOut(rows=..., rewards=...), or leave it out"
        _check_kind("held_out", held_out, HeldOut, fix)
    if dry_run is not None and not (isinstance(dry_run, str) and is_machine(dry_run)):
        _check_kind("dry_run", dry_run, bool, 'True, False, or a machine such as "8xH100"')
    callbacks = Callbacks(on_step=on_step, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint)
    dry_run = requested_dry_run(dry_run)
    if (result := _planned(config, flow, own_model)) is not None:
        return result
    with _alone(config.name):
        start_run: StartRun = actors_module("run.launch").launch
        return start_run(
            config,
            flow,
            own_model=own_model,
            warm_start=warm_start,
            held_out=held_out,
            callbacks=callbacks,
            dry_run=dry_run,
        )


def _planned(config: RunConfig, flow: Dataflow, own_model: OwnModel | None) -> RunResult | None:
    """Plan the run if `rlsys plan` or --plan asks for that.

    Return None if no plan is requested. Return a result for a run that does not generate and has no
    plan.

    Raises:
        InvalidValue: --plan was given outside of `rlsys.main`.
        PlanFound: The run was planned.
    """
    from rlsys.planner import planning

    check_served()
    session = current_session()
    is_requested = is_plan_requested()
    if not (is_requested or (session is not None and session.must_plan)):
        return None
    if not isinstance(flow.source, GenerateStage):
        files = RunFiles(Path(config.runs_dir) / config.name)
        return RunResult(outcome="dry run", files=files, metrics=()) if is_requested else None
    from rlsys.launcher import auto_plan

    if is_requested:
        with auto_plan.planned_model(config, own_model) as ready:
            planning.answer_request(ready, flow)
    else:
        assert session is not None
        auto_plan.plan_session_run(config, flow, own_model, session, find_nodes=live_nodes)
    raise PlanFound


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Raise an InvalidValue if another thread of this process is in a run."""
    require(
        _RUNNING.acquire(blocking=False),
        "name",
        name,
        rule="another run of this process is active",
        fix="Wait for its end, or start this run in its own process.",
    )
    try:
        yield
    finally:
        _RUNNING.release()


def _check_kind(name: str, value: object, kind: type[Any], fix: str) -> None:
    """Raise an InvalidValue if an argument of `launch` does not have its type."""
    require(
        isinstance(value, kind),
        f"launch: {name}",
        value,
        rule=f"must be a {kind.__name__}",
        fix=f"Give {fix}.",
    )


def main(function: Callable[[], object]) -> Callable[[], None]:
    """Decorate the main function of a recipe, so that errors become a message and an exit code.

    With --plan the function is called twice: its run is planned, then started.

    ValueError, OSError and RunFailed print a message on stderr and exit with code 1, Ctrl-C with
    130, and a closed standard output, as in `recipe | head`, with 141. Other exceptions are bugs
    and keep their traceback.
    """

    @functools.wraps(function)
    def run() -> None:
        try:
            with plan_session() as session:
                try:
                    function()
                except PlanFound:
                    if session.must_plan or session.settings is None:  # rlsys plan has its answer
                        raise
                    function()
            sys.stdout.flush()
        except BrokenPipeError:
            close_stdout()
            raise SystemExit(BROKEN_PIPE) from None
        except (ValueError, OSError, RunFailed) as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            raise SystemExit(FAILED) from None
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None

    return run


def live_nodes(address: str) -> Sequence[Mapping[str, float]]:
    """Return the resources of the live nodes of a Ray cluster."""
    module = actors_module("cluster.cluster_nodes")
    nodes: Sequence[Mapping[str, float]] = module.live_nodes(address)
    return nodes


def actors_module(name: str) -> ModuleType:
    """Import and return a module of the package of Ray actors that belongs to this rlsys.

    The package is called `rlsys_actors` in a wheel and `actors` in a checkout. The name that
    belongs to this copy of rlsys is tried first: both may be installed, and a user's project may
    have a package `actors` of its own. docs/architecture.md explains this choice.
    """
    is_wheel = (Path(__file__).parents[2] / "rlsys_actors").is_dir()
    names = ("rlsys_actors", "actors") if is_wheel else ("actors", "rlsys_actors")
    for module in (f"{package}.{name}" for package in names):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:  # a missing import inside is raised
            if not f"{module}.".startswith(f"{error.name}."):
                raise
    raise ImportError(
        f"Neither {names[0]!r} nor {names[1]!r} of rlsys was found (sys.path starts with "
        f"{sys.path[0]!r}). Install rlsys with pip, or put its checkout on PYTHONPATH, and rename "
        "any folder or module of your own that is called actors."
    )

"""Starting a run, from a script, a notebook or a thread; and what comes of it.

    launch(config, flow) ─► RunResult, or ValueError for a mistake, RunFailed for a failure

The work is done by the Ray actors' package, found when it is first needed: `actors` in a checkout,
`rlsys_actors` where rlsys was installed from a wheel. Importing rlsys does not import Ray.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import reprlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from rlsys.common.broken_pipe import close_stdout
from rlsys.common.user_functions import printable
from rlsys.config import RunConfig, require
from rlsys.config.fields import checked
from rlsys.config.machine import is_machine
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.errors import RunFailed
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.launch.tiny_models import OwnModel
from rlsys.runs.run_directory import RunFiles

if TYPE_CHECKING:
    pass

# Held by a run: imports of its libraries, Ray and the hub's settings are the process's.
_RUNNING = threading.Lock()

# Exit codes of a recipe, beside 0 and, for a wrong option, 2.
FAILED, INTERRUPTED, NOBODY_READS = 1, 130, 141


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps before reinforcement learning starts."""

    num_steps: int
    batches: Iterator[list[tuple[str, str]]]  # prompts and the completions to learn
    learning_rate: float  # peak, reached linearly over the first tenth of the steps
    _given: list[list[tuple[str, str]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """Of `batches`, what was looked at: lessons that a rank's death breaks off begin anew."""

    def __post_init__(self) -> None:
        checked(self.num_steps, int, "WarmStart.num_steps")
        checked(self.learning_rate, float, "WarmStart.learning_rate")
        require(
            isinstance(self.batches, Iterator),
            f"WarmStart.batches={reprlib.repr(self.batches)} is no iterator; give a generator, or "
            "iter([...]) of a list of batches.",
        )
        require(
            self.num_steps >= 0,
            f"WarmStart.num_steps={self.num_steps} is negative; use 0 for none.",
        )
        require(
            0 < self.learning_rate <= 1,
            f"WarmStart.learning_rate={self.learning_rate} lies outside (0, 1]; use a rate such as "
            "1e-3.",
        )

    def rate(self, step: int) -> float:
        """Learning rate of the step; steps count from 1."""
        return self.learning_rate * min(1.0, step / max(1, self.num_steps // 10))

    def batch(self, step: int) -> list[tuple[str, str]]:
        """The examples of the step, the same however often it is asked. Raises ValueError where
        there are none.
        """
        while len(self._given) < step:
            self._given.append(self._next(len(self._given) + 1))
        return self._given[step - 1]

    def _next(self, step: int) -> list[tuple[str, str]]:
        examples = next(self.batches, None)
        require(
            examples is not None,
            f"WarmStart.batches ended before step {step} of {self.num_steps}; give as many batches "
            "as steps, or fewer steps.",
        )
        require(
            bool(examples),
            f"WarmStart.batches gave no example for step {step}; give at least one a batch.",
        )
        assert examples is not None
        for example in examples:
            require(
                isinstance(example, list | tuple)
                and len(example) == 2
                and all(isinstance(text, str) for text in example),
                f"WarmStart.batches gave {example!r} for step {step}, which is no example; give "
                "lists of pairs of texts, such as [(prompt, completion), ...].",
            )
        return examples


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """What a run came to."""

    outcome: Literal["finished", "dry run"]
    files: RunFiles
    """Paths of all that it left: files.rollouts, files.ledger, files.checkpoints, ..."""
    metrics: tuple[Mapping[str, float], ...]
    """A line per optimizer step, earlier parts of a resumed run included; names as in
    metrics.jsonl, such as "reward/mean"."""
    evaluations: tuple[Mapping[str, float], ...] = ()
    """A line per evaluation on held-out prompts, as in evaluations.jsonl: "step", "eval/pass@1"."""

    def __repr__(self) -> str:
        """One line: a notebook shows it where a cell ends with `launch(...)`."""
        steps = f"{len(self.metrics)} steps"
        return f"RunResult({self.outcome}, {steps}, {str(self.directory)!r})"

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.files.path

    @property
    def model(self) -> Path:
        """The trained model, as AutoModelForCausalLM.from_pretrained loads it."""
        return self.files.hf

    @property
    def best_model(self) -> Path:
        """That of the evaluation with the highest mean reward; as `model`, if there was one."""
        return self.files.best


def launch(
    config: RunConfig,
    flow: Dataflow,
    *,
    own_model: OwnModel | None = None,
    warm_start: WarmStart | None = None,
    held_out: HeldOut | None = None,
    dry_run: bool | str = False,
) -> RunResult:
    """Run to the last optimizer step, and return what came of it.

    `own_model` is trained where config.model.path is empty. `held_out` says what is evaluated
    beside training, where config.evaluation does not say it. With `dry_run` nothing is started and
    nothing written: the configuration, the graph, the placement, the memory, whether it fits, and
    one prompt are printed. It is compared with this machine, or with the one that `dry_run` names,
    such as "8xH100" or "4x24GiB". Works in any thread, in a notebook too, for one run at a time.

    Raises ValueError for a mistake in the configuration, the model, the data or the rewards, before
    Ray starts where it can be told by then, and for a run that does not fit onto its machines;
    RunFailed for a run that could not go on; and KeyboardInterrupt, in the main thread, for Ctrl-C
    and SIGTERM, in another one when the main thread has ended. Every process that was started is
    ended by then.

    This process itself ends, a notebook's kernel too, in one case: a run of its own Ray is inside a
    call of Ray's that is never answered, because Ray's processes have died or a signal came to all
    of them. The summary is printed before; the exit code is 130 after a signal, else 1.
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
    if not (isinstance(dry_run, str) and is_machine(dry_run)):
        _check_kind("dry_run", dry_run, bool, 'True, False, or a machine such as "8xH100"')
    with _alone(config.name):
        result: RunResult = _actors_package("run.launch").launch(
            config,
            flow,
            own_model=own_model,
            warm_start=warm_start,
            held_out=held_out,
            dry_run=dry_run,
        )
    return result


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Raise ValueError for a second run while another thread runs one."""
    require(
        _RUNNING.acquire(blocking=False),
        f"rlsys.launch is called for name={name!r} while another run of this process is under way, "
        "and a process runs one at a time; wait for its end, or start this one in a process of its "
        "own.",
    )
    try:
        yield
    finally:
        _RUNNING.release()


def _check_kind(name: str, given: object, kind: type[Any], fix: str) -> None:
    """Raise ValueError for an argument of `launch` that is none."""
    require(
        isinstance(given, kind),
        f"rlsys.launch is given {name}={reprlib.repr(given)}, which is no {kind.__name__}; give "
        f"{fix}.",
    )


def main(function: Callable[[], object]) -> Callable[[], None]:
    """Decorates a recipe's main function: an error becomes one message and an exit code.

    Code 1 after a message on stderr for ValueError, OSError and RunFailed; 130 for Ctrl-C; 141 for
    `recipe | head`, whose reader has gone. Other exceptions are bugs and keep their trace.
    """

    @functools.wraps(function)
    def run() -> None:
        try:
            function()
            sys.stdout.flush()
        except BrokenPipeError:
            close_stdout()
            raise SystemExit(NOBODY_READS) from None
        except (ValueError, OSError, RunFailed) as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            raise SystemExit(FAILED) from None
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None

    return run


def _actors_package(module: str) -> ModuleType:
    """A module of the actors' package that belongs to this rlsys."""
    is_installed = (Path(__file__).parents[2] / "rlsys_actors").is_dir()
    first, second = ("rlsys_actors", "actors") if is_installed else ("actors", "rlsys_actors")
    for package in (first, second):
        try:
            return importlib.import_module(f"{package}.{module}")
        except ModuleNotFoundError as error:  # a package that is missing inside keeps its trace
            if not f"{package}.{module}.".startswith(f"{error.name}."):
                raise
    raise ImportError(
        f"neither {first!r} nor {second!r} of rlsys was found (sys.path begins with "
        f"{sys.path[0]!r}); install rlsys with pip install, or put its checkout on PYTHONPATH, and "
        "rename a folder or module of your own that is called actors."
    )

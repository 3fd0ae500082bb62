"""From a recipe and its configuration to a placed, running job; and everything ended at its end.

    launch(config, flow) ─► check ─► run directory ─► Ray ─► actors ─► warm start ─► Controller.run
                                                                              └► checkpoint, export

Whatever happens (a last step, an error, Ctrl-C), every process that was started here is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actors.calls import Worker, WorkerError
from actors.cluster import connected, reserved
from actors.factories import RewardFactory, RolloutFactory, TrainerFactory, needs
from actors.reward import RayScorer, RewardActor
from actors.rollout import RayReplica, RolloutActor
from actors.store import StoreShards
from actors.trainer import RayLearner, TrainerActor
from rlsys import checkpoint
from rlsys.config import RunConfig, require
from rlsys.controller import Controller, RewardsFailed, StallError
from rlsys.data.prompts import PromptSource, load_tokenizer
from rlsys.dataflow.graph import Dataflow, GenerateStage, ScoreStage, TrainStage
from rlsys.dataflow.ledger import Ledger, LedgerFile, read_events
from rlsys.dataflow.store import StreamStore
from rlsys.engines.generation.protocol import EngineError
from rlsys.estimate import estimate_memory, model_shape
from rlsys.fields import to_dict
from rlsys.observe.console import RunConsole
from rlsys.observe.metrics import MetricsWriter, read_metrics
from rlsys.observe.records import RolloutWriter
from rlsys.observe.recorder import Recorder
from rlsys.observe.wandb_sink import WandbSink
from rlsys.run_directory import RunDirectory

# A user's mistake or the world's: shown as one message. Anything else is a bug and keeps its trace.
EXPECTED_ERRORS = (
    ValueError,
    OSError,
    WorkerError,
    EngineError,
    StallError,
    RewardsFailed,
)

# For actors to end their processes and files in good order; then they are killed.
CLOSE_TIMEOUT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps before reinforcement learning starts."""

    num_steps: int
    batches: Iterator[list[tuple[str, str]]]  # prompts and the completions to learn
    learning_rate: float


def launch(
    config: RunConfig,
    flow: Dataflow,
    *,
    warm_start: WarmStart | None = None,
    dry_run: bool = False,
) -> None:
    """Run to the end. Ends the process with code 1 and one message for a mistake or a failure of
    the cluster, with code 130 for Ctrl-C."""
    console = RunConsole(
        num_steps=config.num_steps,
        max_staleness=config.asynchrony.max_staleness,
        print_every=config.observe.print_every,
        print_samples=config.observe.print_samples,
    )
    try:
        if dry_run:
            print(describe(config, flow))
        else:
            asyncio.run(_run(config, flow, warm_start, console))
    except EXPECTED_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None


async def _run(
    config: RunConfig, flow: Dataflow, warm_start: WarmStart | None, console: RunConsole
) -> None:
    _cancel_on_sigterm()
    with console.phase("Reading model and prompts"):
        shape = model_shape(config.model.path)
        tokenizer = load_tokenizer(config.model.path)
        prompts = load_prompts(config, flow, tokenizer, shape)
    estimate = estimate_memory(config, shape)
    open_directory = RunDirectory.resume if config.resume else RunDirectory.create
    with open_directory(
        config.runs_dir,
        config.name,
        to_dict(config),
        required_bytes=estimate.checkpoint_bytes * (config.keep_checkpoints + 2),
    ) as directory:
        outcome: Literal["finished", "interrupted", "failed"] = "failed"
        try:
            await _run_in(directory, config, flow, prompts, tokenizer, warm_start, console)
            outcome = "finished"
        except asyncio.CancelledError:
            outcome = "interrupted"
            raise
        finally:
            console.close(
                outcome,
                lines=read_metrics(directory.metrics) if directory.metrics.exists() else [],
                directory=directory.path,
                next_command=_next_command(directory, outcome),
            )

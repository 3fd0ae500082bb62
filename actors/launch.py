"""From a recipe and its configuration to a placed, running job; and everything ended at its end.

    launch(config, flow) ─► check ─► run directory ─► Ray ─► actors ─► warm start ─► Controller.run
                                                                              └► checkpoint, export

Whatever happens (a last step, an error, Ctrl-C), every process that was started here is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from actors.calls import WorkerError
from actors.cluster import check_runs_dir, connected, reserved
from actors.dry_run import describe
from actors.factories import needs
from actors.team import Team
from rlsys.checkpoint import Checkpoints
from rlsys.config import RunConfig, require
from rlsys.controller import Controller, RewardsFailed, StallError
from rlsys.data.prompts import PromptSource, load_tokenizer
from rlsys.dataflow.graph import Dataflow, GenerateStage, ScoreStage
from rlsys.dataflow.ledger import Ledger, LedgerFile, read_events
from rlsys.dataflow.signal import Signal
from rlsys.engines.generation.protocol import EngineError
from rlsys.errors import first_error
from rlsys.estimate import ModelShape, estimate_memory, model_shape
from rlsys.fields import to_dict
from rlsys.observe.console import RunConsole
from rlsys.observe.metrics import MetricsWriter, read_metrics
from rlsys.observe.recorder import Recorder
from rlsys.observe.records import RolloutWriter
from rlsys.observe.wandb_sink import WandbSink
from rlsys.rewards import check_columns, pack_rewards
from rlsys.run_directory import RunDirectory
from rlsys.tiny_models import OwnModel
from rlsys.workers import ReplicaDied, RowsLost

# A user's mistake or the world's: told in one message. Anything else is a bug and keeps its trace.
EXPECTED_ERRORS = (
    ValueError,
    OSError,
    WorkerError,
    RowsLost,
    ReplicaDied,
    EngineError,
    StallError,
    RewardsFailed,
)

# Metrics, rollouts and a trace of an average run, beside its checkpoints.
RECORDS_BYTES = 64 * 2**20

# Rows of any length leave gaps in the shards' memory; this share of it is promised to rows.
STORE_FILL = 0.5

# The longest row has prompt, completion, log-probability and version of 4 bytes each, and padding.
BYTES_PER_PROMPT_TOKEN, BYTES_PER_TOKEN, PADDING_BYTES = 4, 12, 64


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps before reinforcement learning starts."""

    num_steps: int
    batches: Iterator[list[tuple[str, str]]]  # prompts and the completions to learn
    learning_rate: float  # peak, reached linearly over the first tenth of the steps

    def rate(self, step: int) -> float:
        """Learning rate of the step; steps count from 1."""
        return self.learning_rate * min(1.0, step / max(1, self.num_steps // 10))


def launch(
    config: RunConfig,
    flow: Dataflow,
    *,
    own_model: OwnModel | None = None,
    warm_start: WarmStart | None = None,
    dry_run: bool = False,
) -> None:
    """Run to the end, with `own_model` where model.path is empty. Ends the process with code 1 and
    one message for a mistake or a failure of the cluster, with code 130 for Ctrl-C."""
    try:
        check_runs_dir(config.runs_dir)
        if not config.model.path:
            require(
                own_model is not None,
                "model.path is empty; give a Hugging Face model directory or hub name.",
            )
            assert own_model is not None
            path = own_model.build(config.runs_dir, seed=config.seed)
            config = replace(config, model=replace(config.model, path=path))
        asyncio.run(_run(config, flow, warm_start, dry_run))
    except EXPECTED_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None


async def _run(
    config: RunConfig, flow: Dataflow, warm_start: WarmStart | None, dry_run: bool
) -> None:
    _cancel_on_sigterm()
    if dry_run:
        print(describe(config, flow, model_shape(config.model.path)))
        return
    console = RunConsole(
        num_steps=config.num_steps,
        max_staleness=config.asynchrony.max_staleness,
        print_every=config.observe.print_every,
        print_samples=config.observe.print_samples,
    )
    with console.phase("Reading model and prompts"):
        shape = model_shape(config.model.path)
        tokenizer = load_tokenizer(config.model.path)
        prompts = _load_prompts(config, flow, tokenizer, shape)
    checkpoint_bytes = estimate_memory(config, shape).checkpoint_bytes
    open_directory = RunDirectory.resume if config.resume else RunDirectory.create
    with open_directory(
        config.runs_dir,
        config.name,
        to_dict(config),
        required_bytes=RECORDS_BYTES + (config.keep_checkpoints + 2) * checkpoint_bytes,
    ) as directory:
        outcome: Literal["finished", "interrupted", "failed"] = "failed"
        try:
            job = _Job(config, flow, directory, prompts, tokenizer, console)
            await job.run(warm_start)
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


def _cancel_on_sigterm() -> None:
    """SIGTERM ends the run in good order, as Ctrl-C does."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _load_prompts(
    config: RunConfig, flow: Dataflow, tokenizer: Any, shape: ModelShape
) -> PromptSource:
    source = flow.stage(GenerateStage).prompts
    prompts = PromptSource(
        source.config,
        tokenizer,
        seed=config.seed,
        prompts_per_step=config.prompts_per_step,
        max_tokens=config.sampling.max_tokens,
        max_context=shape.max_context,
        rows=source.rows,
    )
    check_columns(flow.stage(ScoreStage).rewards, prompts.metadata_columns)
    pack_rewards(flow.stage(ScoreStage).rewards)  # raises for those that cannot travel
    return prompts


def _next_command(directory: RunDirectory, outcome: str) -> str:
    if outcome == "finished":
        return f"python scripts/plot_run.py {directory.path}"
    if directory.has_checkpoint:
        return "the same command with --resume"
    return "the same command with another --name (this run has no checkpoint to resume from)"


class _Job:
    """One run inside its directory."""

    def __init__(
        self,
        config: RunConfig,
        flow: Dataflow,
        directory: RunDirectory,
        prompts: PromptSource,
        tokenizer: Any,
        console: RunConsole,
    ) -> None:
        self._config = config
        self._flow = flow
        self._directory = directory
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._console = console
        self._checkpoints = Checkpoints(directory.checkpoints, config.keep_checkpoints)
        self._resume_from = self._checkpoints.newest() if config.resume else None
        self._first_step = 0
        if self._resume_from:
            self._first_step = self._resume_from.step
            prompts.check_order(
                json.loads(self._resume_from.controller_file.read_text())["prompts"]
            )

    async def run(self, warm_start: WarmStart | None) -> None:
        config = self._config
        ranks, replicas = needs(config)
        with contextlib.ExitStack() as cluster:
            with self._console.phase("Starting Ray"):
                cluster.enter_context(connected(config.cluster))
                _cancel_on_sigterm()  # again: Ray's own handler has just replaced it
                places = cluster.enter_context(reserved([*ranks, *replicas], config.cluster))
            team = Team(config, self._flow, self._tokenizer, self._directory.trace)
            try:
                await self._start(team, places, warm_start)
                await self._train(team)
                with self._console.phase("Exporting the model"):
                    await team.learner.export(self._directory.hf)
            finally:
                await team.close()

    async def _start(
        self, team: Team, places: list[dict[str, Any]], warm_start: WarmStart | None
    ) -> None:
        """Actors start side by side; the trainer warms up as soon as it is there."""
        await team.hire(places)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._start_learner(team, warm_start))
                for replica in team.replicas:
                    tasks.create_task(self._start_replica(replica))
                tasks.create_task(team.scorer.start(self._config.cluster.start_timeout_s))
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        if self._resume_from or warm_start:
            manifest = await team.learner.publish()
            await asyncio.gather(
                *(replica.update_weights(manifest, delayed=False) for replica in team.replicas)
            )

    async def _start_replica(self, replica: Any) -> None:
        with self._console.phase(f"Starting {replica.name} ({self._config.rollout.engine})"):
            await replica.start(self._config.cluster.start_timeout_s)

    async def _start_learner(self, team: Team, warm_start: WarmStart | None) -> None:
        with self._console.phase("Loading the model into the trainer"):
            await team.learner.start(self._config.cluster.start_timeout_s)
            if self._resume_from:
                await team.learner.load(self._resume_from.trainer_dir)
        if warm_start and not self._resume_from:
            with self._console.phase("Warm start") as phase:
                for done in range(1, warm_start.num_steps + 1):
                    loss = await team.learner.sft_step(
                        *self._encode(next(warm_start.batches)), warm_start.rate(done)
                    )
                    phase.update(done, warm_start.num_steps, f"loss {loss:.3f}")
                await team.learner.reset_optimizer()

    def _encode(self, examples: list[tuple[str, str]]) -> tuple[list[list[int]], list[int]]:
        """Token ids of prompt, completion and end of sequence; and the prompts' lengths."""
        encode = self._tokenizer
        prompts = encode([prompt for prompt, _ in examples])["input_ids"]
        completions = encode([text for _, text in examples], add_special_tokens=False)["input_ids"]
        end = [self._tokenizer.eos_token_id]
        return (
            [[*prompt, *text, *end] for prompt, text in zip(prompts, completions, strict=True)],
            [len(prompt) for prompt in prompts],
        )

    async def _train(self, team: Team) -> None:
        config, directory = self._config, self._directory
        longest_prompt, longest = config.data.max_prompt_tokens, config.sampling.max_tokens
        store = self._flow.open_store(
            max_bytes=int(config.cluster.store_gib * 2**30 * STORE_FILL),
            max_row_bytes=longest_prompt * BYTES_PER_PROMPT_TOKEN
            + longest * BYTES_PER_TOKEN
            + PADDING_BYTES,
            on_free=team.shards.free,
        )
        ledger_file = LedgerFile(directory.ledger)
        ledger = Ledger.replay(read_events(directory.ledger), ledger_file)
        if self._resume_from:
            ledger.resume(step=self._first_step)
        stepped = Signal()
        recorder = Recorder(
            metrics_writer=MetricsWriter(directory.metrics, after_step=self._first_step),
            rollout_writer=RolloutWriter(directory.rollouts, after_step=self._first_step),
            wandb=WandbSink(
                config.observe.wandb,
                project=config.observe.wandb_project,
                name=config.name,
                directory=directory.path,
                config=to_dict(config),
            ),
            console=self._console,
            ledger=ledger,
            group_size=config.group_size,
            queue_depths=store.queue_depths,
            tracer=team.tracer,
            stepped=stepped,
        )

        async def checkpoint(step: int) -> None:
            ledger_file.sync()
            with self._checkpoints.writing(step) as unfinished:
                await team.learner.save(unfinished.trainer_dir)
                state = {"step": step, "prompts": self._prompts.order}
                unfinished.controller_file.write_text(json.dumps(state))

        controller = Controller(
            flow=self._flow,
            config=config,
            prompts=self._prompts,
            store=store,
            ledger=ledger,
            replicas=team.replicas,
            scorer=team.scorer,
            learner=team.learner,
            observer=recorder,
            checkpoint=checkpoint,
            first_step=self._first_step,
        )
        team.on_shard_lost = controller.shard_lost
        failed = True
        try:
            await team.serve_while(controller.run(), stepped, recorder.actor_reported)
            failed = False
        finally:
            recorder.close(failed=failed)
            ledger_file.close()

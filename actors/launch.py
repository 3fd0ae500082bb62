"""From a recipe and its configuration to a placed, running job; and everything ended at its end.

    launch(config, flow) ─► check ─► run directory ─► Ray ─► actors ─► warm start ─► Controller.run
                                                                       checkpoint, export ◄─┘

Whatever happens (a last step, an error, Ctrl-C), every process that was started here is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rlsys.blocking import run_to_end
from rlsys.checkpoint import Checkpoints
from rlsys.config import RoleConfig, RunConfig, require
from rlsys.controller import Controller, OpenWork, RewardsFailed, StallError
from rlsys.controller.generation import Prompts
from rlsys.data.alphabet import Alphabet
from rlsys.data.external import external_prompts
from rlsys.data.hub import offline_where_unreachable
from rlsys.data.prompts import PromptSource, load_tokenizer
from rlsys.data.rows import LOADERS
from rlsys.data.vocabulary import check_vocabularies
from rlsys.dataflow.curriculum import Curriculum
from rlsys.dataflow.graph import (
    Dataflow,
    DatasetStage,
    GenerateStage,
    ScoreStage,
    SourceStage,
)
from rlsys.dataflow.ledger import Ledger, LedgerFile
from rlsys.dataflow.signal import Signal
from rlsys.engines.generation.interruption import interruption_of
from rlsys.engines.generation.protocol import EngineError
from rlsys.errors import Mistakes, RunFailed, first_error
from rlsys.estimate import ModelShape, estimate_memory, model_shape
from rlsys.exported import export_faults, seal_export
from rlsys.fields import to_dict
from rlsys.growing_file import Tally
from rlsys.held_out import Scoreboard, evaluation_config, read_evaluations, rewards_of
from rlsys.history import State, some
from rlsys.launching import HeldOut, RunResult, WarmStart
from rlsys.manifest import write_manifest
from rlsys.model_evaluation import held_out_prompts
from rlsys.observe.console import RunConsole
from rlsys.observe.diagnosis import foresee
from rlsys.observe.metrics import MetricsWriter, read_metrics
from rlsys.observe.recorder import Recorder
from rlsys.observe.records import RolloutWriter
from rlsys.observe.wandb_sink import WandbSink
from rlsys.resuming import History, read_history
from rlsys.rewards import as_rewards, pack_rewards
from rlsys.run_directory import RunDirectory, RunFiles, check_room
from rlsys.tiny_models import OwnModel
from rlsys.types import WeightManifest
from rlsys.workers import Fleet, LearnerDied, Replica, ReplicaDied, RowsLost

from . import carry_over
from .calls import WorkerError
from .cluster import check_runs_dir, connected
from .dry_run import describe
from .evaluating import EvaluationFactory, Evaluator
from .factories import needs, role_needs
from .local_ray import ends_with_ray
from .placement import reserved
from .store import StoreClient
from .team import Team, hired

# What goes wrong in the world: told in one message. A ValueError is a user's mistake, and told so
# too; anything else is a bug and keeps its trace.
FAILURES = (
    OSError,
    WorkerError,
    RowsLost,
    ReplicaDied,
    LearnerDied,
    EngineError,
    StallError,
    RewardsFailed,
)

# In a checkout; a wheel does without.
PLOT = Path(__file__).resolve().parent.parent / "scripts" / "plot_run.py"

# Metrics, rollouts and a trace of an average run, beside its checkpoints.
RECORDS_BYTES = 64 * 2**20

# Rows of any length leave gaps in the shards' memory; this share of it is promised to rows.
STORE_FILL = 0.5


def launch(
    config: RunConfig,
    flow: Dataflow,
    *,
    own_model: OwnModel | None = None,
    warm_start: WarmStart | None = None,
    held_out: HeldOut | None = None,
    dry_run: bool = False,
) -> RunResult:
    """See rlsys.launch, which calls it."""
    require(
        warm_start is None or flow.main.head == "logits",
        f"a warm start teaches a model its next tokens, which {flow.main.name!r} (head "
        f"{flow.main.head!r}) does not give; launch it without one.",
    )
    held_out = held_out or HeldOut()
    if dry_run:
        work = functools.partial(_dry_run, config, flow, own_model, held_out)
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
    config: RunConfig, flow: Dataflow, own_model: OwnModel | None, held_out: HeldOut
) -> RunResult:
    files = RunFiles(Path(config.runs_dir) / config.name)
    with _hub(config, flow), tempfile.TemporaryDirectory(prefix="rlsys-") as directory:
        with_model = _with_model(
            config, own_model, lambda own: own.build(Path(directory, "model"), seed=config.seed)
        )
        shape = model_shape(with_model.model.path, flow.main.head)
        tokenizer = load_tokenizer(with_model.model.path)
        prompts = _load_prompts(config, flow, tokenizer, shape)
        _check_held_out(with_model, flow, held_out, tokenizer, shape)
        print(describe(config, flow, shape, prompts, tokenizer))
    return RunResult(outcome="dry run", files=files, metrics=())


async def _run(
    config: RunConfig,
    flow: Dataflow,
    own_model: OwnModel | None,
    warm_start: WarmStart | None,
    held_out: HeldOut,
) -> RunResult:
    _cancel_on_signals()
    check_runs_dir(config.runs_dir)
    console = RunConsole(
        num_steps=config.num_steps,
        max_staleness=config.asynchrony.max_staleness,
        samples=bool(flow.all(GenerateStage)),
        print_every=config.observe.print_every,
        print_samples=config.observe.print_samples,
    )
    with contextlib.ExitStack() as stack:
        with console.phase("Reading model and prompts"):
            stack.enter_context(_hub(config, flow))
            check_room(Path(config.runs_dir), RECORDS_BYTES)
            with_model = _with_model(
                config, own_model, lambda own: own.ensure(config.runs_dir, seed=config.seed)
            )
            shape = model_shape(with_model.model.path, flow.main.head)
            tokenizer = load_tokenizer(with_model.model.path)
            prompts = _load_prompts(config, flow, tokenizer, shape)
            _check_held_out(with_model, flow, held_out, tokenizer, shape)
        checkpoint_bytes = estimate_memory(config, shape).checkpoint_bytes
        directory = stack.enter_context(
            RunDirectory.open(
                config.runs_dir,
                config.name,
                to_dict(config),
                resume=config.resume,
                required_bytes=RECORDS_BYTES + (config.keep_checkpoints + 2) * checkpoint_bytes,
            )
        )
        continues = config.resume is not False
        if continues and directory.has_finished(config.num_steps):
            console.note(f"{directory.path} has all of its {config.num_steps} steps already.")
            newest = Checkpoints(directory.checkpoints, config.keep_checkpoints).newest()
            if newest is None or newest.step < config.num_steps:
                console.warn(
                    f"{directory.checkpoints} lacks step {config.num_steps}: with more steps the "
                    f"run would go on from {f'step {newest.step}' if newest else 'nowhere'}"
                )
            return _result(directory)
        resume = continues and directory.has_checkpoint
        history = None
        if resume:
            with console.phase("Reading the run's history"):
                history = read_history(
                    directory,
                    groups_per_step=config.prompts_per_step,
                    num_steps=config.num_steps,
                )
            prompts.check_order(history.state.prompts)
            directory.write_config(to_dict(config))
            console.note(_where_it_goes_on(history, config, directory))
        for warning in foresee(config):
            console.warn(warning)
        outcome: Literal["finished", "interrupted", "failed"] = "failed"
        try:
            job = _Job(with_model, flow, held_out, directory, history, prompts, tokenizer, console)
            await job.run(warm_start)
            outcome = "finished"
        except (asyncio.CancelledError, BrokenPipeError):
            outcome = "interrupted"
            raise
        finally:
            console.close(
                outcome,
                lines=read_metrics(directory.metrics) if directory.metrics.exists() else [],
                evaluations=read_evaluations(directory.evaluations),
                directory=directory.path,
                next_command=_next_command(directory, outcome, flow),
            )
        return _result(directory)


def _hub(config: RunConfig, flow: Dataflow) -> contextlib.AbstractContextManager[None]:
    roles = [model.config.model.path for model in flow.models.values() if model.config]
    names = [config.model.path, *filter(None, roles)]
    names += filter(_is_hub_name, [config.data.source, config.evaluation.source])
    return offline_where_unreachable(*names)


def _is_hub_name(source: str) -> bool:
    return bool(source) and Path(source).suffix not in LOADERS


def _with_model(
    config: RunConfig, own_model: OwnModel | None, make: Callable[[OwnModel], Path]
) -> RunConfig:
    """The configuration with the path of the recipe's own model, where it names none."""
    if config.model.path:
        return config
    require(
        own_model is not None,
        "model.path is empty; give a Hugging Face model directory or hub name.",
    )
    assert own_model is not None
    return replace(config, model=replace(config.model, path=str(make(own_model))))


def _where_it_goes_on(history: History, config: RunConfig, directory: RunDirectory) -> str:
    step, last = history.checkpoint.step, history.last_step
    if step == config.num_steps:
        faults = export_faults(directory.hf, checksums=False) or ["it is of an earlier step"]
        return (
            f"All {step} steps are trained; their model is exported to {directory.hf} again "
            f"({some(faults)})."
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


def _cancel_on_signals() -> None:
    """SIGTERM ends the run in good order, as Ctrl-C does; so do a terminal that closes (SIGHUP,
    unless nohup has switched that off) and SIGQUIT. Signals come to the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and (task := asyncio.current_task()) is not None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _load_prompts(
    config: RunConfig, flow: Dataflow, tokenizer: Any, shape: ModelShape
) -> PromptSource:
    """The data, after all that can be told about it and the graph has been checked. Raises
    ValueError with every mistake that was found."""
    mistakes = Mistakes()
    if (shared := flow.source.prompts.shared) is not None:
        with mistakes.noted():
            shared.check(config)
    with mistakes.noted():
        retire_at = flow.source.prompts.config.retire_at
        require(
            retire_at is None or bool(flow.all(ScoreStage)),
            f"data.retire_at={retire_at} goes by rewards, and the dataflow has no flow.score; "
            "leave it out.",
        )
    with mistakes.noted():
        flow.check_groups(config.group_size)
        flow.hold_proximal(config.trainer.updates_per_step)
        flow.check()
    with mistakes.noted():
        _check_models(flow, tokenizer)
    for scored in flow.all(ScoreStage):
        with mistakes.noted():
            pack_rewards(scored.rewards)  # raises for those that cannot travel
    with mistakes.noted():
        interruption_of(config.sampling, tokenizer)
    prompts = None
    with mistakes.noted():
        prompts = _read_prompts(config, flow.source, tokenizer, shape)
        with mistakes.noted():
            prompts.check_size(config.prompts_per_step)
        for scored in flow.all(ScoreStage):
            with mistakes.noted():
                prompts.check_rewards(scored.rewards)
    mistakes.tell()
    assert prompts is not None
    return prompts


def _read_prompts(
    config: RunConfig, stage: SourceStage, tokenizer: Any, shape: ModelShape
) -> PromptSource:
    return PromptSource(
        stage.prompts.config,
        tokenizer,
        seed=config.seed,
        max_tokens=config.sampling.max_tokens,
        max_context=shape.max_context,
        rows=stage.prompts.rows,
        completions=(stage.completions, stage.group_size)
        if isinstance(stage, DatasetStage)
        else None,
    )


def _check_models(flow: Dataflow, tokenizer: Any) -> None:
    """Raise ValueError for a model beside the main one that lacks a head, or has another
    vocabulary."""
    for name, model in flow.models.items():
        has_own = not isinstance(model.config, RoleConfig) or bool(model.config.model.path)
        require(
            has_own or model.head == "logits",
            f"{name}.model.path is empty, and the policy's weights, which it would take, have no "
            f"trained {model.head} head; give it the directory of a model that has one, such as "
            "recipes/reward_model.py makes.",
        )
    roles = {name: model.config for name, model in flow.models.items()}
    check_vocabularies(
        tokenizer, {name: config.model.path for name, config in roles.items() if config}
    )


def _check_held_out(
    config: RunConfig, flow: Dataflow, held_out: HeldOut, tokenizer: Any, shape: ModelShape
) -> None:
    """Raise ValueError for an evaluation that could not be done."""
    if not config.evaluation.every:
        return
    require(
        flow.main.head == "logits",
        f"evaluation.every={config.evaluation.every} samples from {flow.main.name!r}, whose head "
        f"is {flow.main.head!r}; use evaluation.every=0.",
    )
    has_splits = flow.source.prompts.rows is None and _is_hub_name(config.data.source)
    require(
        held_out.rows is not None or bool(config.evaluation.source) or has_splits,
        f"evaluation.every={config.evaluation.every}, and nothing is held out: give a file or a "
        "dataset as evaluation.source, or rows as launch(held_out=rlsys.HeldOut(rows=...)).",
    )
    rewards = rewards_of(flow, held_out)
    pack_rewards(rewards)  # raises for those that cannot travel
    evaluated = evaluation_config(config, config.model.path)
    held_out_prompts(evaluated, tokenizer, shape.max_context, as_rewards(rewards), held_out.rows)


def _next_command(directory: RunDirectory, outcome: str, flow: Dataflow) -> str:
    if outcome == "finished" and PLOT.is_file():
        return f"python {os.path.relpath(PLOT)} {directory.path}"
    if outcome == "finished":
        kind = "CausalLM" if flow.main.head == "logits" else "SequenceClassification"
        return f"AutoModelFor{kind}.from_pretrained({str(directory.hf)!r})"
    if directory.has_checkpoint:
        return "the same command with --resume"
    if not directory.has_steps:
        return "the same command"
    return (
        "the same command with --resume auto, which begins again (no checkpoint was written), or "
        "with another --name"
    )


class _Job:
    """One run inside its directory."""

    def __init__(
        self,
        config: RunConfig,
        flow: Dataflow,
        held_out: HeldOut,
        directory: RunDirectory,
        history: History | None,
        prompts: PromptSource,
        tokenizer: Any,
        console: RunConsole,
    ) -> None:
        self._config = config
        self._flow = flow
        self._held_out = held_out
        self._directory = directory
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._console = console
        self._checkpoints = Checkpoints(
            directory.checkpoints,
            config.keep_checkpoints,
            records=(*directory.records, directory.external),
        )
        self._history = history
        self._events = history.events if history else ()
        self._resume_from = history.checkpoint if history else None
        self._first_step = history.checkpoint.step if history else 0
        self._kept: Mapping[str, Tally] = history.state.records if history else {}
        self._samples = bool(flow.all(GenerateStage))
        self._alphabet = Alphabet(tokenizer)

    @property
    def _begins_alike(self) -> bool:
        """Another model begins with the weights of the main one."""
        roles = [model.config for model in self._flow.models.values()]
        return any(not role.model.path for role in roles if role is not None)

    async def run(self, warm_start: WarmStart | None) -> None:
        config = self._config
        if warm_start and self._begins_alike and self._resume_from:
            await asyncio.to_thread(self._checkpoints.check_beginning)
        ranks, replicas = needs(config, self._flow)
        async with contextlib.AsyncExitStack() as cluster:
            prompts = cluster.enter_context(self._prompts_of_all())
            with self._console.phase("Starting Ray"):
                cluster.enter_context(connected(config.cluster))
                _cancel_on_signals()  # again: Ray's own handler has just replaced it
                await cluster.enter_async_context(ends_with_ray())
                places = await cluster.enter_async_context(
                    reserved(
                        ranks,
                        replicas,
                        roles=role_needs(config, self._flow),
                        min_replicas=config.rollout.num_first,
                        timeout_s=config.cluster.start_timeout_s,
                    )
                )
            team = await cluster.enter_async_context(
                hired(
                    config,
                    self._flow,
                    self._tokenizer,
                    self._directory.trace,
                    places,
                    self._checkpoints,
                )
            )
            # The store is empty: a shard that dies by now is replaced, and nothing is lost.
            first = await team.keep_store_while(self._start(team, warm_start))
            await self._train(team, first, prompts, began_warm=warm_start is not None)
            with self._console.phase("Exporting the model"):
                await team.learner.export_the_end(self._directory.hf)
                await asyncio.to_thread(seal_export, self._directory.hf, config.num_steps)

    def _prompts_of_all(self) -> contextlib.AbstractContextManager[Prompts]:
        """The run's own, and groups of other runs where the graph takes them."""
        source = self._flow.source.prompts
        if source.shared is None or not source.may_be_external:
            return contextlib.nullcontext(self._prompts)
        rewards = [one for stage in self._flow.all(ScoreStage) for one in as_rewards(stage.rewards)]
        return external_prompts(
            self._prompts,
            source.shared,
            config=self._config,
            tokenizer=self._tokenizer,
            rewards=rewards,
            path=self._directory.external,
            issued=[e["prompt"] for e in self._events if e["event"] == "issued"],
        )

    async def _start(self, team: Team, warm_start: WarmStart | None) -> dict[int, Replica]:
        """Actors start side by side; the trainer warms up as soon as it is there. Returns the first
        replicas, by number, less those that died while they started."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._start_models(team, warm_start))
                tasks.create_task(team.scorer.start(self._config.cluster.start_timeout_s))
                first = [
                    tasks.create_task(self._hire(team.fleet, number))
                    for number in range(self._config.rollout.num_first)
                ]
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        started = {number: task.result() for number, task in enumerate(first)}
        return {number: replica for number, replica in started.items() if replica is not None}

    async def _hire(self, fleet: Fleet, number: int) -> Replica | None:
        engine = self._config.rollout.engine if self._samples else "dataset"
        with self._console.phase(f"Starting rollout-{number} ({engine})"):
            try:
                return await fleet.hire(number)
            except ReplicaDied as death:  # the controller hires another
                self._console.warn(str(death))
                return None

    async def _start_models(self, team: Team, warm_start: WarmStart | None) -> None:
        """The main model's trainer, then all that may begin with its weights."""
        await self._start_learner(team, warm_start)
        roles = [model for model in self._flow.models.values() if model.config is not None]
        if not roles:
            return
        if warm_start and self._begins_alike and not self._resume_from:
            await team.learner.export_the_end(self._checkpoints.taught)
            await asyncio.to_thread(write_manifest, self._checkpoints.taught)
        limit_s = self._config.cluster.start_timeout_s
        with self._console.phase(f"Loading {', '.join(model.name for model in roles)}"):
            async with asyncio.TaskGroup() as tasks:
                for name, learner in team.learners.items():
                    if learner is not team.learner:
                        tasks.create_task(learner.start(self._checkpoint_of(name)))
                for pool in team.pools.values():
                    tasks.create_task(pool.start(limit_s))

    def _checkpoint_of(self, model: str) -> Path | None:
        return self._resume_from.role_dir(model) if self._resume_from else None

    async def _start_learner(self, team: Team, warm_start: WarmStart | None) -> None:
        with self._console.phase("Loading the model into the trainer"):
            await team.learner.start(self._checkpoint_of(self._flow.main.name))
        if warm_start and not self._resume_from:
            with self._console.phase("Warm start") as phase:

                async def lessons() -> None:
                    for done in range(1, warm_start.num_steps + 1):
                        loss = await team.learner.sft_step(
                            *self._encode(warm_start.batch(done), done), warm_start.rate(done)
                        )
                        phase.update(done, warm_start.num_steps, f"loss {loss:.3f}")

                await team.learner.warm_start(lessons)

    def _encode(
        self, examples: list[tuple[str, str]], step: int
    ) -> tuple[list[list[int]], list[int]]:
        """Token ids of prompt, completion and end of sequence; and the prompts' lengths."""
        for example in examples:
            for text in example:
                self._alphabet.check(text, f"a text of WarmStart.batches for step {step}")
        encode = self._tokenizer
        prompts = encode([prompt for prompt, _ in examples])["input_ids"]
        completions = encode([text for _, text in examples], add_special_tokens=False)["input_ids"]
        end = [self._tokenizer.eos_token_id]
        return (
            [[*prompt, *text, *end] for prompt, text in zip(prompts, completions, strict=True)],
            [len(prompt) for prompt in prompts],
        )

    async def _train(
        self,
        team: Team,
        replicas: Mapping[int, Replica],
        prompts: Prompts,
        *,
        began_warm: bool,
    ) -> None:
        config, directory = self._config, self._directory
        client = StoreClient(team.shards.address)
        longest_prompt, longest = config.data.max_prompt_tokens, config.sampling.max_tokens
        store = self._flow.open_store(
            max_bytes=int(config.cluster.store_gib * 2**30 * STORE_FILL),
            max_row_bytes=self._flow.row_bytes(
                max_prompt_tokens=longest_prompt, max_tokens=longest
            ),
            on_free=team.shards.free,
        )
        ledger_file = LedgerFile(directory.ledger)
        ledger = Ledger.replay(
            self._events,
            ledger_file,
            groups_per_step=config.prompts_per_step,
        )
        if self._resume_from:
            ledger.resume(step=self._first_step)
        stepped = Signal()
        metrics = MetricsWriter(
            directory.metrics,
            after_step=self._first_step,
            kept=self._kept.get(directory.metrics.name),
        )
        rollouts = RolloutWriter(
            directory.rollouts,
            after_step=self._first_step,
            kept=self._kept.get(directory.rollouts.name),
        )
        recorder = Recorder(
            metrics_writer=metrics,
            rollout_writer=rollouts,
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

        curriculum = Curriculum(
            self._flow.source.prompts.config.retire_at,
            num_rows=len(self._prompts),
            retired=self._history.state.retired if self._history else (),
        )

        async def checkpoint(step: int, work: OpenWork) -> None:
            # Of the moment to which the open work belongs: groups are issued meanwhile.
            records = (
                (directory.ledger, ledger_file.tally),
                (directory.metrics, metrics.tally),
                (directory.rollouts, rollouts.tally),
            )
            state = State(
                step=step,
                prompts=self._prompts.order,
                records={path.name: tally for path, tally in records},
                retired=curriculum.retired,
            )
            async with self._checkpoints.writing(step) as unfinished:
                for model, learner in team.learners.items():
                    await learner.save(unfinished.role_dir(model))
                await carry_over.save(work, client, unfinished.path)
                unfinished.controller_file.write_text(json.dumps(state.to_dict()))

        carried, weights = OpenWork(), None
        if self._resume_from:
            carried = await carry_over.load(
                self._resume_from.path,
                team.shards.address,
                homes=sorted({replica.home for replica in replicas.values()}),
            )

        if not self._samples:
            weights = WeightManifest.of_nothing(self._first_step)
        elif began_warm or self._resume_from:
            try:
                weights = await team.learner.publish()
            except LearnerDied as death:
                self._console.warn(f"{death}; the trainer starts again")
                await team.learner.restart(self._first_step)
                weights = await team.learner.publish()
        evaluator: Evaluator | None = None
        if config.evaluation.every:
            evaluator = self._evaluator(team, recorder, lambda: controller.is_alive())
        controller = Controller(
            flow=self._flow,
            config=config,
            prompts=prompts,
            store=store,
            ledger=ledger,
            fleet=team.fleet,
            replicas=replicas,
            scorer=team.scorer,
            learners=team.learners,
            pools=team.pools,
            observer=recorder,
            checkpoint=checkpoint,
            between=[evaluator.between_steps] if evaluator else [],
            weights=weights,
            carried=carried,
            curriculum=curriculum,
            first_step=self._first_step,
        )

        async def work() -> None:
            await controller.run()
            if evaluator is not None:
                with self._console.phase("Evaluating"):
                    await evaluator.finish()

        failed = True
        try:
            await team.serve_while(
                work(),
                stepped,
                *([evaluator.run()] if evaluator else []),
                on_report=recorder.actor_reported,
                on_shard_lost=controller.shard_lost,
            )
            failed = False
        finally:
            recorder.close(failed=failed)
            if evaluator is not None:
                evaluator.close()
            ledger_file.close()

    def _evaluator(
        self, team: Team, recorder: Recorder, on_progress: Callable[[], None]
    ) -> Evaluator:
        factory = EvaluationFactory(
            config=self._config,
            rewards=pack_rewards(rewards_of(self._flow, self._held_out)),
            rows=self._held_out.rows,
        )
        return Evaluator(
            self._config,
            Scoreboard(self._directory, after_step=self._first_step),
            self._directory.evaluating,
            hire=lambda: team.hire_evaluator(factory),
            export=team.learner.export,
            on_result=recorder.evaluated,
            on_progress=on_progress,
            warn=self._console.warn,
            first_step=self._first_step,
        )

"""Prediction of a run by playing it: the real controller with workers that only take time.

    RunConfig + Dataflow + costs + lengths ──► simulate ──► SimulationResult

The result includes everything that the controller decides: admission by staleness, placement,
micro-batches, overlap, interrupted generation, the tail of long completions. Nothing is random but
the lengths, which a seed fixes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.config import RunConfig
from rlsys.config.checks import MAX_SECONDS
from rlsys.controller.controller import Controller
from rlsys.controller.simulation.event_record import Record
from rlsys.controller.simulation.shared_cores import SharedCores
from rlsys.controller.simulation.simulated_replicas import SimulatedFleet
from rlsys.controller.simulation.timed_workers import (
    DrawLength,
    DrawTools,
    ReplicaCosts,
    TimedController,
    TimedPool,
    TimedReplica,
    TimedScorer,
    TimedTrainer,
    TrainingCosts,
    no_tools,
)
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.state import OpenWork, TrainedStep
from rlsys.dataflow.graph.run_graph import RunGraph, complete_graph
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import PlayStage
from rlsys.dataflow.graph.store_layout import open_store
from rlsys.dataflow.scheduling.ledger import Ledger
from rlsys.dataflow.scheduling.lending import LendingSettings
from rlsys.types import Prompt

# Longest time between two reports of a replica if devices are lent: the policy counts tokens.
REPORT_S = 1.0

# Bytes of a token in all columns of the store, at most, and of the store. It has room for all rows.
_TOKEN_BYTES = 64
_STORE_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class ReplicaModel:
    """The replicas of a simulated run, all alike.

    Attributes:
        costs: Times of one replica.
        cache_tokens: Tokens whose keys and values fit into its memory.
        max_running: Sequences in a decode step.
        num_processes: Processes that compute at once, which matters on CPUs.
        forgets: Whether an update of the weights drops the keys and values of running sequences.
            Replicas of rlsys keep them.
    """

    costs: ReplicaCosts
    cache_tokens: int
    max_running: int
    num_processes: int = 1
    forgets: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainerModel:
    """A trained model of a simulated run.

    Attributes:
        costs: Times of its ranks.
        num_data: Data-parallel ranks.
        num_stages: Pipeline stages.
        attention_tokens: Sequence length at which attention costs as many FLOPs as the rest.
        num_ranks: Processes that compute at once, which matters on CPUs.
    """

    costs: TrainingCosts
    num_data: int = 1
    num_stages: int = 1
    attention_tokens: float = 4096.0
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a run: lengths in tokens, times of one reward and of tools in seconds.

    `controller_s` is the time of the controller's process per rollout. `other_s` is the time per
    rollout in which other threads need a core, and for which nothing waits.
    """

    prompt_tokens: Callable[[int], int]  # by index of the prompt
    completion_tokens: DrawLength
    reward_s: Callable[[], float] = lambda: 0.0
    tools_s: DrawTools = no_tools
    controller_s: float = 0.0
    other_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Times of the steps of a simulated run, without its beginning and its end.

    Attributes:
        step_s: Seconds of each step.
        trained_tokens: Completion tokens of each step.
        generation_busy: Share of time in which a replica decodes or computes prompts, mean over
            replicas.
        trainer_busy: Share of time in which the trainer computes.
        waited_s: Seconds per step that each stage waited, by stage and reason.
        staleness: Number of trained groups by staleness, in optimizer steps.
        num_preempted: Sequences that lost their cached tokens.
        lent_s: Mean seconds of a step in which the trainer's devices were lent.
        num_hand_overs: Hand-overs of these devices in the whole run.
        num_lent_rollouts: Rollouts that borrowed replicas finished in the whole run.
        not_lent: Number of steps without lending, by reason.
    """

    step_s: Sequence[float]
    trained_tokens: Sequence[int]
    generation_busy: float
    trainer_busy: float
    waited_s: Mapping[tuple[str, str], float]
    staleness: Mapping[int, int]
    num_preempted: int
    lent_s: float = 0.0
    num_hand_overs: int = 0
    num_lent_rollouts: int = 0
    not_lent: Mapping[str, int] = field(default_factory=dict)

    @property
    def mean_step_s(self) -> float:
        """Mean seconds of a step."""
        return statistics.fmean(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Trained completion tokens per second."""
        return sum(self.trained_tokens) / sum(self.step_s)


@dataclass(kw_only=True)
class _Prompts:
    """Endless prompts of given lengths."""

    num_tokens: Callable[[int], int]

    def row(self, index: int) -> int:
        return index

    def at(self, index: int) -> Prompt:
        return Prompt(
            index=index, row=index, token_ids=(0,) * self.num_tokens(index), text="", metadata={}
        )


@dataclass(kw_only=True)
class _Times(Record):
    """Observer that keeps the ends of steps and sums only."""

    clock: Callable[[], float]
    busy_s: Callable[[], tuple[float, float]]  # of a replica and of a trainer so far, means
    ends_s: list[float] = field(default_factory=list)
    busy_at_ends: list[tuple[float, float]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    by_staleness: Counter[int] = field(default_factory=Counter)

    def step_trained(self, trained: TrainedStep) -> None:
        self.ends_s.append(self.clock())
        self.busy_at_ends.append(self.busy_s())
        self.num_tokens.append(
            sum(note.num_tokens for group in trained.groups for note in group.rollouts)
        )
        for group in trained.groups:
            oldest = min(note.min_version for note in group.rollouts)
            self.by_staleness[trained.step - 1 - oldest] += 1

    def busy_shares(self, first: int, last: int) -> tuple[float, float]:
        """Return the busy shares of a replica and of a trainer between the ends of two steps."""
        elapsed_s = self.ends_s[last] - self.ends_s[first]
        before, after = self.busy_at_ends[first], self.busy_at_ends[last]
        generation, training = (
            min(1.0, (end - start) / elapsed_s) for start, end in zip(before, after, strict=True)
        )
        return generation, training


def simulate(
    config: RunConfig,
    flow: StageGraph,
    *,
    replica: ReplicaModel,
    trainers: Mapping[str, TrainerModel],
    frozen: Mapping[str, TrainerModel] | None = None,
    work: Work,
    num_warm_up: int = 1,
    lending: LendingSettings | None = None,
    num_cores: float = math.inf,
) -> SimulationResult:
    """Play a run of `config.num_steps` steps in virtual time.

    The run goes on for as many steps as generation may be ahead. The result leaves them out: no
    replica samples during the last ones.

    Args:
        config: Configuration of the run. `rollout.num_replicas` replicas sample, and
            `rollout.borrow` more while the trainer would wait. Its time limits do not count: they
            detect processes that hang, and simulated workers may take any time.
        flow: The algorithm.
        replica: The replicas.
        trainers: The trained models, by name.
        frozen: The frozen models, by name. `num_data` is the number of their workers.
        work: Lengths and reward times.
        num_warm_up: First steps that the result leaves out. Generation ahead begins with a burst of
            several steps, so they should be more than those that it may be ahead.
        lending: Parameters of the policy that lends the trainer's devices.
        num_cores: Cores that all workers share. Workers on GPUs share none.

    Raises:
        ValueError: A completion does not fit into a replica's cache, or no step is left after
            the first ones.
    """
    if config.num_steps <= num_warm_up + 1:
        raise ValueError(
            f"num_steps={config.num_steps}: a simulation needs more than {num_warm_up + 1} steps. "
            "Raise num_steps, or lower num_warm_up."
        )
    unlimited = replace(config.cluster, call_timeout_s=MAX_SECONDS, start_timeout_s=MAX_SECONDS)
    num_last = config.max_version_lag
    config = replace(config, cluster=unlimited, num_steps=config.num_steps + num_last)
    return run_in_virtual_time(
        _simulate(
            config,
            complete_graph(flow, config),
            replica=replica,
            trainers=trainers,
            frozen=frozen or {},
            work=work,
            num_warm_up=num_warm_up,
            num_last=num_last,
            lending=lending,
            cores=SharedCores(num_cores=num_cores),
        )
    )


async def _simulate(
    config: RunConfig,
    flow: RunGraph,
    *,
    replica: ReplicaModel,
    trainers: Mapping[str, TrainerModel],
    frozen: Mapping[str, TrainerModel],
    work: Work,
    num_warm_up: int,
    num_last: int,
    lending: LendingSettings | None,
    cores: SharedCores,
) -> SimulationResult:
    clock = asyncio.get_running_loop().time
    source = flow.source
    parts = source.parts if isinstance(source, PlayStage) else None
    num_own = config.rollout.num_replicas
    process = TimedController(seconds=work.controller_s, other_s=work.other_s, cores=cores)
    report_s = REPORT_S if config.rollout.borrow else None
    replicas = [
        _replica(number, replica, work, process, parts, report_s) for number in range(num_own)
    ]
    borrowed = {
        number: _replica(number, replica, work, process, parts, report_s)
        for number in range(num_own, num_own + config.rollout.borrow)
    }
    for asleep in borrowed.values():
        await asleep.release()
    trainer_proxies = {name: _trainer(name, model, cores) for name, model in trainers.items()}

    def busy_s() -> tuple[float, float]:
        return (
            statistics.fmean(one.engine.busy_s for one in replicas),
            statistics.fmean(one.busy_s for one in trainer_proxies.values()),
        )

    observer = _Times(clock=clock, busy_s=busy_s)
    controller = Controller(
        flow=flow,
        config=config,
        prompts=_Prompts(num_tokens=work.prompt_tokens),
        store=open_store(
            flow,
            max_bytes=_STORE_BYTES,
            max_row_bytes=_TOKEN_BYTES * replica.cache_tokens,
            on_free=lambda freed: None,
        ),
        ledger=Ledger(lambda event: None, groups_per_step=config.prompts_per_step),
        fleet=SimulatedFleet(),
        replicas=dict(enumerate(replicas)),
        scorer=TimedScorer(
            seconds=work.reward_s, num_workers=config.reward.num_workers, cores=cores
        ),
        trainer_proxies=trainer_proxies,
        pools={name: _pool(name, model, flow, cores) for name, model in frozen.items()},
        observer=observer,
        checkpoint=_no_checkpoint,
        borrowed=borrowed,
        lending=lending,
        clock=clock,
    )
    await controller.run()
    num_steps = len(observer.ends_s)
    last = num_steps - num_last - 1
    generation_busy, trainer_busy = observer.busy_shares(num_warm_up, last)
    ends_s = observer.ends_s[num_warm_up : last + 1]
    return SimulationResult(
        step_s=[end - start for start, end in itertools.pairwise(ends_s)],
        trained_tokens=observer.num_tokens[num_warm_up + 1 : last + 1],
        generation_busy=generation_busy,
        trainer_busy=trainer_busy,
        waited_s={reason: seconds / num_steps for reason, seconds in observer.waited_s.items()},
        staleness=dict(observer.by_staleness),
        num_preempted=sum(one.engine.num_preempted for one in replicas),
        lent_s=sum(seconds for seconds, _ in observer.lent) / num_steps,
        num_hand_overs=len(observer.lent),
        num_lent_rollouts=sum(num for _, num in observer.lent),
        not_lent=dict(Counter(observer.reasons)),
    )


def _replica(
    number: int,
    model: ReplicaModel,
    work: Work,
    process: TimedController,
    parts: Sequence[str] | None,
    report_s: float | None,
) -> TimedReplica:
    return TimedReplica(
        name=f"rollout-{number}",
        costs=model.costs,
        draw_length=work.completion_tokens,
        draw_tools=work.tools_s,
        parts=parts,
        controller=process,
        cores=process.cores,
        num_processes=model.num_processes,
        cache_tokens=model.cache_tokens,
        max_running=model.max_running,
        forgets=model.forgets,
        report_s=report_s,
    )


def _trainer(name: str, model: TrainerModel, cores: SharedCores) -> TimedTrainer:
    return TimedTrainer(
        name=name,
        costs=model.costs,
        cores=cores,
        num_ranks=model.num_ranks,
        num_data=model.num_data,
        num_stages=model.num_stages,
        attention_tokens=model.attention_tokens,
    )


def _pool(name: str, model: TrainerModel, flow: RunGraph, cores: SharedCores) -> TimedPool:
    columns = [
        column for stage in flow.row_stages if stage.model.name == name for column in stage.writes
    ]
    return TimedPool(
        costs=model.costs,
        num_workers=model.num_data,
        cores=cores,
        token_columns=[column.name for column in columns if column.per == "token"],
        row_columns=[column.name for column in columns if column.per != "token"],
    )


async def _no_checkpoint(step: int, work: OpenWork, on_read: Callable[[], None]) -> Any:
    """Write nothing."""
    on_read()

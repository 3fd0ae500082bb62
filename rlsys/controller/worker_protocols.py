"""The protocols of the workers that the controller calls, and their messages.

Messages carry metadata only. Token ids and log-probabilities stay in the store's shared memory;
a `ColumnRef` gives their location.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlsys.dataflow.store.blocks import BlockRef, ColumnRef
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import FinishReason, GenerationRequest, StepResult, WeightManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutText:
    """The text of a recorded rollout."""

    prompt: str
    completion: str
    token_ids: Sequence[int]
    policy_versions: Sequence[int]
    turns: Sequence[Mapping[str, Any]] = ()  # the messages of an episode


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """A rollout whose tensors are in the store."""

    request_id: str
    cell: ColumnRef
    num_prompt_tokens: int
    num_tokens: int  # of the completion
    min_version: int
    max_version: int
    finish_reason: FinishReason
    num_injected: int = 0  # completion tokens that are not trained on
    num_by_seat: tuple[int, ...] = ()  # for episodes: trained tokens by number of the seat
    # For episodes: the environment's reward, or why there is none.
    outcome: RewardResult | RewardFailure | None = None
    # Present if the request asks for it. The prompt is empty unless an environment made it.
    text: RolloutText | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutMetadata:
    """Data of a rollout besides its tokens, for functions over texts."""

    group_id: int
    index: int
    prompt_text: str
    metadata: Mapping[str, Any]
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTask(RolloutMetadata):
    """A rollout to score."""

    cell: ColumnRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The result of a score task."""

    outcome: RewardResult | RewardFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """The result of a score task whose rollout was in a lost shard."""


Score = Scored | Unreadable
ReportScores = Callable[[Mapping[int, Score]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRowsRef:
    """References to N rollouts, as a model's worker gets them; all sequences are parallel.

    Columns that one stage wrote share their list of cells, which so travels once.
    """

    cells: Mapping[str, Sequence[ColumnRef]]  # columns with a value per token
    scalars: Mapping[str, Sequence[float]]  # columns with a value per row
    group_ids: Sequence[int]
    group_sizes: Sequence[int]
    group_num_tokens: Sequence[int]  # trained tokens of the whole group
    origins: Sequence[RolloutMetadata] = ()  # for judges only
    seats: tuple[int, ...] | None = None  # seats whose tokens are trained on; None: all
    recorded_as: Sequence[int | None] = ()  # TrainRow.recorded_as, or empty if none is recorded

    def __len__(self) -> int:
        return len(self.group_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The columns that a stage has computed for N rows.

    Attributes:
        block: Columns with a value per token; the rows have the places 0 to N - 1.
        scalars: Columns with a value per row.
        failures: By place, rows without a judge's score. Their values are meaningless.
    """

    block: BlockRef | None = None
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    failures: Mapping[int, RewardFailure] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """Tokens that a running request has sampled since the replica's last report."""

    request_id: str
    start: int  # completion tokens before it
    cell: ColumnRef  # the columns token_ids, sampler_logprobs, policy_versions
    num_tokens: int
    min_version: int


class ReplicaDied(RuntimeError):
    """A replica that died, does not answer, has a failed engine or could not be started.

    The message gives the name and the reason. Its process is ended, and others can take over.
    """


class TrainerDied(RuntimeError):
    """A rank that died or does not answer, so that the trainer cannot continue.

    The message gives the rank and the reason.
    """


class PoolDied(RuntimeError):
    """Workers of a pool that die one after another. The message gives the reason."""


class RowsLost(RuntimeError):
    """Rows that cannot be read because their shard of the store is gone."""


class WeightsGone(RuntimeError):
    """Published weights that do not exist any more: they were replaced, or their trainer died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """New results of a replica."""

    finished: Sequence[FinishedRollout]
    parts: Sequence[StepPart] = ()  # occasional reports of long requests
    num_sampled: int = 0  # tokens of all requests since the last report


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdrawn:
    """Requests that a replica has given up while it sampled them.

    Attributes:
        request_ids: Requests that it does not sample any more and does not report as finished.
        parts: Their tokens that it has not reported before.
    """

    request_ids: Sequence[str] = ()
    parts: Sequence[StepPart] = ()


class Replica(Protocol):
    """A generation engine.

    Every method except `clean_up` raises ReplicaDied if the replica cannot continue.
    """

    @property
    def name(self) -> str:
        """Unique name: "rollout-0" is followed by "rollout-0.1" after a restart."""

    @property
    def node(self) -> str:
        """Node whose memory holds its rollouts; replicas on one node share the store's budget."""

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Sequence[ColumnRef]]
    ) -> None:
        """Sample requests; `priors` has, by request id, the parts of another replica."""

    async def collect(self) -> Collected:
        """Return the results since the last call; wait a bounded time for the first."""

    async def progress(self) -> Sequence[StepPart]:
        """Return all tokens of running requests that are not reported yet."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop sampling these requests; their rollouts finish as aborted."""

    async def withdraw(self, request_ids: Sequence[str]) -> Withdrawn:
        """Stop sampling these requests, so that another replica continues them.

        Requests that have finished, or that cannot move, are missing from the answer. `collect`
        returns them.
        """

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        """Load a new version of all models that sample there; return the pause in seconds.

        The load interrupts generation; if `delayed`, it waits for the running requests to end.

        Raises:
            WeightsGone: This version does not exist any more.
        """

    async def release(self) -> None:
        """Release the memory of its devices: weights and caches.

        Running requests keep their tokens. They, and those submitted meanwhile, continue after the
        next `update_weights`.
        """

    async def clean_up(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """End the remains of a dead replica, and reclaim its memory in the store.

        Rows that are still needed stay (StreamStore.live_rows).
        """


class Fleet(Protocol):
    """The source of new replicas."""

    async def start_worker(self, number: int) -> Replica:
        """Start the replica of a number (0 <= number < rollout.num_replicas).

        The previous replica of this number must have been cleaned up. Wait until the cluster has
        room for it and its engine runs with the weights of model.path. If cancelled, end all that
        was started.

        Raises:
            ReplicaDied: It could not be started.
        """


class Scorer(Protocol):
    """The reward workers."""

    async def score(self, tasks: Sequence[ScoreTask], report: ReportScores) -> None:
        """Score all tasks; call `report` with scores, by place, as they arrive."""


class Pool(Protocol):
    """Workers that share a stage's rows, such as those of a frozen model."""

    @property
    def num_workers(self) -> int:
        """Number of workers."""

    async def run(self, rows: StepRowsRef) -> Written:
        """Compute the columns of these rows on a free worker.

        A worker that dies is replaced, and its rows go to another one.

        Raises:
            RowsLost: Rows cannot be read.
            PoolDied: The replacements died too.
        """


class TrainerProxy(Protocol):
    """All ranks of a trained model.

    Calls are executed in the order in which they were made, whether or not earlier ones have
    returned. Once a call has failed, later calls fail too until `restart`.

    Every method raises TrainerDied if a rank dies. Numerical errors (FloatingPointError,
    ValueError), errors of a recipe's function (FunctionFailed) and lost rows (RowsLost) keep their
    types.
    """

    @property
    def num_data(self) -> int:
        """Number of shares into which rows are split: data-parallel ranks."""

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, which process that many micro-batches at once; 1 if none."""

    @property
    def attention_tokens(self) -> float:
        """Sequence length at which attention costs as many FLOPs as the rest of the model."""

    async def infer(
        self, writes: str, shares: Sequence[StepRowsRef], *, adapters: bool = True
    ) -> Sequence[Written]:
        """Compute the model's outputs for each share, as column `writes`.

        Without `adapters`, compute those of the model without its adapters.

        Raises:
            RowsLost: Rows cannot be read.
        """

    async def compute(self, stage: str, rows: StepRowsRef) -> Written:
        """Run a stage's function over all rows of a step, on the node with the tokens.

        Raises:
            RowsLost: Rows cannot be read.
        """

    async def accumulate(self, micro_batches: Sequence[Sequence[StepRowsRef]]) -> None:
        """Run forward and backward passes of micro-batches, each a share for every rank.

        Raises:
            RowsLost: Rows cannot be read.
        """

    async def optimizer_step(self, *, last: bool = True) -> StepResult:
        """Update the weights; return when the snapshot of the new state, if due, is safe.

        The `last` update on a step's rows makes a new version.
        """

    async def publish(self) -> WeightManifest:
        """Publish the current weights for the replicas."""

    async def watch(self) -> None:
        """Wait until a rank dies, even without a running call; then raise TrainerDied."""

    async def hold(self) -> None:
        """Copy the current state in memory, for a checkpoint; one copy at a time."""

    async def release(self) -> None:
        """Release the memory of its devices; the next call restores the state."""

    async def restart(self, step: int) -> int:
        """Restart all ranks after TrainerDied or RowsLost; return the steps of the restored state.

        The state is the newest complete one of at most `step` optimizer steps: a snapshot in
        memory, else the newest checkpoint, else the initial state. Earlier calls and accumulated
        gradients are forgotten.

        Raises:
            TrainerDied: The ranks could not be started. The call may be repeated.
        """

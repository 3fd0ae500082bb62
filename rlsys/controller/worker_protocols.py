"""What the controller asks of the actors: five protocols and the messages that travel.

Messages carry metadata only. Token ids and log-probabilities stay in the store's shared memory;
a `ColumnRef` says where.
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
    """What a recorded rollout said."""

    prompt: str
    completion: str
    token_ids: Sequence[int]
    policy_versions: Sequence[int]
    turns: Sequence[Mapping[str, Any]] = ()  # of an episode: who said what


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """A rollout whose tensors lie in the store."""

    request_id: str
    cell: ColumnRef
    num_prompt_tokens: int
    num_tokens: int  # of the completion
    min_version: int
    max_version: int
    finish_reason: FinishReason
    num_injected: int = 0  # completion tokens that are not trained on
    num_by_seat: tuple[int, ...] = ()  # of an episode: those that are, by number of the seat
    # Of an episode, whose environment says what it is worth: that, or why there is nothing.
    outcome: RewardResult | RewardFailure | None = None
    # Where the request asks for it. The prompt is empty unless an environment made it.
    text: RolloutText | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutMetadata:
    """What a function over texts is told of a rollout beside its tokens."""

    group_id: int
    index: int
    prompt_text: str
    metadata: Mapping[str, Any]
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTask(RolloutMetadata):
    cell: ColumnRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    outcome: RewardResult | RewardFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """The shard that held the rollout is gone; nothing was scored."""


Score = Scored | Unreadable
ReportScores = Callable[[Mapping[int, Score]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRowsRef:
    """N rollouts as a model's worker is given them; all sequences are parallel.

    Columns that one stage wrote share their list of cells, which so travels once.
    """

    cells: Mapping[str, Sequence[ColumnRef]]  # columns with a value per token: where they lie
    scalars: Mapping[str, Sequence[float]]  # columns with a value per row
    group_ids: Sequence[int]
    group_sizes: Sequence[int]
    group_num_tokens: Sequence[int]  # tokens of its whole group that are trained on
    origins: Sequence[RolloutMetadata] = ()  # for a judge alone
    seats: tuple[int, ...] | None = None  # whose tokens are trained on; None: all that were sampled

    def __len__(self) -> int:
        return len(self.group_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a stage has made of N rows: columns with a value per token as a block, whose places are
    the rows in their order; columns with a value per row as they are. `failures`, by place: of rows
    that a judge has no score for, whose values mean nothing.
    """

    block: BlockRef | None = None
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    failures: Mapping[int, RewardFailure] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """What a running request has sampled since the replica last told of it."""

    request_id: str
    start: int  # completion tokens before it
    cell: ColumnRef  # of the columns token_ids, sampler_logprobs, policy_versions
    num_tokens: int
    min_version: int


class ReplicaDied(RuntimeError):
    """A replica cannot go on: its process is gone or does not answer, its engine has failed, or it
    could not be started. The message names it and says why. Its process is ended; others can take
    over.
    """


class TrainerDied(RuntimeError):
    """A rank of the trainer is gone, or does not answer, so that none can go on; the message names
    it and says why.
    """


class PoolDied(RuntimeError):
    """Workers of a pool die one after another; the message says of what."""


class RowsLost(RuntimeError):
    """Rows could not be read: the shard of the store that held them is gone."""


class WeightsGone(RuntimeError):
    """A published version is not there any more: a newer one is, or its trainer has died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a replica has to tell."""

    finished: Sequence[FinishedRollout]
    parts: Sequence[StepPart] = ()  # what long running requests have sampled, now and then
    has_sampled: bool = False  # any token since it last told


class Replica(Protocol):
    """One generation engine. Every method but `clean_up` raises ReplicaDied when it cannot go
    on.
    """

    @property
    def name(self) -> str:
        """Of this life: "rollout-0" is followed by "rollout-0.1"."""

    @property
    def node(self) -> str:
        """The node in whose memory its rollouts lie; its replicas share the store's budget."""

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Sequence[ColumnRef]]
    ) -> None:
        """Sample; `priors` holds, by request id, the parts that another replica had sampled."""

    async def collect(self) -> Collected:
        """What has ended since the last call; waits a bounded time for the first."""

    async def progress(self) -> Sequence[StepPart]:
        """All that running requests have sampled and that was not told yet."""

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        """Load a new version, of all that sample there: in the middle of generation, or delayed
        until what runs has ended. Returns the pause in seconds. Raises WeightsGone.
        """

    async def release(self) -> None:
        """Let the memory of its devices go: weights and caches. What runs keeps its tokens, and
        goes on, like what is submitted meanwhile, after the next `update_weights`.
        """

    async def clean_up(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """The replica has died: end what is left of it, and take back the store's memory that it
        held, less the rows that are still needed (StreamStore.live_rows).
        """


class Fleet(Protocol):
    """Where replicas come from."""

    async def start_worker(self, number: int) -> Replica:
        """Start the replica of this number (0 <= number < rollout.num_replicas), whose life before
        has been cleaned_up. Waits as long as the cluster has no place for it, then until its engine
        runs, with the weights of model.path. Raises ReplicaDied if it could not be started.
        Cancelled: whatever was begun is ended.
        """


class Scorer(Protocol):
    async def score(self, tasks: Sequence[ScoreTask], tell: ReportScores) -> None:
        """Calls `tell` with scores by the task's place, in parts, as they come; returns when every
        task has one.
        """


class Pool(Protocol):
    """Workers that share a stage's rows: a frozen model's, for one."""

    @property
    def num_workers(self) -> int: ...

    async def run(self, rows: StepRowsRef) -> Written:
        """By whoever is free. A worker that dies is replaced, and its rows go to another; raises
        RowsLost, and PoolDied when its successors die too.
        """


class TrainerProxy(Protocol):
    """All ranks of a trained model. Calls are carried out one after another, in the order in which
    they were made, whether or not the one before has been answered. Once one has failed, those
    behind it fail too, and nothing but `restart` mends that.

    Every method raises LearnerDied for any death of a rank. An error of the mathematics
    (FloatingPointError, ValueError), or of a recipe's function (FunctionFailed), and rows that are
    gone (RowsLost), stay what they are.
    """

    @property
    def num_data(self) -> int:
        """Shares into which rows are split: ranks with rows of their own."""

    @property
    def num_stages(self) -> int:
        """Of a pipeline, which works on as many passes of one `accumulate` at once; 1 if none."""

    @property
    def attention_tokens(self) -> float:
        """Of a row, when attention to them costs as much as all the rest of the model does."""

    async def infer(
        self, writes: str, shares: Sequence[StepRowsRef], *, adapters: bool = True
    ) -> Sequence[Written]:
        """What the model says now, or would without its adapters, as column `writes`, of each
        share. Raises RowsLost.
        """

    async def compute(self, stage: str, rows: StepRowsRef) -> Written:
        """A stage's function over all rows of a step, where its numbers lie with the tokens. Raises
        RowsLost.
        """

    async def accumulate(self, passes: Sequence[Sequence[StepRowsRef]]) -> None:
        """Forward and backward of passes, each share on the ranks that it is for. Raises
        RowsLost.
        """

    async def optimizer_step(self, *, last: bool = True) -> StepResult:
        """Answers when the snapshot of the new state is safe, where one is due. The `last` update
        on a step's rows makes a new version.
        """

    async def publish(self) -> WeightManifest: ...

    async def watch(self) -> None:
        """Raises LearnerDied when a rank dies, also where nobody waits for its answer; waits until
        then.
        """

    async def hold(self) -> None:
        """Keep a copy of the state as it is now in memory, for a checkpoint that is written while
        training goes on; one at a time.
        """

    async def release(self) -> None:
        """Let the memory of its devices go; the next call brings the state back."""

    async def restart(self, step: int) -> int:
        """After LearnerDied or RowsLost: start all ranks anew, in places that exist, from the
        newest whole state of at most `step` optimizer steps: a snapshot in memory, else the newest
        checkpoint, else the beginning. Calls made before are forgotten, and so is what was
        accumulated since. Returns how many optimizer steps are behind that state; raises
        LearnerDied if the ranks could not be started, and may then be called again.
        """

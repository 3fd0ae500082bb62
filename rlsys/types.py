"""Data that processes exchange: prompts, rollouts, groups, micro-batches, weights.

Shapes: P prompt tokens, T completion tokens of a rollout.

All of it is plain data on the CPU (numpy, not torch), which is cheap to send between processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ExpertArray = npt.NDArray[np.integer[Any]]  # indices of experts, uint8 or int16
RolloutKey = tuple[int, int]  # group id, and index within the group


class FinishReason(StrEnum):
    """Reason for the end of a completion."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORTED = "aborted"  # cancelled; the tokens sampled so far are kept
    FAILED = "failed"  # the model gave no finite probabilities; see Generation.failure


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A completion from a dataset or another run."""

    text: str
    token_ids: tuple[int, ...]  # [T], with the end of sequence
    finish_reason: FinishReason = FinishReason.STOP
    loss_mask: tuple[bool, ...] | None = None  # [T], tokens to train on; None: all


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A tokenized row of a dataset. `index` counts the prompts of the whole run, over epochs."""

    index: int
    token_ids: tuple[int, ...]  # [P]
    text: str
    metadata: Mapping[str, Any]  # the other columns of the row
    row: int = -1  # index in the data, the same in each epoch; -1: not from the data
    completions: tuple[Completion, ...] = ()  # [G] existing completions, or empty
    asked: Any = None  # value of the prompt column, if a chat template rendered it
    shared_by: str = ""  # the other run that sampled the completions


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a completion.

    `sampler_logprobs` refer to the distribution at `temperature` before top-k, top-p and
    `structure` are applied, because the trainer recomputes the probabilities of this distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_at_eos: bool = True  # also at the model's end-of-sequence tokens
    # Required structure of the completion (rlsys.common.structural_tags); "": none. A token without
    # an alternative is INJECTED.
    structure: str = ""

    @property
    def greedy(self) -> SamplingParams:
        """The same parameters with the most likely token each time.

        Log-probabilities remain those at `temperature`, which the trainer recomputes. The seed
        decides among equally likely tokens.
        """
        return replace(self, top_p=1.0, top_k=1)


# policy_version of completion tokens that are not trained on: tokens that no policy sampled, tokens
# without an alternative, tokens of a greedy baseline, and tokens outside replies in a dataset's
# chats.
INJECTED = -1

# A rollout can be a tree. `branches` of a TrainRow has four numbers per branch: its own tokens, its
# parent (or NO_PARENT), the tokens of the parent's path before the branch, and the seat.
BRANCH_FIELDS, NO_PARENT = 4, -1
MAX_BRANCHES = 64  # of a rollout, for which the store reserves memory

# The oldest version of a completion without a sampled token: newer than every other.
NO_VERSION = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Policy versions of a completion's sampled tokens, and the number of other tokens."""

    oldest: int  # NO_VERSION without a sampled token
    newest: int  # 0 without a sampled token
    num_injected: int

    @classmethod
    def of(cls, versions: Int32Array) -> Sampled:
        """Return the summary of the versions [T] of a completion."""
        oldest = int(versions.min(initial=NO_VERSION))
        newest = int(versions.max(initial=0))
        if oldest != INJECTED:  # the usual case, and this runs for every rollout
            return cls(oldest=oldest, newest=newest, num_injected=0)
        sampled = versions[versions != INJECTED]
        return cls(
            oldest=int(sampled.min(initial=NO_VERSION)),
            newest=newest,
            num_injected=len(versions) - len(sampled),
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """A row that an environment plays, and the rollout that it becomes."""

    row: Mapping[str, Any]
    group_id: int
    index: int  # 0 .. group_size - 1
    group_size: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A completion to sample. A continued one has its earlier tokens at the end of the prompt."""

    request_id: str
    prompt_token_ids: Sequence[int]  # [P]
    sampling: SamplingParams
    seed: int
    # Completion tokens at the end of prompt_token_ids. The random stream continues after them, so
    # that a continued rollout equals an uninterrupted one.
    num_prior_tokens: int = 0
    # An existing completion to return instead of sampling one.
    completion: Completion | None = None
    # Whether to return the text too, for rollouts.jsonl.
    record: bool = False
    # Whether the completion is only a baseline, whose tokens are all written as INJECTED.
    is_baseline: bool = False
    # Keys and values of a sequence are reused only for requests with the same salt.
    cache_salt: str = ""
    # Waiting requests are admitted by descending priority, then in order of arrival.
    priority: int = 0
    # Number of tokens at the start of the prompt that an earlier request of the episode had too, if
    # known; all of them can be reused. Otherwise the torch engine reuses tokens up to a sampled one
    # (rlsys.engines.generation.torch.prefix_cache).
    num_shared_tokens: int = 0
    # Whether a later request may start with this prompt and completion. If not, the torch engine
    # does not cache them.
    goes_on: bool = True
    # Number of the adapter that samples, which the engine has loaded (AdapterEngine), and the
    # policy_version of the tokens. 0: the engine's own weights and version.
    adapter: int = 0
    # The task of an environment, which makes its own prompt. None: complete the prompt.
    task: Task | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The result of an engine for a request."""

    request_id: str
    token_ids: Int32Array  # [T], with the stop token at the end
    sampler_logprobs: Float32Array  # [T]
    policy_versions: Int32Array  # [T], INJECTED or non-decreasing
    finish_reason: FinishReason
    # [P + T - 1, L * K], for each token except the last: its K experts in each of the L layers of a
    # mixture. None: not recorded.
    routed_experts: ExpertArray | None = None
    failure: str = ""  # of a FAILED completion

    def until_failure(self) -> Generation:
        """Return the completion, as FAILED before the first log-probability that is not finite.

        Engines return nothing else, so that no token without a probability is trained.
        """
        is_bad = ~np.isfinite(self.sampler_logprobs)
        if not is_bad.any():
            return self
        first = int(is_bad.argmax())
        return replace(
            self,
            token_ids=self.token_ids[:first],
            sampler_logprobs=self.sampler_logprobs[:first],
            policy_versions=self.policy_versions[:first],
            finish_reason=FinishReason.FAILED,
            routed_experts=None,
            failure=f"token {first} of a completion has no finite probability "
            f"(log-probability {self.sampler_logprobs[first]}) with version "
            f"{self.policy_versions[first]} of the weights. The weights have diverged, or a "
            "forward pass exceeded the range of model.dtype or rollout.quantization. Lower the "
            "learning rate and continue from an earlier checkpoint, or use another precision.",
        )

    def raise_failure(self) -> None:
        """Raise the failure of a FAILED completion.

        Raises:
            FloatingPointError: A token has no finite probability.
        """
        if self.finish_reason is FinishReason.FAILED:
            raise FloatingPointError(self.failure)

    @property
    def as_baseline(self) -> Generation:
        """The same completion with all tokens INJECTED."""
        return replace(self, policy_versions=np.full_like(self.policy_versions, INJECTED))

    @classmethod
    def of_nothing(cls, request_id: str, finish_reason: FinishReason) -> Generation:
        """Return an empty completion."""
        return cls(
            request_id=request_id,
            token_ids=np.empty(0, np.int32),
            sampler_logprobs=np.empty(0, np.float32),
            policy_versions=np.empty(0, np.int32),
            finish_reason=finish_reason,
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A sampled episode, as reward functions receive it."""

    group_id: int
    index: int  # 0 .. group_size - 1 within the group
    prompt_text: str
    completion_text: str
    prompt_token_ids: Int32Array  # [P]
    token_ids: Int32Array  # [T] completion tokens
    finish_reason: FinishReason
    metadata: Mapping[str, Any]  # the dataset row's other columns


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """A rollout for training, without padding.

    `columns` has the inputs of the loss by name, one value per completion token:
    "sampler_logprobs", "advantages", "reference_logprobs", "values", "returns" and so on. A value
    of the whole row, such as its advantage, is repeated for each token.
    """

    prompt_token_ids: Int32Array  # [P]
    token_ids: Int32Array  # [T]
    policy_versions: Int32Array  # [T]
    loss_mask: BoolArray  # [T], False for tokens that the policy did not sample; may have gaps
    columns: Mapping[str, Float32Array]  # each [T], or [T * K] with K values per token
    group_id: int
    group_size: int
    group_num_tokens: int  # loss_mask tokens of the whole group, for per-prompt means
    # [(P + T - 1) * L * K]: experts that the sampler used for each input (Generation), which the
    # policy uses too. None: the policy chooses.
    routed_experts: ExpertArray | None = None
    # [4 B] branches of a tree, as rlsys.engines.models.branches reads them. None: each token
    # follows the one before it.
    branches: Int32Array | None = None
    # Index of the rollout within its group, if rollouts.jsonl records it (StepResult.gaps).
    recorded_as: int | None = None


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The rows of a forward and backward pass on one data-parallel rank; may be empty."""

    rows: Sequence[TrainRow]

    @property
    def num_tokens(self) -> int:
        """Number of prompt and completion tokens."""
        return sum(len(row.prompt_token_ids) + len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step (all weight updates from one batch).

    Everything but `train_s` and `gaps` is equal on all ranks.
    """

    policy_version: int  # after the step
    metrics: dict[str, float]  # loss, grad_norm, entropy, kl/sampler_trainer, staleness/..., ...
    num_tokens: int  # trained completion tokens
    train_s: float = 0.0  # the rank's work since the previous step, set by the caller of the engine
    gaps: Mapping[RolloutKey, Float32Array] = field(default_factory=dict)
    """log(μ/π_prox) of each token [T] of the recorded rollouts, NaN for untrained tokens."""


@dataclass(frozen=True, kw_only=True)
class DeviceHandle:
    """Memory of a GPU that other processes of its node can open."""

    handle: bytes
    num_bytes: int
    owner: int  # id of the process that allocated it


@dataclass(frozen=True, kw_only=True)
class WeightShare:
    """The part of a model version that one rank of a trainer has staged in memory of its node.

    The memory starts with a table of its tensors (rlsys.reallocation.transport.share_layout).
    """

    version: int
    rank: int
    node: str
    path: str
    num_bytes: int
    checksum: int  # of the digests of the bytes and of the table
    on_device: DeviceHandle | None = None  # memory of the tensors if they do not follow the table

    @property
    def host_bytes(self) -> int:
        """Bytes of the memory at `path`."""
        return self.num_bytes - (self.on_device.num_bytes if self.on_device else 0)


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """A published version of a model's weights.

    Together, the shares have each element of each parameter and persistent buffer, by Hugging Face
    name; tied ones appear once. On each node of the trainer, each element of its ranks appears
    once. Replicas without a model have no shares.
    """

    version: int
    shares: tuple[WeightShare, ...] = ()
    others: tuple[tuple[str, WeightManifest], ...] = ()  # this version of other policies, by name

    @property
    def num_bytes(self) -> int:
        """Bytes of all shares, including those of other policies."""
        own = sum(share.num_bytes for share in self.shares)
        return own + sum(other.num_bytes for _, other in self.others)

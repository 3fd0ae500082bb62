"""What travels: prompts, rollouts, groups, micro-batches, weights.

Shape legend: P prompt tokens, T completion tokens of one rollout.

Everything here is plain data on the CPU (numpy, not torch), cheap to send between processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ExpertArray = npt.NDArray[np.integer[Any]]  # numbers of experts, uint8 or int16


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context, was reached
    ABORTED = "aborted"  # cancelled; what was sampled so far is kept


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One that is there already, in a dataset or from another run, instead of a model sampling
    it.
    """

    text: str
    token_ids: tuple[int, ...]  # [T], the end of sequence included
    finish_reason: FinishReason = FinishReason.STOP
    loss_mask: tuple[bool, ...] | None = None  # [T], what is trained on; None: all of it


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One dataset row, tokenized. `index` counts prompts over the whole run, epochs included."""

    index: int
    token_ids: tuple[int, ...]  # [P]
    text: str
    metadata: Mapping[str, Any]  # the row's columns other than the prompt
    row: int = -1  # of the data, the same in each epoch; -1: of none
    completions: tuple[Completion, ...] = ()  # [G] where they are there already, else none
    asked: Any = None  # the prompt column's value, where a chat template made the text of it
    shared_by: str = ""  # the run that sampled the completions, where it was another


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled.

    `sampler_logprobs` are taken under the distribution at `temperature`, before top-k, top-p and
    `structure` cut it, because that is the distribution whose probabilities the trainer recomputes.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    # What the completion must look like (rlsys.common.structural_tags); "": anything. A token
    # without an alternative is INJECTED.
    structure: str = ""

    @property
    def greedy(self) -> SamplingParams:
        """The likeliest token each time, as at temperature 0; the seed decides among equals. The
        log-probabilities stay those at `temperature`, which a trainer recomputes.
        """
        return replace(self, top_p=1.0, top_k=1)


# policy_version of a token that is part of the completion and not trained on: one that no policy
# sampled or that had no alternative, one of a greedy baseline, or, in a chat of a dataset, one of
# no reply.
INJECTED = -1

# A rollout may be a tree: numbers that each branch has, in `branches` of a TrainRow (own tokens,
# parent, tokens of the parent's path that it stands behind, seat), and the parent of one that has
# none.
BRANCH_FIELDS, NO_PARENT = 4, -1
MAX_BRANCHES = 64  # of a rollout; the store keeps room for so many


# The oldest version of a completion without a sampled token: newer than every other.
NO_VERSION = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a completion's versions say of its tokens."""

    oldest: int  # policy_version of a sampled token; NO_VERSION where there is none
    newest: int  # 0 where there is none
    num_injected: int

    @classmethod
    def of(cls, versions: Int32Array) -> Sampled:
        oldest = int(versions.min(initial=NO_VERSION))
        newest = int(versions.max(initial=0))
        if oldest != INJECTED:  # nearly always, and this is called for every rollout
            return cls(oldest=oldest, newest=newest, num_injected=0)
        sampled = versions[versions != INJECTED]
        return cls(
            oldest=int(sampled.min(initial=NO_VERSION)),
            newest=newest,
            num_injected=len(versions) - len(sampled),
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an environment plays: the dataset's row, and which rollout of which group it makes."""

    row: Mapping[str, Any]
    group_id: int
    index: int  # 0 .. group_size - 1
    group_size: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One completion to sample. A continued one carries its earlier tokens at the prompt's end."""

    request_id: str
    prompt_token_ids: Sequence[int]  # [P]
    sampling: SamplingParams
    seed: int
    # Completion tokens that stand already at the end of prompt_token_ids: the random stream goes
    # on after them, so that a continued rollout draws what an uninterrupted one would have drawn.
    num_prior_tokens: int = 0
    # What to answer where the completion is there already; None: what the model samples.
    completion: Completion | None = None
    # Its text is returned too, for rollouts.jsonl.
    record: bool = False
    # It is only compared with: whoever writes it marks all of its tokens as INJECTED.
    is_baseline: bool = False
    # Keys and values of a sequence are reused only for requests with the same salt.
    cache_salt: str = ""
    # Among waiting requests the highest is admitted first, equal ones in the order they came.
    priority: int = 0
    # The first tokens of the prompt that an earlier request of the same episode had too, where its
    # author knows: all of them may be reused. Otherwise the torch engine reuses what reaches up to
    # a sampled token (rlsys.engines.generation.torch.prefix_cache).
    num_shared_tokens: int = 0
    # Whether a later request may begin with what this one comes to; otherwise the torch engine
    # keeps nothing of it.
    goes_on: bool = True
    # It is played by an environment, which makes its own prompt; None: the prompt is completed.
    task: Task | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What an engine returns for one request."""

    request_id: str
    token_ids: Int32Array  # [T], the closing stop token included
    sampler_logprobs: Float32Array  # [T]
    policy_versions: Int32Array  # [T], INJECTED, or of weights that never grow older
    finish_reason: FinishReason
    # [P + T - 1, L * K], of every token that another was sampled behind: the K experts that it went
    # to in each of the L layers of a mixture. None: not recorded.
    routed_experts: ExpertArray | None = None

    def check_sampled(self) -> None:
        """Raise FloatingPointError for a log-probability that is no number. Nobody samples with
        such a one; where a dataset has it, it says that nobody has sampled.
        """
        is_bad = ~np.isfinite(self.sampler_logprobs)
        if is_bad.any():
            first = int(is_bad.argmax())
            raise FloatingPointError(
                f"{int(is_bad.sum())} of {len(is_bad)} sampled tokens have a log-probability that "
                f"is no number, first {self.sampler_logprobs[first]} of token "
                f"{self.token_ids[first]} by version {self.policy_versions[first]} of the weights: "
                "a pass left the range of model.dtype, or of what rollout.quantization makes of "
                "it; use another precision."
            )

    @property
    def as_baseline(self) -> Generation:
        """The same, with no token that is trained on."""
        return replace(self, policy_versions=np.full_like(self.policy_versions, INJECTED))

    @classmethod
    def of_nothing(cls, request_id: str, finish_reason: FinishReason) -> Generation:
        return cls(
            request_id=request_id,
            token_ids=np.empty(0, np.int32),
            sampler_logprobs=np.empty(0, np.float32),
            policy_versions=np.empty(0, np.int32),
            finish_reason=finish_reason,
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled episode, as a reward function sees it."""

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
    """One rollout as a model sees it; ragged, no padding.

    `columns` hold what the loss asks for, a value a completion token, by the name that the loss
    gives it: "sampler_logprobs", "advantages", "reference_logprobs", "values", "returns" and so on.
    What a row has one of (its advantage) stands at each of its tokens.
    """

    prompt_token_ids: Int32Array  # [P]
    token_ids: Int32Array  # [T]
    policy_versions: Int32Array  # [T]
    loss_mask: BoolArray  # [T], False for tokens that the policy did not sample; may have gaps
    columns: Mapping[str, Float32Array]  # each [T], or [T * K] where a token has K values
    group_id: int
    group_size: int
    group_num_tokens: int  # loss_mask tokens of the whole group, for per-prompt means
    # [(P + T - 1) * L * K]: the experts that the sampler sent each input to (Generation), which the
    # policy follows; None: it chooses itself
    routed_experts: ExpertArray | None = None
    # [4 B] of a tree, as rlsys.engines.models.branches reads them; None: every token stands behind
    # the one before it
    branches: Int32Array | None = None


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of one forward and backward pass on one data-parallel rank; may be empty."""

    rows: Sequence[TrainRow]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.prompt_token_ids) + len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step: all updates of the weights by one batch, on all ranks; equal on every rank."""

    policy_version: int  # after the step
    metrics: dict[str, float]  # loss, grad_norm, entropy, kl/sampler_trainer, staleness/..., ...
    num_tokens: int  # trained completion tokens
    train_s: float = 0.0  # the rank's work since the step before, told by whoever calls its engine


@dataclass(frozen=True, kw_only=True)
class WeightShare:
    """What one rank of a trainer has staged of a version of its model: in memory of its node, which
    tells what lies where (rlsys.reallocation.transport.staging).
    """

    version: int
    rank: int
    node: str
    path: str
    num_bytes: int
    checksum: int
    """Of the digests of its bytes and the table of what they are."""


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """One published version of a model's weights.

    The shares have every element of every parameter and persistent buffer, by Hugging Face name;
    tied ones appear once. On each node of the trainer each element that a rank there holds appears
    once. None at all, for replicas that run no model.
    """

    version: int
    shares: tuple[WeightShare, ...] = ()
    others: tuple[tuple[str, WeightManifest], ...] = ()
    """The same version of other models that sample beside it, by their names."""

    @property
    def num_bytes(self) -> int:
        own = sum(share.num_bytes for share in self.shares)
        return own + sum(other.num_bytes for _, other in self.others)

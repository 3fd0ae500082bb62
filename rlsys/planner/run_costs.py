"""Costs of a run's workers on given hardware, for the simulation.

    Architecture + Cluster + GenerationPlan ──► PlannedReplica (decode steps, prefills, loads)
    Architecture + Cluster + TrainingPlan   ──► PlannedTrainer (micro-batches, optimizer steps)

Both look up the closed forms on a grid of sizes whose steps are a few percent, so that a run of
many steps asks each question once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlsys.dataflow.scheduling.microbatch_plan import GroupLengths
from rlsys.planner.architecture import Architecture
from rlsys.planner.decode_time import decode_parts, prefill_seconds
from rlsys.planner.hardware import GB, Cluster
from rlsys.planner.memory import rank_states
from rlsys.planner.plans import GenerationPlan, TrainingPlan
from rlsys.planner.profiles import Constants
from rlsys.planner.training_time import train_step_time

# Ratios of neighbouring grid points: of numbers of rows, of tokens, of contexts.
ROW_STEP, TOKEN_STEP, CONTEXT_STEP = 1.05, 1.05, 1.1

# Share of a step's forward and backward passes that a forward pass takes, by recompute.
FORWARD_SHARE = {"full": 0.27, "selective": 0.31}
PLAIN_FORWARD_SHARE = 0.34

MIN_TOKENS = 16.0


def on_grid(value: float, step: float) -> float:
    """Return the power of `step` that is closest to a value of at least 1."""
    return step ** round(math.log(max(value, 1.0)) / math.log(step))


def load_seconds(
    model: Architecture, cluster: Cluster, plan: GenerationPlan, constants: Constants
) -> float:
    """Return the seconds in which a replica loads new weights."""
    size = cluster.gpu.value_bytes * model.parameters
    return size / plan.num_gpus / (constants["sync_gb_s"] * GB)


def release_seconds(model: Architecture, plan: TrainingPlan, cluster: Cluster) -> float:
    """Return the seconds in which a trainer's states move off and onto its devices, over PCIe."""
    states = sum(rank_states(model, cluster, plan).values())
    return 2 * states / (cluster.gpu.pcie * GB)


@dataclass(kw_only=True)
class PlannedReplica:
    """Seconds of a replica. The closed forms are those of decode_time.py."""

    model: Architecture
    cluster: Cluster
    plan: GenerationPlan
    constants: Constants
    prompt_tokens: float
    _decode_s: dict[tuple[float, float], float] = field(default_factory=dict)
    _prefill_s: dict[float, float] = field(default_factory=dict)

    @property
    def load_s(self) -> float:
        """Pause of generation while new weights are loaded."""
        return load_seconds(self.model, self.cluster, self.plan, self.constants)

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Return the time of one decode step."""
        mean_context = max(context_tokens / num_sequences, MIN_TOKENS)
        rows = on_grid(num_sequences, ROW_STEP)
        context = min(on_grid(mean_context, CONTEXT_STEP), self.model.max_context)
        key = (rows, context)
        if key not in self._decode_s:
            parts = decode_parts(self.model, self.cluster, self.plan, *key, self.constants)
            self._decode_s[key] = sum(parts.values()) * self.constants["rl_generation"]
        return self._decode_s[key]

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time to compute the keys and values of new tokens, in rows of a prompt."""
        rows = on_grid(num_tokens / self.prompt_tokens, ROW_STEP)
        if rows not in self._prefill_s:
            self._prefill_s[rows] = prefill_seconds(
                self.model, self.cluster, self.plan, rows, self.prompt_tokens, self.constants
            )
        return self._prefill_s[rows]


@dataclass(kw_only=True)
class PlannedTrainer:
    """Seconds of a trainer's ranks. The closed forms are those of training_time.py.

    A micro-batch holds rows of any lengths, so it is one packed row: its tokens give the products,
    and the length of the row that a token attends to gives the attention.
    """

    model: Architecture
    cluster: Cluster
    plan: TrainingPlan
    constants: Constants
    num_groups: int = 0
    _micro_s: dict[tuple[float, float], float] = field(default_factory=dict)

    @property
    def optimizer_s(self) -> float:
        """Time of an optimizer step, with the pipeline's bubble and the reduction of gradients."""
        tokens = self.plan.row_tokens * self.plan.micro_batch
        return max(0.0, self._step_s(tokens, tokens, 1) - self._micro_batch_s(tokens, tokens))

    @property
    def publish_s(self) -> float:
        """The rest of a step, counted as its publication. The replicas' loads count the weights."""
        return self.constants.rest_s * self.num_groups

    @property
    def release_s(self) -> float:
        """Time to move the states off and onto the device over PCIe."""
        return release_seconds(self.model, self.plan, self.cluster)

    def train_s(self, groups: Sequence[GroupLengths]) -> float:
        """Return the time of the forward and backward passes of a micro-batch."""
        tokens, attended = shape_of(groups)
        return self._micro_batch_s(tokens, attended) * self.constants["rl_training"]

    def infer_s(self, groups: Sequence[GroupLengths]) -> float:
        """Return the time of a forward pass of a micro-batch."""
        share = FORWARD_SHARE.get(self.plan.recompute, PLAIN_FORWARD_SHARE)
        return share * self._micro_batch_s(*shape_of(groups))

    def _micro_batch_s(self, tokens: float, attended: float) -> float:
        key = (on_grid(max(tokens, MIN_TOKENS), TOKEN_STEP), on_grid(attended, CONTEXT_STEP))
        if key not in self._micro_s:
            self._micro_s[key] = self._step_s(*key, 2) - self._step_s(*key, 1)
        return self._micro_s[key]

    def _step_s(self, tokens: float, attended: float, micro_batches: int) -> float:
        plan = replace(
            self.plan,
            row_tokens=tokens,
            micro_batch=1.0,
            micro_batches=micro_batches,
            attended_tokens=min(attended, tokens),
        )
        return train_step_time(self.model, self.cluster, plan, constants=self.constants).seconds


def shape_of(groups: Sequence[GroupLengths]) -> tuple[float, float]:
    """Return the tokens of a micro-batch and the mean length of the row that a token is in.

    The rows of a group share the computation of its prompt.
    """
    tokens = squares = 0.0
    for group in groups:
        longest = max(group.completions, default=0)
        tokens += group.prompt + sum(group.completions)
        squares += group.prompt * (group.prompt + longest)
        squares += sum(one * (group.prompt + one) for one in group.completions)
    return (tokens, squares / tokens) if tokens else (0.0, 0.0)

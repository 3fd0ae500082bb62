"""Roles of a model in an algorithm, which follow from its head.

    logits   policy, reference, teacher   rows ─► log-probabilities of completion tokens
    value    critic                       rows ─► values of the text before each completion token
    score    reward model                 rows ─► a score of each row

A role defines how rows become a batch, the inputs of a loss, and the results of inference. The
training engine adds an optimizer; the inference engine uses a role without one.

Shape legend: N places of a micro-batch: completion tokens with loss mask 1, or rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rlsys import metrics
from rlsys.algorithms import kl
from rlsys.algorithms.loss_inputs import (
    LossInputs,
    ScoreInputs,
    TokenLoss,
    ValueInputs,
    candidates_of,
    needs_of,
    required_columns,
    uses_advantages,
    whole_groups,
)
from rlsys.common.user_functions import name_of
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.collate import CollatedBatch, collate, collate_whole
from rlsys.engines.models.fused_elementwise import use_fused_elementwise
from rlsys.engines.models.hidden_states import hidden_shape
from rlsys.engines.models.lazy_tensors import LazyTensor
from rlsys.engines.models.loss_calls import call_loss
from rlsys.engines.models.rms_norm import use_fast_norms
from rlsys.engines.models.scalar_lm import load_scalar_lm
from rlsys.engines.models.scalar_network import ScalarNetwork, scoring_network
from rlsys.engines.models.token_policy import GPU_MAX_LOGITS, MAX_LOGITS, TokenPolicy
from rlsys.engines.models.weight_files import take_lazy_tensors
from rlsys.engines.training.parallel.pipeline import PipelineStage
from rlsys.errors import InvalidValue, require
from rlsys.types import TrainRow

HeadKind = Literal["logits", "value", "score"]
Loss = Callable[[Any], TokenLoss]  # argument: LossInputs, ValueInputs or ScoreInputs of the role

SAMPLER, PROXIMAL, ADVANTAGES = "sampler_logprobs", "proximal_logprobs", "advantages"


class Role(ABC):
    """A network and its use."""

    unit = "token"  # a loss has one value per unit

    def __init__(self, network: Any, device: torch.device) -> None:
        self.network = network
        self.device = device
        self.hidden_dtype = torch.float32  # precision of hidden states between layers
        self.unread: Mapping[str, LazyTensor] = {}
        """Weights of a network on the meta device, by their names in the model."""

    @property
    def packs(self) -> bool:
        """Rows may be packed into one row. Otherwise they must be padded."""
        packs: bool = self.network.packs
        return packs

    @property
    def shares(self) -> bool:
        """Packed rows may store a shared prefix once."""
        shares: bool = self.network.shares
        return shares

    def num_trained(self, row: TrainRow) -> int:
        """Return the number of places of a row that a loss covers."""
        return int(row.loss_mask.sum())

    def num_in_group(self, row: TrainRow) -> int:
        """Return the number of places of all rows in a row's group."""
        return row.group_num_tokens

    def num_inferred(self, row: TrainRow) -> int:
        """Return the number of values that inference gives for a row."""
        return len(row.token_ids)

    def columns(self, loss: Loss, rows: Sequence[TrainRow]) -> list[str]:
        """Return the columns that a loss needs. Raises InvalidValue if a row lacks one."""
        names = self._needed_columns(loss, rows)
        for row in rows:
            if missing := [name for name in names if name not in row.columns]:
                raise InvalidValue(
                    f"loss {name_of(loss)}: column",
                    missing[0],
                    rule=f"is missing in a rollout of group {row.group_id}, which has "
                    f"{', '.join(row.columns) or 'none'}",
                    fix="Add a stage before training that writes it.",
                )
        return names

    def check_groups(self, loss: Loss, rows: Sequence[TrainRow]) -> None:
        """Raise InvalidValue unless the groups are whole, if the loss compares rows of a group."""
        if not whole_groups(loss):
            return
        found: dict[int, int] = {}
        for row in rows:
            found[row.group_id] = found.get(row.group_id, 0) + 1
        for row in rows:
            require(
                found[row.group_id] == row.group_size,
                f"loss {name_of(loss)}: rows of group {row.group_id} in a micro-batch",
                found[row.group_id],
                rule=f"must be all {row.group_size}, because the loss compares them",
                fix="Put all rows of a group into the same micro-batch.",
            )

    def collate(self, rows: Sequence[TrainRow], columns: Sequence[str] = ()) -> CollatedBatch:
        """Return the batch of one forward pass over these rows."""
        return collate(rows, self.device, packed=self.packs, shares=self.shares, columns=columns)

    @property
    def stage(self) -> PipelineStage | None:
        """Pipeline stage of this rank; None if the rank has all layers."""
        stage: PipelineStage | None = getattr(self.network, "stage", None)
        return stage

    def hidden_buffer(self, batch: CollatedBatch) -> torch.Tensor:
        """Allocate a tensor that receives a batch's hidden states from the previous stage."""
        width = self.network.model.config.get_text_config().hidden_size
        shape = hidden_shape(batch, self.network.mesh)
        return torch.empty(*shape, width, dtype=self.hidden_dtype, device=self.device)

    @abstractmethod
    def run(self, batch: CollatedBatch, received: torch.Tensor | None, **options: Any) -> Any:
        """Run the network over a batch, or over hidden states of the previous stage."""

    @abstractmethod
    def learn(
        self,
        loss: Loss,
        batch: CollatedBatch,
        staleness: torch.Tensor,
        received: torch.Tensor | None = None,
    ) -> TokenLoss:
        """Return the loss at each place [N], and metrics [N], with gradient."""

    def infer(self, passes: Sequence[Sequence[TrainRow]]) -> Iterator[torch.Tensor]:
        """Yield `num_inferred` numbers of each row, flat, for each micro-batch.

        Ranks without a head yield zeros.
        """
        if self.stage is None:
            for rows in passes:
                yield self._output(self._whole(rows), None)
            return
        batches = [self._whole(rows) for rows in passes]
        outputs = self.stage.infer(
            len(batches),
            lambda number, received: self._output(batches[number], received),
            lambda number: self.hidden_buffer(batches[number]),
        )
        for rows, numbers in zip(passes, outputs, strict=True):
            num_numbers = sum(self.num_inferred(row) for row in rows)
            yield torch.zeros(num_numbers, device=self.device) if numbers is None else numbers

    def _whole(self, rows: Sequence[TrainRow]) -> CollatedBatch:
        """Return a batch that reads all places of the rows, ignoring their loss masks."""
        return self.collate([_unmasked(row) for row in rows])

    def _output(self, batch: CollatedBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Return the network's outputs, or hidden states if this is not the last stage."""
        output: torch.Tensor = self.run(batch, received)
        return output

    def _needed_columns(self, loss: Loss, rows: Sequence[TrainRow]) -> list[str]:
        return list(needs_of(loss))

    def _call_loss(self, loss: Loss, inputs: Any, of: str) -> TokenLoss:
        """Call a loss on inputs whose field `of` carries the gradient."""
        return call_loss(loss, inputs, count=len(getattr(inputs, of)), unit=self.unit, of=of)


class Policy(Role):
    """A language model: the policy, a reference or a teacher."""

    def __init__(self, network: TokenPolicy, device: torch.device, temperature: float) -> None:
        super().__init__(network, device)
        self._temperature = temperature

    def run(self, batch: CollatedBatch, received: torch.Tensor | None, **options: Any) -> Any:
        """Return log-probabilities, entropies and candidates' log-probabilities."""
        return self.network(batch, self._temperature, received=received, **options)

    def learn(
        self,
        loss: Loss,
        batch: CollatedBatch,
        staleness: torch.Tensor,
        received: torch.Tensor | None = None,
    ) -> TokenLoss:
        """Return the loss of each token [N], and metrics [N] with entropy and KL divergence."""
        named = candidates_of(loss)
        tokens = None if named is None else _token_ids(batch.columns[named])
        logprobs, entropy, candidates = self.run(batch, received, candidates=tokens)
        own = logprobs.detach()
        # Without a stage that wrote proximal_logprobs, the policy at the start of the step is the
        # current policy. Tokens that were not sampled in this run have no sampler_logprobs (NaN).
        proximal = batch.columns.get(PROXIMAL, own)
        sampler = batch.columns.get(SAMPLER, own)
        sampler = torch.where(sampler.isnan(), proximal, sampler)
        advantages = batch.columns.get(ADVANTAGES)
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            proximal_logprobs=proximal,
            sampler_logprobs=sampler,
            advantages=torch.zeros_like(own) if advantages is None else advantages,
            entropy=entropy,
            staleness=staleness,
            row_index=batch.row_index,
            group_index=batch.group_ids,
            columns={name: batch.columns[name] for name in needs_of(loss)},
            candidate_logprobs=candidates,
        )
        losses, values = self._call_loss(loss, inputs, "trainer_logprobs")
        values |= {metrics.ENTROPY: entropy}
        # Decided by the loss, not by this batch, so that all ranks report the same metrics.
        if uses_advantages(loss):
            values |= {
                metrics.KL_SAMPLER_TRAINER: kl.k1(sampler, proximal),
                metrics.KL_SAMPLER_TRAINER_K3: kl.k3(sampler, proximal),
            }
        return losses, values

    def infer_likeliest(
        self, passes: Sequence[Sequence[TrainRow]], top_k: int, *, with_own: bool
    ) -> Iterator[torch.Tensor]:
        """Yield [tokens, 2 top_k + 1] per micro-batch, as TokenPolicy.likeliest returns them.

        `with_own` puts the log-probability of the row's token before each distribution.
        """
        for rows in passes:
            own, found = self.network.likeliest(self._whole(rows), self._temperature, top_k)
            yield torch.cat((own[:, None], found), dim=-1) if with_own else found

    def _output(self, batch: CollatedBatch, received: torch.Tensor | None) -> torch.Tensor:
        found = self.run(batch, received, with_entropy=False)
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return output

    def _needed_columns(self, loss: Loss, rows: Sequence[TrainRow]) -> list[str]:
        # Rows of a loss without advantages may come from a dataset, without sampler_logprobs.
        names = [*required_columns(loss)]
        optional = [name for name in (PROXIMAL, SAMPLER) if name not in names]
        return names + [name for name in optional if any(name in row.columns for row in rows)]


class Scalar(Role):
    """A model with one number per place."""

    field: str  # field of the loss's inputs that holds the numbers
    metric: str  # name of the metric with their mean

    @abstractmethod
    def inputs(self, numbers: torch.Tensor, batch: CollatedBatch) -> Any:
        """Return the loss's inputs, with these numbers [N]."""

    def learn(
        self,
        loss: Loss,
        batch: CollatedBatch,
        staleness: torch.Tensor,
        received: torch.Tensor | None = None,
    ) -> TokenLoss:
        """Return the loss of each place [N], and metrics [N]."""
        numbers = self.run(batch, received)
        losses, values = self._call_loss(loss, self.inputs(numbers, batch), self.field)
        return losses, {**values, self.metric: numbers}


class Critic(Scalar):
    """A model with a value for the text before each completion token."""

    field, metric = "values", metrics.VALUE_MEAN

    def run(self, batch: CollatedBatch, received: torch.Tensor | None, **options: Any) -> Any:
        """Return values [N]."""
        return self.network(batch, received=received)

    def inputs(self, numbers: torch.Tensor, batch: CollatedBatch) -> ValueInputs:
        """Return the inputs of a value loss."""
        return ValueInputs(values=numbers, row_index=batch.row_index, columns=batch.columns)


class RewardModel(Scalar):
    """A model with one score per row."""

    unit = "row"
    field, metric = "scores", metrics.SCORE_MEAN

    def num_trained(self, row: TrainRow) -> int:
        """Return 1: a row has one score."""
        return 1

    def num_in_group(self, row: TrainRow) -> int:
        """Return the number of rows in a row's group."""
        return row.group_size

    def num_inferred(self, row: TrainRow) -> int:
        """Return 1: a row has one score."""
        return 1

    def collate(self, rows: Sequence[TrainRow], columns: Sequence[str] = ()) -> CollatedBatch:
        """Return the batch of one forward pass over whole rows."""
        return collate_whole(
            rows,
            self.device,
            packed=self.packs,
            shares=self.shares,
            columns=columns,
            unread=self.network.unread,
            fill=self.network.fill,
        )

    def run(self, batch: CollatedBatch, received: torch.Tensor | None, **options: Any) -> Any:
        """Return scores [N]."""
        # A WholeScorer takes no `received`, and is never split into stages.
        return self.network(batch) if received is None else self.network(batch, received)

    def inputs(self, numbers: torch.Tensor, batch: CollatedBatch) -> ScoreInputs:
        """Return the inputs of a loss over scores."""
        return ScoreInputs(scores=numbers, group_index=batch.group_ids, columns=batch.columns)


def load_role(
    path: str | Path,
    *,
    head: HeadKind,
    dtype: str,
    trained: bool,
    temperature: float,
    device: torch.device,
) -> Role:
    """Load the model of a directory in its role, on the CPU.

    `temperature` applies to log-probabilities. A `trained` model may begin without a head of one
    output, and its weights stay `unread` if they can be read in parts.

    Raises InvalidValue for a directory without such a model, or an unsupported architecture.
    """
    if head == "logits":
        model = load_causal_lm(path, dtype=dtype, lazy=trained)
    else:
        model = load_scalar_lm(path, dtype=dtype, fresh_head=trained, lazy=trained)
    unread = take_lazy_tensors(model)
    on_gpu = device.type == "cuda"
    if trained or on_gpu:
        use_fast_norms(model, fused=on_gpu)
    if on_gpu:
        use_fused_elementwise(model)
    role = role_of(model, head, device, temperature)
    role.unread = unread
    return role


def role_of(
    model: Any,
    head: HeadKind,
    device: torch.device,
    temperature: float,
    *,
    on_gpu: bool | None = None,
) -> Role:
    """Return a loaded model in its role. Raises InvalidValue for an unsupported architecture.

    `on_gpu` selects the chunk sizes of a GPU; by default if the device is one. Estimates of a GPU's
    memory set it on the CPU.
    """
    on_gpu = device.type == "cuda" if on_gpu is None else on_gpu
    if head == "logits":
        max_logits = GPU_MAX_LOGITS if on_gpu else MAX_LOGITS
        return Policy(TokenPolicy(model, max_logits=max_logits), device, temperature)
    if head == "value":
        return Critic(ScalarNetwork(model), device)
    return RewardModel(scoring_network(model), device)


def _token_ids(likeliest: torch.Tensor) -> torch.Tensor:
    """Return the ids [N, K] int64 of a column [N, 2K + 1]; [0, 0] for an empty column."""
    if likeliest.ndim == 1:
        return likeliest.new_zeros(len(likeliest), 0, dtype=torch.int64)
    return likeliest[:, : likeliest.shape[1] // 2].long()


def _unmasked(row: TrainRow) -> TrainRow:
    return replace(row, loss_mask=np.ones(len(row.token_ids), np.bool_))

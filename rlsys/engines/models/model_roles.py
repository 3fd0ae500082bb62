"""What a model is in an algorithm, told by its head.

    logits   policy, reference, teacher   rows ─► log-probabilities of completion tokens
    value    critic                       rows ─► values of the text before each completion token
    score    reward model                 rows ─► a score of each row

A role says how rows become a pass, what a loss gets of it, and what is inferred of it. The training
engine uses it in front of an optimizer, the inference engine without one.

Shape legend: N places of a pass: completion tokens with loss mask 1, or rows.
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
from rlsys.engines.models.weight_files import take_promises
from rlsys.engines.training.parallel.pipeline import PipelineStage
from rlsys.types import TrainRow

HeadKind = Literal["logits", "value", "score"]
Loss = Callable[[Any], TokenLoss]  # of the inputs that the role makes

SAMPLER, PROXIMAL, ADVANTAGES = "sampler_logprobs", "proximal_logprobs", "advantages"


class Role(ABC):
    """A network and what it is for."""

    unit = "token"  # of which a loss has one value

    def __init__(self, network: Any, device: torch.device) -> None:
        self.network = network
        self.device = device
        self.hidden_dtype = torch.float32  # in which layers compute
        self.unread: Mapping[str, LazyTensor] = {}
        """Weights of a network that is on the meta device, by their names in its model."""

    @property
    def packs(self) -> bool:
        packs: bool = self.network.packs
        return packs

    @property
    def shares(self) -> bool:
        shares: bool = self.network.shares
        return shares

    def num_trained(self, row: TrainRow) -> int:
        """Places of a row that a loss is about."""
        return int(row.loss_mask.sum())

    def num_in_group(self, row: TrainRow) -> int:
        """Those of all rows of its group."""
        return row.group_num_tokens

    def num_inferred(self, row: TrainRow) -> int:
        return len(row.token_ids)

    def columns(self, loss: Loss, rows: Sequence[TrainRow]) -> list[str]:
        """Names of those that a pass has to have. Raises ValueError if a row lacks one."""
        names = self._asked(loss, rows)
        for row in rows:
            if missing := [name for name in names if name not in row.columns]:
                raise ValueError(
                    f"{name_of(loss)} needs the column {missing[0]}, but a rollout of group "
                    f"{row.group_id} has only {', '.join(row.columns) or 'none'}; let a stage "
                    "before the training write it."
                )
        return names

    def check_groups(self, loss: Loss, rows: Sequence[TrainRow]) -> None:
        """Raise ValueError unless the groups are whole, where the loss is about whole ones."""
        if not whole_groups(loss):
            return
        found: dict[int, int] = {}
        for row in rows:
            found[row.group_id] = found.get(row.group_id, 0) + 1
        for row in rows:
            if found[row.group_id] != row.group_size:
                raise ValueError(
                    f"{name_of(loss)} compares the rows of a group, but {found[row.group_id]} of "
                    f"the {row.group_size} rows of group {row.group_id} are in a micro-batch; put "
                    "all of them into the same one."
                )

    def collate(self, rows: Sequence[TrainRow], columns: Sequence[str] = ()) -> CollatedBatch:
        return collate(rows, self.device, packed=self.packs, shares=self.shares, columns=columns)

    @property
    def stage(self) -> PipelineStage | None:
        """Which of the layers this rank has, if not all."""
        stage: PipelineStage | None = getattr(self.network, "stage", None)
        return stage

    def room(self, batch: CollatedBatch) -> torch.Tensor:
        """For the hidden states of a batch that the stage before gives."""
        width = self.network.model.config.get_text_config().hidden_size
        shape = hidden_shape(batch, self.network.mesh)
        return torch.empty(*shape, width, dtype=self.hidden_dtype, device=self.device)

    @abstractmethod
    def run(self, batch: CollatedBatch, received: torch.Tensor | None, **options: Any) -> Any:
        """The network over a batch, or over what the stage before gives of it."""

    @abstractmethod
    def learn(
        self,
        loss: Loss,
        batch: CollatedBatch,
        staleness: torch.Tensor,
        received: torch.Tensor | None = None,
    ) -> TokenLoss:
        """What the loss says at each place [N], and metrics [N]."""

    def infer(self, passes: Sequence[Sequence[TrainRow]]) -> Iterator[torch.Tensor]:
        """`num_inferred` numbers of each row, flat, pass by pass; zeros on ranks without a head."""
        if self.stage is None:
            for rows in passes:
                yield self._answer(self._whole(rows), None)
            return
        batches = [self._whole(rows) for rows in passes]
        said = self.stage.infer(
            len(batches),
            lambda number, received: self._answer(batches[number], received),
            lambda number: self.room(batches[number]),
        )
        for rows, numbers in zip(passes, said, strict=True):
            num_numbers = sum(self.num_inferred(row) for row in rows)
            yield torch.zeros(num_numbers, device=self.device) if numbers is None else numbers

    def _whole(self, rows: Sequence[TrainRow]) -> CollatedBatch:
        """A pass over all that can be inferred of rows."""
        return self.collate([_unmasked(row) for row in rows])

    def _answer(self, batch: CollatedBatch, received: torch.Tensor | None) -> torch.Tensor:
        """What the network says, or its hidden states."""
        answer: torch.Tensor = self.run(batch, received)
        return answer

    def _asked(self, loss: Loss, rows: Sequence[TrainRow]) -> list[str]:
        return list(needs_of(loss))

    def _said(self, loss: Loss, inputs: Any, of: str) -> TokenLoss:
        """By the loss, of inputs whose field `of` carries the gradient."""
        return call_loss(loss, inputs, count=len(getattr(inputs, of)), unit=self.unit, of=of)


class Policy(Role):
    def __init__(self, network: TokenPolicy, device: torch.device, temperature: float) -> None:
        super().__init__(network, device)
        self._temperature = temperature

    def run(self, batch: CollatedBatch, received: torch.Tensor | None, **options: Any) -> Any:
        return self.network(batch, self._temperature, received=received, **options)

    def learn(
        self,
        loss: Loss,
        batch: CollatedBatch,
        staleness: torch.Tensor,
        received: torch.Tensor | None = None,
    ) -> TokenLoss:
        named = candidates_of(loss)
        tokens = None if named is None else _token_ids(batch.columns[named])
        logprobs, entropy, candidates = self.run(batch, received, candidates=tokens)
        own = logprobs.detach()
        # Where no stage wrote them, the policy at the start of the step is the policy now, and
        # what nobody sampled in this run has no other sampler.
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
        losses, told = self._said(loss, inputs, "trainer_logprobs")
        told |= {metrics.ENTROPY: entropy}
        # By the loss, not by what this pass holds: every rank tells the same metrics.
        if uses_advantages(loss):
            told |= {
                metrics.KL_SAMPLER_TRAINER: kl.k1(sampler, proximal),
                metrics.KL_SAMPLER_TRAINER_K3: kl.k3(sampler, proximal),
            }
        return losses, told

    def infer_likeliest(
        self, passes: Sequence[Sequence[TrainRow]], top_k: int
    ) -> Iterator[torch.Tensor]:
        """[tokens, 2 top_k + 1] of each pass, as TokenPolicy.likeliest gives them."""
        for rows in passes:
            yield self.network.likeliest(self._whole(rows), self._temperature, top_k)

    def _answer(self, batch: CollatedBatch, received: torch.Tensor | None) -> torch.Tensor:
        said = self.run(batch, received, with_entropy=False)
        answer: torch.Tensor = said[0] if isinstance(said, tuple) else said
        return answer

    def _asked(self, loss: Loss, rows: Sequence[TrainRow]) -> list[str]:
        """A loss that reads no advantages may be about rows that were not sampled here."""
        optional = [PROXIMAL]
        names = list(needs_of(loss))
        if uses_advantages(loss):
            names = [SAMPLER, ADVANTAGES, *names]
        else:
            optional.append(SAMPLER)
        return names + [name for name in optional if any(name in row.columns for row in rows)]


class Scalar(Role):
    """Whatever says one number at each place, which a loss is about."""

    said: str  # the field of the loss's inputs that has the numbers
    metric: str  # their mean

    @abstractmethod
    def inputs(self, numbers: torch.Tensor, batch: CollatedBatch) -> Any:
        """The loss's, with these numbers [N]."""

    def learn(
        self,
        loss: Loss,
        batch: CollatedBatch,
        staleness: torch.Tensor,
        received: torch.Tensor | None = None,
    ) -> TokenLoss:
        numbers = self.run(batch, received)
        losses, told = self._said(loss, self.inputs(numbers, batch), self.said)
        return losses, {**told, self.metric: numbers}


class Critic(Scalar):
    said, metric = "values", metrics.VALUE_MEAN

    def run(self, batch: CollatedBatch, received: torch.Tensor | None, **options: Any) -> Any:
        return self.network(batch, received=received)

    def inputs(self, numbers: torch.Tensor, batch: CollatedBatch) -> ValueInputs:
        return ValueInputs(values=numbers, row_index=batch.row_index, columns=batch.columns)


class RewardModel(Scalar):
    unit = "row"
    said, metric = "scores", metrics.SCORE_MEAN

    def num_trained(self, row: TrainRow) -> int:
        return 1

    def num_in_group(self, row: TrainRow) -> int:
        return row.group_size

    def num_inferred(self, row: TrainRow) -> int:
        return 1

    def collate(self, rows: Sequence[TrainRow], columns: Sequence[str] = ()) -> CollatedBatch:
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
        # What runs rows as transformers does is never cut into stages.
        return self.network(batch) if received is None else self.network(batch, received)

    def inputs(self, numbers: torch.Tensor, batch: CollatedBatch) -> ScoreInputs:
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
    """The model of a directory in its role, on the CPU. `temperature`: of log-probabilities. A
    model that is `trained` may begin without a head of one output, and its weights are `unread`
    where they can be read in parts.

    Raises ValueError for a directory that holds no such model, or one that rlsys gets wrong.
    """
    if head == "logits":
        model = load_causal_lm(path, dtype=dtype, promised=trained)
    else:
        model = load_scalar_lm(path, dtype=dtype, fresh_head=trained, promised=trained)
    unread = take_promises(model)
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
    """Return a loaded model in its role. Raises ValueError for one that rlsys gets wrong.

    on_gpu: compute in the pieces that a GPU takes; by default if the device is one. An estimate of
    a GPU's memory does so on the CPU.
    """
    on_gpu = device.type == "cuda" if on_gpu is None else on_gpu
    if head == "logits":
        max_logits = GPU_MAX_LOGITS if on_gpu else MAX_LOGITS
        return Policy(TokenPolicy(model, max_logits=max_logits), device, temperature)
    if head == "value":
        return Critic(ScalarNetwork(model), device)
    return RewardModel(scoring_network(model), device)


def _token_ids(likeliest: torch.Tensor) -> torch.Tensor:
    """[N, K] int64 of a column [N, 2K + 1]; of no places, of any width."""
    if likeliest.ndim == 1:
        return likeliest.new_zeros(len(likeliest), 0, dtype=torch.int64)
    return likeliest[:, : likeliest.shape[1] // 2].long()


def _unmasked(row: TrainRow) -> TrainRow:
    return replace(row, loss_mask=np.ones(len(row.token_ids), np.bool_))

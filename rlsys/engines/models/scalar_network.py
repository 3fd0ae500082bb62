"""A critic or a reward model as the engines need it: one number at each place of a batch.

    Batch ──► backbone ──► hidden [U, D] at `positions` ──► score ──► [N] float32

A critic's places are where completion tokens are predicted: values of the text before them. A
reward model's are the last tokens of rows.

Shape legend: B rows, L longest input, N places, U of them that differ, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlsys.engines.models.attention_context import row_limit
from rlsys.engines.models.causal_lm import use_engine_layers
from rlsys.engines.models.collate import CollatedBatch
from rlsys.engines.models.hidden_states import hidden_states, layer_outputs
from rlsys.engines.models.scalar_lm import (
    check_scalar_architecture,
    pad_token_id,
    scalar_head,
    scalar_outputs,
)
from rlsys.engines.training.parallel.pipeline import PipelineStage
from rlsys.engines.training.parallel.process_groups import Mesh


class ScalarNetwork(nn.Module):
    """Of a model that `load_scalar_lm` loaded, whose attention becomes that of the engines. Raises
    ValueError for an architecture that rlsys gets wrong.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if scalar_head(model) is None:
            raise ValueError(
                f"{type(model).__name__} has more than a linear head of one output, so its tokens "
                "have no values; start the critic from a causal language model."
            )
        architecture = check_scalar_architecture(model)
        self.packs = architecture.packs
        """Whether batches may be packed; otherwise they must be padded."""
        self.shares = architecture.shares
        """Whether what packed rows begin with alike may stand once."""
        use_engine_layers(model)
        self.model = model
        self.unread = pad_token_id(model)
        """The token at which no row is scored."""
        self.fill = 0
        """With which rows are padded."""
        self._row_limit = row_limit(model.config)
        self.mesh: Mesh | None = None
        """Of several ranks, where the layout has more than data parallelism."""
        self.stage: PipelineStage | None = None
        """Which of the layers this rank has, if not all."""

    def forward(self, batch: CollatedBatch, received: torch.Tensor | None = None) -> torch.Tensor:
        """[N] float32, with gradient. `received`: hidden states of the stage before; what is no
        last stage gives its own, [1, T, D].
        """
        if self.stage is not None and not self.stage.is_last:
            return layer_outputs(self.model, batch, self._row_limit, self.mesh, received)[0]
        hidden, places = hidden_states(self.model, batch, self._row_limit, self.mesh, received)
        return batch.spread(places.whole(scalar_outputs(self.model, hidden)))


class WholeScorer(nn.Module):
    """A reward model as transformers runs it, whatever its architecture: padded rows with a mask,
    or, where the model knows no padding, one row after another. For models whose tokens see later
    ones, or whose head is more than a linear one.
    """

    packs = shares = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.unread = None
        self._pad_token_id = pad_token_id(model)
        self.fill = self._pad_token_id or 0

    @property
    def runs_rows_alone(self) -> bool:
        return self._pad_token_id is None

    def forward(self, batch: CollatedBatch) -> torch.Tensor:
        """[B] float32, with gradient."""
        num_rows, longest = len(batch.positions), batch.input_ids.shape[1]
        column = torch.arange(longest, device=batch.positions.device)
        last = batch.positions - longest * torch.arange(num_rows, device=column.device)
        if not num_rows:
            return self._scores(batch.input_ids)[:0]
        if self.runs_rows_alone:
            rows = zip(batch.input_ids, last.tolist(), strict=True)
            return torch.cat([self._scores(row[None, : end + 1]) for row, end in rows])
        mask = (column <= last[:, None]).long()
        return self._scores(batch.input_ids, attention_mask=mask)

    def _scores(self, input_ids: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.model(input_ids=input_ids, **options).logits
        return scores[:, 0].float()


def scoring_network(model: Any) -> ScalarNetwork | WholeScorer:
    """The fast way where it gives transformers' numbers, else transformers' own."""
    if scalar_head(model) is None:
        return WholeScorer(model)
    try:
        return ScalarNetwork(model)
    except ValueError:
        return WholeScorer(model)

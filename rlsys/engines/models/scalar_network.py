"""Network of a critic or a reward model: one number at each place of a batch.

    batch ──► backbone ──► hidden [U, D] at `positions` ──► score ──► [N] float32

A critic's places predict completion tokens: values of the text before them. A reward model's places
are the last tokens of rows.

Shape legend: B rows, L longest input, N places, U distinct ones, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlsys.engines.models.architecture_probe import MODEL_CLASS
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
from rlsys.errors import require


class ScalarNetwork(nn.Module):
    """A model of `load_scalar_lm` with the attention of the engines.

    Raises InvalidValue for an unsupported architecture.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        require(
            scalar_head(model) is not None,
            MODEL_CLASS,
            type(model).__name__,
            rule="has more than a linear head of one output, so its tokens have no values",
            fix="Start the critic from a causal language model.",
        )
        architecture = check_scalar_architecture(model)
        self.packs = architecture.packs
        self.shares = architecture.shares
        use_engine_layers(model)
        self.model = model
        self.unread = pad_token_id(model)
        """Token at which no row is scored."""
        self.fill = 0
        """Token of padding."""
        self._row_limit = row_limit(model.config)
        self.mesh: Mesh | None = None
        """Ranks of a layout with more than data parallelism."""
        self.stage: PipelineStage | None = None
        """Pipeline stage of this rank; None if the rank has all layers."""

    def forward(self, batch: CollatedBatch, received: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers [N] float32, with gradient.

        `received` holds the hidden states of the previous pipeline stage. A stage that is not the
        last returns its own hidden states, [1, T, D].
        """
        if self.stage is not None and not self.stage.is_last:
            return layer_outputs(self.model, batch, self._row_limit, self.mesh, received)[0]
        hidden, places = hidden_states(self.model, batch, self._row_limit, self.mesh, received)
        return batch.spread(places.whole(scalar_outputs(self.model, hidden)))


class WholeScorer(nn.Module):
    """A reward model of any architecture, computed by transformers.

    Rows are padded with a mask, or run one by one if the model has no padding token. It serves
    models whose tokens attend to later ones, or whose head is more than a linear layer.
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
        """The model has no padding token, so each row is a forward pass of its own."""
        return self._pad_token_id is None

    def forward(self, batch: CollatedBatch) -> torch.Tensor:
        """Return scores [B] float32, with gradient."""
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
    """Return a ScalarNetwork if it matches transformers' numbers, else a WholeScorer."""
    if scalar_head(model) is None:
        return WholeScorer(model)
    try:
        return ScalarNetwork(model)
    except ValueError:
        return WholeScorer(model)

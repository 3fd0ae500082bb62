"""Gradients over the ranks of a trainer: sums of replicated parts, and the norm.

FSDP2 reduces the gradients of data parallel ranks. The rest depends on the layout: tensor parallel
ranks hold parts of some gradients and copies of others, and the first and the last pipeline stage
may share a tied weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.training.optimizer import squared_norm
from rlsys.engines.training.parallel.pipeline import PipelineStage
from rlsys.engines.training.parallel.process_groups import Mesh
from rlsys.engines.training.parallel.tensor_parallel import is_cut, sum_replicated


class GradientSums:
    """Sums and norms of the gradients of one rank. `mesh` and `stage` are None without any."""

    def __init__(
        self, mesh: Mesh | None, layout: ParallelLayout, stage: PipelineStage | None
    ) -> None:
        self._mesh = mesh
        self._layout = layout
        self._stage = stage

    def add_up(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of which several ranks have parts, once per update. A collective."""
        if self._mesh is not None and self._layout.tp > 1:
            sum_replicated(parameters, self._mesh)
        if self._stage is not None:
            self._stage.sum_tied()

    def squared_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Return this rank's part of the squared norm [], counting replicated gradients once."""
        if self._mesh is None or self._layout.size("tp", "pp", "dp_replicate") == 1:
            return squared_norm(parameters)
        stage = self._stage
        if stage is not None and stage.number:
            tied = stage.tied_weight()
            parameters = [one for one in parameters if one is not tied]
        cut = squared_norm([one for one in parameters if is_cut(one)])
        whole = squared_norm([one for one in parameters if not is_cut(one)])
        return (cut + whole / self._layout.tp) / self._layout.dp_replicate

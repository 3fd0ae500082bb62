"""Weights of a drafter that is trained along: replaced together with the policy's.

    Weights ──► PairUpdater.prepare  ─┬─ policy's switch ─┐
                                      └─ drafter's switch ┴─► one switch, while generation is paused

The drafter shares the policy's embedding, and its output layer unless the head has one. These
belong to the policy's updater.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlsys.engines.generation.vllm.vllm_weights import Switch, Updater, WeightUpdater
from rlsys.engines.models.eagle_head import OUTPUT, PUBLISHED, SETTING
from rlsys.errors import require
from rlsys.reallocation.transport.weight_views import Weights

Shapes = dict[str, tuple[int, ...]]


class PairUpdater:
    """Updater of the policy and of its drafter."""

    def __init__(self, policy: Updater, drafter: Updater) -> None:
        self._policy, self._drafter = policy, drafter
        self.holdings = [*policy.holdings, *drafter.holdings]

    def prepare(self, weights: Weights) -> Switch:
        """Prepare an update of both; see WeightUpdater.prepare."""
        policy, drafter = self._policy.prepare(weights), self._drafter.prepare(weights)
        return lambda: [*policy(), *drafter()]

    def release(self) -> None:
        """Free the memory of both on the CPU until the next update."""
        self._policy.release()
        self._drafter.release()


def split_shapes(shapes: Mapping[str, Sequence[int]]) -> tuple[Shapes, Shapes]:
    """Return the shapes of the policy's tensors and those of a trained head."""
    found = {name: tuple(shape) for name, shape in shapes.items()}
    of_head = {name: shape for name, shape in found.items() if name.startswith(PUBLISHED)}
    return {name: shape for name, shape in found.items() if name not in of_head}, of_head


def with_drafter(policy: Updater, runner: Any, of_head: Shapes, dtype: torch.dtype) -> Updater:
    """Return the updater of the policy, together with the drafter's if a head is trained along.

    Raises as WeightUpdater does, and InvalidValue for a head that vLLM merges with the policy.
    """
    if not of_head:
        return policy
    model = runner.get_model()
    # Runner 2, on GPUs, has a speculator.
    drafter = (getattr(runner, "drafter", None) or runner.speculator).model
    own_output = PUBLISHED + OUTPUT in of_head
    require(
        not own_output or drafter.lm_head not in set(model.modules()),
        SETTING,
        rule="the head's output layer equals the policy's, so vLLM uses one layer for both",
        fix=f"Remove {OUTPUT} from the head's files; it then uses the policy's.",
    )
    return PairUpdater(policy, WeightUpdater(drafter, of_head, dtype, _in_checkpoint, model))


def _in_checkpoint(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(PUBLISHED): tensor for name, tensor in tensors.items()}

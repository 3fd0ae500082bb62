"""Passes of several models with adapters, computed together over one base model.

    requests ─► units, each a micro-batch of one request ─► passes of units of different requests
                                                              │
       base model with AdapterSegments ─► log-probabilities ─► each request's own loss ─► Σ
                                                                 one gradient of the sum ─► engines

Each request is divided into units as it is alone, and a pass consists of whole units. The factors
of a model get the same products and sums as in a pass of that model alone.

The gradient of a pass is added only after all of its numbers were computed. If they are not all
finite, or if an error occurs, each unit is computed again in a pass of its own. So a request fails
alone.

Shape legend: N places of a pass, K candidates of a place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from rlsys.engines.devices.cpu import Pieces
from rlsys.engines.models.collate import (
    CollatedBatch,
    collate,
    columns_of,
    input_lengths,
    split_passes,
)
from rlsys.engines.models.model_roles import token_ids
from rlsys.engines.training.adapter_segments import AdapterSegments, MixedSegments, Segment
from rlsys.engines.training.adapters import FrozenWeights
from rlsys.tinker_server.call_engine import PassOutput, PrimitiveEngine, RecordingLoss
from rlsys.tinker_server.datum_rows import TARGETS
from rlsys.tinker_server.server_backend import PassRequest
from rlsys.types import TrainRow

if TYPE_CHECKING:
    from rlsys.engines.models.model_roles import Policy

Gradient = Sequence[torch.Tensor | None]
# Log-probabilities [N], entropies [N], and candidates' log-probabilities [N, K].
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class _NotFinite(ArithmeticError):
    """Some numbers of a pass of several requests are not finite."""


@dataclass(kw_only=True)
class _Progress:
    """A request and its results."""

    engine: PrimitiveEngine
    request: PassRequest
    units: deque[list[TrainRow]]
    outputs: list[PassOutput] = field(default_factory=list)
    error: Exception | None = None

    @property
    def kind(self) -> tuple[int, bool]:
        """Units of the same kind may be in one pass."""
        return self.request.num_targets, self.request.backward

    def fail(self, error: Exception) -> None:
        """End the request."""
        self.error = error
        self.units.clear()

    @property
    def result(self) -> PassOutput | Exception:
        """The joined outputs of all units, or the error."""
        if self.error is not None:
            return self.error
        return PassOutput(
            logprobs={k: v for one in self.outputs for k, v in one.logprobs.items()},
            loss=sum(one.loss for one in self.outputs),
        )


@dataclass(frozen=True)
class _Unit:
    """Rows of one request in a pass."""

    owner: _Progress
    rows: Sequence[TrainRow]


class SharedPasses:
    """Passes of the engines of one process, which share frozen weights.

    `any_engine` is one of them. `num_passes` counts the passes over the base model.
    """

    def __init__(self, any_engine: PrimitiveEngine, frozen: FrozenWeights) -> None:
        self.num_passes = 0
        self._role: Policy = any_engine.base_role(frozen)
        self._max_tokens = any_engine.pass_tokens
        self._segments = AdapterSegments(self.model)
        self._pieces = Pieces()
        self._can_join = True

    @property
    def model(self) -> Any:
        """The base model."""
        return self._role.network.model

    @property
    def packs(self) -> bool:
        """Return whether the rows of a pass are packed, and not padded."""
        return self._role.packs

    def run(
        self, requests: Sequence[tuple[PrimitiveEngine, PassRequest]]
    ) -> list[PassOutput | Exception]:
        """Return the output of each request, or its error. Engines get their gradients.

        Each engine has at most one request. An error of a request is FloatingPointError if its
        log-probabilities are not finite.
        """
        assert len({id(engine) for engine, _ in requests}) == len(requests)
        running = [
            _Progress(engine=engine, request=request, units=self._units(request))
            for engine, request in requests
        ]
        while any(one.units for one in running):
            self._compute(self._next_pass(running))
        return [one.result for one in running]

    def _units(self, request: PassRequest) -> deque[list[TrainRow]]:
        rows, role = request.rows, self._role
        passes = split_passes(rows, self._max_tokens, packed=role.packs, shares=role.shares)
        return deque([rows[index] for index in chosen] for chosen in passes)

    def _next_pass(self, running: Sequence[_Progress]) -> list[_Unit]:
        """Take the first unit of each request, as far as they fit into one pass."""
        found: list[_Unit] = []
        num_tokens = 0
        for one in running:
            if not one.units or (found and found[0].owner.kind != one.kind):
                continue
            size = sum(n for row in one.units[0] for n in input_lengths(row))
            if not found or (self._can_join and num_tokens + size <= self._max_tokens):
                found.append(_Unit(one, one.units.popleft()))
                num_tokens += size
        return found

    def _compute(self, units: Sequence[_Unit]) -> None:
        """Add the results of units to their requests, computed together or else one by one."""
        try:
            results = self._pass(units)
        except Exception as error:  # noqa: BLE001 - of this request, or of one of several
            if len(units) == 1:
                units[0].owner.fail(error)
                return
            if isinstance(error, MixedSegments):
                self._can_join = False
            for one in units:
                self._compute([one])
            return
        for one, (output, gradient) in zip(units, results, strict=True):
            if one.owner.request.backward:
                one.owner.engine.add_gradient(one.rows, gradient)
            one.owner.outputs.append(output)

    def _pass(self, units: Sequence[_Unit]) -> list[tuple[PassOutput, Gradient]]:
        """Return the output and the gradient of each unit.

        Raises:
            FloatingPointError: The log-probabilities of the only unit are not finite.
            _NotFinite: Some numbers of several units are not finite.
        """
        self.num_passes += 1
        num_targets, backward = units[0].owner.kind
        batch = self._batch(units)
        with self._segments.of(_segments(batch, units)), torch.set_grad_enabled(backward):
            candidates = None
            if num_targets:
                targets = [columns_of(one.rows, [TARGETS], self._role.device) for one in units]
                candidates = token_ids(torch.cat([one[TARGETS] for one in targets]))
            outputs: Outputs = self._role.run(
                batch, None, candidates=candidates, with_entropy=False
            )
            if not all(
                bool(torch.isfinite(one.detach()).all()) for one in outputs if one is not None
            ):
                if len(units) > 1:
                    raise _NotFinite
                raise units[0].owner.engine.not_finite()
            recordings, total = self._losses(batch, units, outputs)
            gradients: list[Gradient] = [[] for _ in units]
            if backward:
                gradients = self._gradients(units, total)
        return [
            (recording.output(), gradient)
            for recording, gradient in zip(recordings, gradients, strict=True)
        ]

    def _batch(self, units: Sequence[_Unit]) -> CollatedBatch:
        role = self._role
        return collate(
            [row for one in units for row in one.rows],
            role.device,
            packed=role.packs,
            shares=role.shares,
            models=[number for number, one in enumerate(units) for _ in one.rows],
        )

    def _losses(
        self,
        batch: CollatedBatch,
        units: Sequence[_Unit],
        outputs: Outputs,
    ) -> tuple[list[RecordingLoss], torch.Tensor]:
        """Return each unit's loss, which has kept its values, and the sum of all: []."""
        sizes = [sum(int(row.loss_mask.sum()) for row in one.rows) for one in units]
        recordings, sums = [], []
        first_row = first = 0
        for one, size in zip(units, sizes, strict=True):
            places = slice(first, first + size)
            request = one.owner.request
            loss = RecordingLoss(request.loss, request.num_targets)
            names = self._role.columns(loss, one.rows)
            own = replace(
                batch,
                policy_versions=batch.policy_versions[places],
                row_index=batch.row_index[places] - first_row,
                group_ids=batch.group_ids[places],
                columns=columns_of(one.rows, names, self._role.device),
            )
            logprobs, entropy, candidates = outputs
            losses, _ = self._role.evaluate(
                loss,
                own,
                torch.zeros_like(own.policy_versions),
                logprobs[places],
                entropy[places],
                None if candidates is None else candidates[places],
            )
            recordings.append(loss)
            sums.append(losses.sum())
            first, first_row = first + size, first_row + len(one.rows)
        return recordings, torch.stack(sums).sum()

    def _gradients(self, units: Sequence[_Unit], total: torch.Tensor) -> list[Gradient]:
        trained = [one.owner.engine.trained for one in units]
        self._pieces.release()
        found = torch.autograd.grad(
            total, [one for of_unit in trained for one in of_unit], allow_unused=True
        )
        if len(units) > 1 and not _are_finite([one for one in found if one is not None]):
            raise _NotFinite
        rest = iter(found)
        return [[next(rest) for _ in of_unit] for of_unit in trained]


def _segments(batch: CollatedBatch, units: Sequence[_Unit]) -> list[Segment]:
    """Return the inputs of each unit, in the order of the batch."""
    unit_of_row = torch.tensor([number for number, one in enumerate(units) for _ in one.rows])
    unit_of_input = unit_of_row[torch.from_numpy(batch.input_rows)]
    sizes = torch.bincount(unit_of_input, minlength=len(units)).tolist()
    assert bool((unit_of_input.diff() >= 0).all()), "collate puts the inputs of a model together"
    return [
        Segment(size=size, products=one.owner.engine.products)
        for size, one in zip(sizes, units, strict=True)
    ]


def _are_finite(tensors: list[torch.Tensor]) -> bool:
    if not tensors:
        return True
    return bool(torch.isfinite(torch.stack(torch._foreach_norm(tensors))).all())

"""Settings of a plan that the user gave, which the search keeps.

Options of the command line ─► plan_settings.fixed_settings ─► FixedSettings ─► search
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlsys.config.parallel_layout import ParallelLayout
from rlsys.planner.plans import Recompute
from rlsys.planner.run_plan import Placement


@dataclass(frozen=True, kw_only=True)
class FixedTraining:
    """Settings of a trained role. None is open.

    Attributes:
        layout: Layout of the ranks.
        micro_batch_tokens: Tokens of a micro-batch.
        recompute: Recomputation of activations.
    """

    layout: ParallelLayout | None = None
    micro_batch_tokens: int | None = None
    recompute: Recompute | None = None


@dataclass(frozen=True, kw_only=True)
class FixedSettings:
    """Settings of a run that a plan may not change. None, or a role that is missing, is open.

    Attributes:
        placement: Placement.
        replicas: Number of replicas.
        tensor_parallel: Devices of a replica.
        memory_fraction: Share of a device's memory for a replica.
        trainers: Settings of trained roles, by name.
        workers: Workers of frozen roles, by name.
    """

    placement: Placement | None = None
    replicas: int | None = None
    tensor_parallel: int | None = None
    memory_fraction: float | None = None
    trainers: Mapping[str, FixedTraining] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)

    def trainer(self, name: str) -> FixedTraining:
        """Return the settings of a trained role."""
        return self.trainers.get(name, NO_TRAINING)


NO_TRAINING = FixedTraining()
NOTHING = FixedSettings()

"""plan.json of a run: its roles, its devices, and the step that was predicted for it.

    start of a run ─► RunRecord ─► plan.json ─► comparison at the run's end, rlsys plan --calibrate

The file makes a run directory sufficient for a later prediction: config.json has the settings but
neither the graph nor the shapes of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue
from rlsys.planner.architecture import Architecture
from rlsys.planner.model_config import architecture_from_config, named_model
from rlsys.planner.run_plan import Role
from rlsys.planner.stored_values import restored

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """A predicted step, and the assumptions that the run can check.

    Attributes:
        step_s: Seconds of a step.
        low_s: Lower end of the 80 % interval.
        high_s: Upper end.
        train_s: Seconds of training and of its forward passes.
        generation_s: Seconds in which a replica generates, mean over replicas.
        sync_s: Seconds in which a replica loads new weights.
        reward_s: Seconds of a process for all rewards of a step.
        controller_s: Seconds of the controller's process.
        completion_tokens: Mean length of a completion.
        simulated: Whether the controller was simulated.
    """

    step_s: float
    low_s: float
    high_s: float
    train_s: float
    generation_s: float
    sync_s: float = 0.0
    reward_s: float = 0.0
    controller_s: float = 0.0
    completion_tokens: float = 0.0
    simulated: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordedRole:
    """A role with the description of its model: a config.json, or a name that is built in."""

    name: str
    model: str
    config: Mapping[str, Any] | None = None
    is_trained: bool = True
    forward_passes: int = 0
    samples: bool = False

    @property
    def role(self) -> Role:
        """The role as predictions take it."""
        return Role(
            name=self.name,
            model=self.architecture,
            is_trained=self.is_trained,
            forward_passes=self.forward_passes,
            samples=self.samples,
        )

    @property
    def architecture(self) -> Architecture:
        """The shape of the model."""
        if self.config is None:
            return named_model(self.model)
        return architecture_from_config(self.config, name=self.model)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Facts of a run that a prediction needs besides its configuration.

    Attributes:
        cluster: The devices, such as 1x8xH100, or "" if they are unknown.
        prompt_tokens: Mean tokens of a prompt. 0 if it is unknown.
        turns: Turns of an episode that were assumed.
        roles: Models of the graph. The one that samples is first.
        prediction: The prediction for a step, if one was possible.
        settings: Settings that --plan auto chose, by dotted name.
    """

    cluster: str
    prompt_tokens: float
    roles: tuple[RecordedRole, ...]
    turns: int = 1
    prediction: PredictedStep | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def record_text(record: RunRecord) -> str:
    """Return the content of plan.json."""
    return dump_json({"format": FORMAT, **asdict(record)}, indent=1) + "\n"


def read_record(path: Path) -> RunRecord:
    """Return the record that a file has.

    Raises:
        InvalidValue: The file is missing, damaged or of another format.
    """
    try:
        stored = parse_json(path.read_text())
        if not isinstance(stored, dict) or stored.pop("format", None) != FORMAT:
            raise ValueError("it is of another version of rlsys")
        found = restored(RunRecord, stored, "plan")
        if not found.roles or found.turns < 1:
            raise ValueError("no role is listed, or an episode has no turn")
        for role in found.roles:
            _ = role.architecture
    except (OSError, ValueError) as error:
        raise InvalidValue(
            str(path),
            rule=f"cannot be read as a run's plan.json ({error})",
            fix="Use a directory of a run that this version of rlsys started.",
        ) from None
    return found

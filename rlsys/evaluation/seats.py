"""Models of an environment's seats, for episodes that are played without a cluster.

    seats={"second": "runs/mine/hf-rival", "third": RoleConfig(...)} ──► SeatModel, by seat

In a run, the graph assigns the seats (`flow.play(seats=...)`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlsys.config import (
    FrozenModelConfig,
    Precision,
    RoleConfig,
)
from rlsys.environments.environment import Environment
from rlsys.errors import InvalidValue, require

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SeatModel:
    """A model that plays a seat instead of the main model.

    Another policy has the main model's tokens, and its turns are part of the rollout. A frozen
    model has its own tokens.
    """

    model: FrozenModelConfig
    is_frozen: bool = False


def seat_models(
    seats: Mapping[str, str | Path | RoleConfig] | None, dtype: Precision
) -> dict[str, SeatModel]:
    """Return the models by seat.

    `dtype` is the precision of other policies; the configuration of a frozen model has its own.

    Raises:
        InvalidValue: `seats` is not a mapping, or one of its values is not a model.
    """
    require(
        seats is None or isinstance(seats, Mapping),
        "seats",
        seats,
        rule="must be a mapping from the names of seats to models",
        fix="Write such as seats={'second': 'runs/mine/hf-rival'}.",
    )
    return {name: _seat_model(name, model, dtype) for name, model in (seats or {}).items()}


def _seat_model(name: str, model: str | Path | RoleConfig, dtype: Precision) -> SeatModel:
    if isinstance(model, RoleConfig):
        require(
            model.model.path != "",
            f"seats[{name!r}].model.path",
            "",
            rule="must not be empty",
            fix="Give a model directory or hub name.",
        )
        return SeatModel(model=model.model, is_frozen=True)
    if not isinstance(model, str | Path):
        raise InvalidValue(
            f"seats[{name!r}]",
            model,
            rule="is not a model",
            fix="Give the directory of another policy, or an rlsys.RoleConfig for a frozen model.",
        )
    return SeatModel(model=FrozenModelConfig(path=str(model), dtype=dtype))


def warn_other_policies(
    environment: Environment, seats: Mapping[str, SeatModel], model: Path
) -> None:
    """Log a warning if a run has other policies and none of them was given a seat."""
    others = sorted(one.name for one in model.parent.glob("hf-*")) if model.name == "hf" else []
    if others and not seats and len(environment.seats) > 1:
        log.warning(
            "%s plays all seats (%s). Its run has other policies, %s, which you can assign with "
            "seats",
            model,
            ", ".join(environment.seats),
            ", ".join(others),
        )

"""Who plays which seat of an environment that is played without a cluster.

    seats={"second": "runs/mine/hf-rival", "third": RoleConfig(...)} ──► SeatModel, by seat

In a run the graph says it (`flow.play(seats=...)`); here whoever plays does.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlsys.config import (
    FrozenModelConfig,
    Precision,
    RoleConfig,
    RolloutConfig,
    check_quantized,
    require,
)
from rlsys.environments.environment import Environment

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SeatModel:
    """Who plays a seat in the model's place: another policy, with the model's tokens, whose turns
    are part of the rollout; or one that is frozen, with tokens of its own.
    """

    model: FrozenModelConfig
    is_frozen: bool = False


def seat_models(
    seats: Mapping[str, str | Path | RoleConfig] | None, dtype: Precision
) -> dict[str, SeatModel]:
    """`dtype`: of other policies; a frozen model says its own. Raises ValueError for what is no
    model.
    """
    require(
        seats is None or isinstance(seats, Mapping),
        f"seats={reprlib.repr(seats)} is no mapping; give the models by the names of their seats, "
        "such as seats={'second': 'runs/mine/hf-rival'}.",
    )
    return {name: _seat_model(name, given, dtype) for name, given in (seats or {}).items()}


def _seat_model(name: str, given: str | Path | RoleConfig, dtype: Precision) -> SeatModel:
    if isinstance(given, RoleConfig):
        require(
            given.model.path != "",
            f"seats[{name!r}] has no model.path; give a model's directory or hub name.",
        )
        return SeatModel(model=given.model, is_frozen=True)
    require(
        isinstance(given, str | Path),
        f"seats[{name!r}]={given!r} is no model; give the directory of another policy, or an "
        "rlsys.RoleConfig for a frozen model.",
    )
    return SeatModel(model=FrozenModelConfig(path=str(given), dtype=dtype))


def check_seats(
    environment: Environment, seats: Mapping[str, SeatModel], rollout: RolloutConfig
) -> None:
    """Raise ValueError for seats that the environment does not have, or that leave the model none,
    and for models that `rollout` cannot quantize.
    """
    environment.check_seats("seats", seats)
    for name, seat in seats.items():
        check_quantized(rollout, seat.model.dtype, f"seats[{name!r}].model.dtype")


def tell_others(environment: Environment, seats: Mapping[str, SeatModel], model: Path) -> None:
    """Other policies of the run are not found by themselves: nobody knows their seats here."""
    others = sorted(one.name for one in model.parent.glob("hf-*")) if model.name == "hf" else []
    if others and not seats and len(environment.seats) > 1:
        log.warning(
            "%s plays all of the seats %s alone; other policies of its run lie beside it, %s: have "
            "them play theirs with seats",
            model,
            ", ".join(environment.seats),
            ", ".join(others),
        )

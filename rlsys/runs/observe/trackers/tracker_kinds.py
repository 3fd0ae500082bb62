"""The known trackers, and the check of the option `trackers` before a run starts.

A tracker's library is imported in its adapter alone, and only in the process of the tracker.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.common.option_names import option
from rlsys.errors import InvalidValue, require

PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """A tracker by its name in the configuration."""

    adapter: str  # module:class
    extra: str
    """Name of the optional extra, of the library that it installs, and of the tracker's files."""
    needed_variable: str = ""
    """Environment variable that must be set."""
    example: str = ""
    """Example of its value."""


TRACKERS = {
    "tensorboard": TrackerKind(
        adapter=f"{PACKAGE}.tensorboard_tracker:TensorboardTracker", extra="tensorboard"
    ),
    "wandb": TrackerKind(adapter=f"{PACKAGE}.wandb_tracker:OnlineWandb", extra="wandb"),
    "wandb-offline": TrackerKind(adapter=f"{PACKAGE}.wandb_tracker:OfflineWandb", extra="wandb"),
    "trackio": TrackerKind(adapter=f"{PACKAGE}.trackio_tracker:TrackioTracker", extra="trackio"),
    "swanlab": TrackerKind(adapter=f"{PACKAGE}.swanlab_tracker:OnlineSwanlab", extra="swanlab"),
    "swanlab-offline": TrackerKind(
        adapter=f"{PACKAGE}.swanlab_tracker:OfflineSwanlab", extra="swanlab"
    ),
    "mlflow": TrackerKind(
        adapter=f"{PACKAGE}.mlflow_tracker:MlflowTracker",
        extra="mlflow",
        needed_variable="MLFLOW_TRACKING_URI",
        example="http://127.0.0.1:5000",
    ),
}


def check_trackers(names: Sequence[str]) -> None:
    """Check that each tracker is known, given once, installed and configured.

    Raises:
        InvalidValue: It is not.
    """
    extras: set[str] = set()
    for name in names:
        kind = TRACKERS.get(name)
        if kind is None:
            raise InvalidValue(
                "trackers", name, rule="is not a tracker", fix=f"Use {', '.join(TRACKERS)}."
            )
        require(
            kind.extra not in extras,
            "trackers",
            name,
            rule=f"names {kind.extra} twice",
            fix="Name each tracker once.",
        )
        extras.add(kind.extra)
        if importlib.util.find_spec(kind.extra) is None:
            raise InvalidValue(
                "trackers",
                name,
                rule=f"needs the package {kind.extra}, which is not installed",
                fix=f"Run pip install 'rlsys[{kind.extra}]', or leave {name} out of "
                f"{option('trackers')}.",
            )
        require(
            not kind.needed_variable or bool(os.environ.get(kind.needed_variable)),
            "trackers",
            name,
            rule=f"needs the environment variable {kind.needed_variable}",
            fix=f"Set it, such as {kind.needed_variable}={kind.example}.",
        )

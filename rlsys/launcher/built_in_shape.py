"""Dry run of a model that cannot be read here, with the planner's shape of it.

    "Qwen/Qwen3-8B", no hub ─► unread_reason ─► write_config ─► preflight_of_shape ─► Inputs

Memory and placement need only the shape. Tokenizer, data and rewards are not checked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.config import RunConfig
from rlsys.data.row_source import RowSource
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.engines.models.model_shape import model_shape
from rlsys.errors import ErrorCollector, InvalidValue
from rlsys.launcher.engine_checks import check_engine
from rlsys.launcher.memory_estimate import check_store
from rlsys.launcher.preflight import Inputs, graph_of_run
from rlsys.planner.model_config import DATA, plain_name
from rlsys.types import Prompt


class UnreadRows(RowSource):
    """Data that was not read: it has no rows."""

    def __init__(self) -> None:
        self._admitted = np.empty(0, np.int32)

    def at(self, index: int) -> Prompt:
        """Raise an IndexError."""
        raise IndexError(index)


def unread_reason(path: str) -> str:
    """Return why a model of the planner's table cannot be read here, or "" if it can or is none.

    Call it where the hub's libraries are offline if the hub cannot be reached.
    """
    if not path or Path(path).exists() or _config(path) is None:
        return ""
    try:
        model_shape(path)
    except InvalidValue as error:
        return error.rule
    return ""


def write_config(path: str, directory: Path) -> Path:
    """Write the config.json of a model of the planner's table into a directory, and return it."""
    (directory / "config.json").write_text(dump_json(_config(path)))
    return directory


def preflight_of_shape(
    config: RunConfig, flow: Dataflow, reason: str, *, warm_starts: bool
) -> Inputs:
    """Complete the graph and check what follows from the shape of the model alone.

    Args:
        config: The configuration, with the directory of the model's config.json.
        flow: The recipe's graph, which does not change.
        reason: Why the model cannot be read.
        warm_starts: Whether supervised steps change the main model before the run.

    Raises:
        ValueError: One or more checks failed. The error has all mistakes.
    """
    shape = model_shape(config.model.path, flow.main.head)
    mistakes = ErrorCollector()
    graph = None
    with mistakes.collect():
        graph = graph_of_run(config, flow, shape, warm_starts=warm_starts)
        check_store(config, graph)
    check_engine(config, shape, mistakes)
    mistakes.raise_found()
    assert graph is not None
    warning = (
        f"the model {reason}. Its shape is the one that the planner knows. Tokenizer, data and "
        "rewards were not checked"
    )
    return Inputs(
        graph=graph, shape=shape, tokenizer=None, prompts=UnreadRows(), warnings=(warning,)
    )


def _config(path: str) -> dict[str, object] | None:
    """Return the configuration of a model of the planner's table."""
    table = parse_json((DATA / "models.json").read_text())
    return next((table[name] for name in table if plain_name(name) == plain_name(path)), None)

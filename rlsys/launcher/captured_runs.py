"""The run that a recipe would start, without starting it."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rlsys.config.plan_session import PlanFound
from rlsys.errors import require
from rlsys.planner.planning import Answer, requested

A = TypeVar("A")


def answer_of(recipe: Path, arguments: Sequence[str], answer: Answer[A]) -> A:
    """Return the answer about the first run of a recipe that generates rollouts.

    The recipe ends there: later statements may need the trained model.

    Raises:
        InvalidValue: The recipe launches no such run.
    """
    before, paths = sys.argv, list(sys.path)
    with requested(answer) as answers:
        sys.argv = [str(recipe), *arguments]
        sys.path[:0] = [str(Path.cwd()), str(recipe.resolve().parent)]
        try:
            with contextlib.suppress(PlanFound):
                runpy.run_path(str(recipe), run_name="__main__")
        finally:
            sys.argv, sys.path[:] = before, paths
        found = answers[:1]
    require(
        bool(found),
        "RECIPE",
        str(recipe),
        rule="does not launch a run that generates rollouts",
        fix="Give a recipe of reinforcement learning.",
    )
    return found[0]

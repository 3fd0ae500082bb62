"""The recipes of the arithmetic task: each module has its Config, and the algorithm by its name."""

from __future__ import annotations

import importlib
from typing import Any

from recipes.arithmetic import ArithmeticConfig, correct, problems
from rlsys.dataflow.graph.graph import Dataflow

SMALL_RECIPES = (
    "dapo",
    "decoupled_ppo",
    "distill",
    "dr_grpo",
    "gspo",
    "llamarl",
    "reinforce_pp",
    "rloo",
    "scalerl",
    "swarm",
)


def config_of(name: str) -> type[ArithmeticConfig]:
    found: type[ArithmeticConfig] = importlib.import_module(f"recipes.{name}").Config
    return found


def graph_of(name: str, **settings: Any) -> Dataflow:
    cfg = config_of(name)(**settings)
    algorithm = getattr(importlib.import_module(f"recipes.{name}"), name)
    flow: Dataflow = algorithm(cfg, [correct], rows=problems(cfg))
    return flow

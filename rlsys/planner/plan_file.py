"""plan.toml: the settings of a plan, which any recipe takes with --config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.config.fields import toml_value
from rlsys.planner.plan_report import seconds_text
from rlsys.planner.planning import RunPlanning


def plan_toml(planning: RunPlanning, others: Mapping[str, Any] | None = None) -> str:
    """Return the settings of the best plan, with the prediction as a comment.

    `others` are the options of the run's own file, by dotted name, which the plan wins over.
    """
    best = planning.plans[0]
    estimate = best.ranked.estimate
    sections: dict[str, dict[str, Any]] = {}
    for name, value in {**(others or {}), **best.settings}.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    text = [
        f"# Plan for {planning.shape.policy.model.name} on {planning.cluster}: "
        f"{seconds_text(estimate.seconds)} s a step (80 %: {seconds_text(estimate.low)} to "
        f"{seconds_text(estimate.high)} s).",
    ]
    for section in sorted(sections):
        if section:
            text += ["", f"[{section}]"]
        text += [f"{key} = {toml_value(value)}" for key, value in sections[section].items()]
    return "\n".join(text) + "\n"

"""plan.toml: the settings of a plan, which any recipe takes with --config."""

from __future__ import annotations

from typing import Any

from rlsys.planner.plan_report import seconds_text
from rlsys.planner.planning import RunPlanning


def plan_toml(planning: RunPlanning) -> str:
    """Return the settings of the best plan, with the prediction as a comment."""
    best = planning.plans[0]
    estimate = best.ranked.estimate
    sections: dict[str, dict[str, Any]] = {}
    for name, value in best.settings.items():
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
        text += [f"{key} = {_value(value)}" for key, value in sections[section].items()]
    return "\n".join(text) + "\n"


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)

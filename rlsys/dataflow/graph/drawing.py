"""Descriptions of a graph: one line per stage, or a Mermaid flowchart."""

from __future__ import annotations

from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    IMPLICIT_COLUMNS,
    GenerateStage,
    InferStage,
    Model,
    PlayStage,
    Stage,
    TrainStage,
    names_of,
)


def as_mermaid(flow: StageGraph) -> str:
    """Return a flowchart of the stages, joined by their columns."""
    writer = {column.name: s.name for s in flow.stages for column in s.writes}
    place = {stage.name: f"s{number}" for number, stage in enumerate(flow.stages)}
    lines = ["flowchart LR", f"    prompts([prompts]) --> {place[flow.stages[0].name]}"]
    for stage in flow.stages:
        model = getattr(stage, "model", None)
        label = f"{stage.name}<br/><i>{model.name}</i>" if model else stage.name
        lines.append(f'    {place[stage.name]}["{label}"]')
    for stage in flow.stages:
        by_writer: dict[str, list[str]] = {}
        for column in stage.reads:
            if column not in IMPLICIT_COLUMNS:
                by_writer.setdefault(writer[column.name], []).append(column.name)
        for source, columns in by_writer.items():
            lines.append(f"    {place[source]} -- {', '.join(columns)} --> {place[stage.name]}")
    for stage in flow.all(TrainStage):
        for user in flow.stages:
            if stage.model in _users(user):
                weights = f"{place[stage.name]} -. weights, version v+1 .-> {place[user.name]}"
                lines.append(f"    {weights}")
    return "\n".join(lines)


def as_lines(flow: StageGraph) -> str:
    """Return one line per stage: its name, the columns it reads, the columns it writes."""
    width = max(len(stage.name) for stage in flow.stages)
    lines = []
    for stage in flow.stages:
        reads = ", ".join(names_of(stage.reads)) or "prompts"
        writes = ", ".join(names_of(stage.writes))
        if isinstance(stage, TrainStage):
            writes = stage.model.name
        lines.append(f"{stage.name:<{width}}  {reads}  ->  {writes}")
    return "\n".join(lines)


def _users(stage: Stage) -> tuple[Model, ...]:
    """Return the models that a stage runs with their newest weights."""
    if isinstance(stage, PlayStage):
        return (stage.model, *stage.partners)
    return (stage.model,) if isinstance(stage, GenerateStage | InferStage) else ()

"""A graph in words and as a picture.

In: a `Dataflow`. Out: text: one line per stage, or a Mermaid flowchart.
"""

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
    """A flowchart: stages, joined by the columns that one writes and another reads."""
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
    """One line per stage: name, what it reads, what it writes."""
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
    """The models whose newest weights it runs, where they are trained."""
    if isinstance(stage, PlayStage):
        return (stage.model, *stage.partners)
    return (stage.model,) if isinstance(stage, GenerateStage | InferStage) else ()

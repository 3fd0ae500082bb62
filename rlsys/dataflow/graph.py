"""The algorithm as a graph of stages over columns.

A recipe builds one `Dataflow`, in the paper's order; each call adds a stage and returns the columns
that it writes. Edges follow from the columns. The controller runs this object.

    generate ─► token_ids, sampler_logprobs, ... ─► score ─► reward ─► ... ─► train

Rows are rollouts. Tensor columns (token ids, log-probabilities) live in the store's shared memory;
scalar columns (a reward, an advantage) travel with the row's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rlsys.config import DataConfig, require
from rlsys.dataflow.memory import FreedRows
from rlsys.dataflow.schema import StageSpec
from rlsys.dataflow.store import StreamStore

if TYPE_CHECKING:  # a recipe's --help does without torch, whose import takes seconds
    import torch

    from rlsys.algorithms.aggregation import Aggregation
    from rlsys.algorithms.inputs import LossFn

# One tensor [G] per column read -> [G], one value per rollout of the group.
GroupFn = Callable[..., "torch.Tensor"]
RewardFn = Callable[..., Any]

Kind = Literal["generate", "score", "per_group", "train"]

ROLLOUT_TENSORS = ("prompt_token_ids", "token_ids", "sampler_logprobs", "policy_versions")


@dataclass(frozen=True)
class Column:
    """One field of every row. `tensor`: its bytes lie in the store; else it is a float."""

    name: str
    tensor: bool = False


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Where prompts come from: a configured dataset, or rows made by the recipe."""

    config: DataConfig
    rows: Sequence[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A function over rows: what it reads, what it writes, and what runs it."""

    name: str
    kind: Kind
    reads: tuple[Column, ...] = ()
    writes: tuple[Column, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GenerateStage(Stage):
    model: str
    prompts: Prompts
    group_size: int


@dataclass(frozen=True, kw_only=True)
class ScoreStage(Stage):
    rewards: tuple[RewardFn, ...]


@dataclass(frozen=True, kw_only=True)
class PerGroupStage(Stage):
    function: GroupFn


@dataclass(frozen=True, kw_only=True)
class TrainStage(Stage):
    model: str
    loss: LossFn
    aggregation: Aggregation


S = TypeVar("S", bound=Stage)


class Dataflow:
    """Stages in the order in which they were stated.

    Every method raises ValueError for a column that no earlier stage writes (so the graph is
    acyclic by construction) and for a second writer of a column, naming both stages.
    """

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def generate(self, model: str, prompts: Prompts, *, group_size: int) -> tuple[Column, ...]:
        """Sample `group_size` completions of each prompt with `model`."""
        columns = tuple(Column(name, tensor=True) for name in ROLLOUT_TENSORS)
        self._add(
            GenerateStage(
                name="generate",
                kind="generate",
                writes=columns,
                model=model,
                prompts=prompts,
                group_size=group_size,
            )
        )
        return columns

    def score(self, rollouts: Sequence[Column], rewards: Sequence[RewardFn]) -> Column:
        """Reward of each rollout, as soon as it has ended."""
        require(
            len(rewards) > 0,
            "rewards=() scores nothing; give flow.score at least one reward function.",
        )
        return self._add(
            ScoreStage(
                name="score",
                kind="score",
                reads=tuple(rollouts),
                writes=(Column("reward"),),
                rewards=tuple(rewards),
            )
        )

    def per_group(self, function: GroupFn, *columns: Column, name: str = "advantage") -> Column:
        """`function(*[G] tensors) -> [G]` over each group, as soon as it is complete."""
        return self._add(
            PerGroupStage(
                name=name,
                kind="per_group",
                reads=columns,
                writes=(Column(name),),
                function=function,
            )
        )

    def train(
        self,
        model: str,
        rollouts: Sequence[Column],
        advantages: Column,
        *,
        loss: LossFn,
        aggregation: Aggregation,
    ) -> None:
        """Gradient steps of `model`: per-token `loss`, summed up by `aggregation`."""
        self._add(
            TrainStage(
                name="train",
                kind="train",
                reads=(*rollouts, advantages),
                model=model,
                loss=loss,
                aggregation=aggregation,
            )
        )

    def stage(self, kind: type[S]) -> S:
        """The one stage of a kind; ValueError if there is none."""
        for stage in self.stages:
            if isinstance(stage, kind):
                return stage
        raise ValueError(
            f"the dataflow has the stages {[s.name for s in self.stages]} but no "
            f"{kind.__name__}; a run needs generate, score and train."
        )

    def open_store(
        self, *, max_bytes: int, max_row_bytes: int, on_free: Callable[[FreedRows], None]
    ) -> StreamStore:
        """A store with this graph's columns and stages; the arguments are StreamStore's."""
        columns = {column for stage in self.stages for column in stage.writes}
        return StreamStore(
            tensors=[column.name for column in columns if column.tensor],
            scalars=[column.name for column in columns if not column.tensor],
            stages=[
                StageSpec(
                    name=stage.name,
                    reads=tuple(column.name for column in stage.reads),
                    writes=tuple(column.name for column in stage.writes),
                )
                for stage in self.stages
            ],
            group_size=self.stage(GenerateStage).group_size,
            max_bytes=max_bytes,
            max_row_bytes=max_row_bytes,
            on_free=on_free,
        )

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart: stages, joined by the columns that one writes and
        another reads."""
        writer = {column.name: s.name for s in self.stages for column in s.writes}
        lines = ["flowchart LR", f"    prompts([prompts]) --> {self.stages[0].name}"]
        for stage in self.stages:
            by_writer: dict[str, list[str]] = {}
            for column in stage.reads:
                by_writer.setdefault(writer[column.name], []).append(column.name)
            for source, columns in by_writer.items():
                lines.append(f"    {source} -- {', '.join(columns)} --> {stage.name}")
        for stage in self.stages:
            if isinstance(stage, TrainStage):
                lines.append(f"    {stage.name} -. weights, version v+1 .-> {self.stages[0].name}")
        return "\n".join(lines)

    def describe(self) -> str:
        """One line per stage: name, what it reads, what it writes."""
        width = max(len(stage.name) for stage in self.stages)
        lines = []
        for stage in self.stages:
            reads = ", ".join(c.name for c in stage.reads) or "prompts"
            writes = ", ".join(c.name for c in stage.writes) or "policy"
            lines.append(f"{stage.name:<{width}}  {reads}  ->  {writes}")
        return "\n".join(lines)

    def _add(self, stage: Stage) -> Column:
        writers = {column.name: s.name for s in self.stages for column in s.writes}
        names = [s.name for s in self.stages]
        require(
            stage.name not in names,
            f"stage {stage.name!r} stands twice in the dataflow; give the second another name.",
        )
        for column in stage.reads:
            require(
                column.name in writers,
                f"stage {stage.name!r} reads column {column.name!r}, which no earlier stage "
                f"writes (written so far: {sorted(writers)}); add the stage that writes it first.",
            )
        for column in stage.writes:
            require(
                column.name not in writers,
                f"stage {stage.name!r} writes column {column.name!r}, as stage "
                f"{writers.get(column.name)!r} does; a column has one writer, rename one.",
            )
        self.stages.append(stage)
        return stage.writes[0] if stage.writes else Column("")

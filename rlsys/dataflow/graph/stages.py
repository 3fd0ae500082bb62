"""The elements of a dataflow: columns, models, and the kinds of stages.

Columns hold one value per row, which travels with the row's metadata, or one per token, whose bytes
are in the store's shared memory. A stage names the columns that it reads and writes, and no other
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from rlsys.config import DataConfig, RoleConfig, TrainedRoleConfig
from rlsys.data.swarm.shared_pool import Shared
from rlsys.environments.environment import Environment
from rlsys.errors import require
from rlsys.rewards.reward import Reward
from rlsys.types import BRANCH_FIELDS, Rollout

if TYPE_CHECKING:  # --help of a recipe must not import torch, which takes seconds
    import torch

    from rlsys.algorithms.aggregation import Aggregation

# One tensor [G] per column read -> [G], one value per rollout of the group; None refuses the group.
GroupFn = Callable[..., "torch.Tensor | None"]
RewardFn = Callable[..., Any]
# Functions of a judge: the question about a rollout, as a text or chat messages; and the score in a
# reply, or None.
Ask = Callable[[Rollout], str | Sequence[Mapping[str, Any]]]
Parse = Callable[[str], float | None]

Role = RoleConfig | TrainedRoleConfig
Per = Literal["row", "token"]
Head = Literal["logits", "value", "score"]

PROXIMAL_COLUMN = "proximal_logprobs"  # of the policy at the beginning of the step
PROMPT_COLUMN, SAMPLER_COLUMN = "prompt_token_ids", "sampler_logprobs"
VERSIONS_COLUMN = "policy_versions"
ROW_COLUMNS = (PROMPT_COLUMN, "token_ids", VERSIONS_COLUMN)  # that every model needs
ROLLOUT_COLUMNS = (PROMPT_COLUMN, "token_ids", SAMPLER_COLUMN, VERSIONS_COLUMN)
# The experts of the tokens of prompt and completion, if they are recorded.
EXPERTS_COLUMN = "routed_experts"
BYTES_PER_VALUE = 4

# For rollouts that are trees: the order of their branches (rlsys.engines.models.branches).
BRANCHES_COLUMN = "branches"
# For rollouts of several turns, per token (rlsys.algorithms.turn_credit): the reward of its turn at
# the last sampled token, else 0; the number of its turn, or -1; the number of its seat.
TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN = "turn_rewards", "turns", "seats"

# A row's columns of one writer are padded to the arena's alignment.
PADDING_BYTES = 64

# Whether a model's output has a value per token or per row.
PER: dict[Head, Per] = {"logits": "token", "value": "token", "score": "row"}


@dataclass(frozen=True)
class Column:
    """A field of every row."""

    name: str
    per: Per = "row"
    width: int = 1  # values of each row or token; those of a token are adjacent
    value_bytes: int = BYTES_PER_VALUE
    is_implicit: bool = False  # no stage writes it


class RolloutColumns(NamedTuple):
    """Columns that sampling writes, with a value per token."""

    prompt_token_ids: Column
    token_ids: Column
    sampler_logprobs: Column
    policy_versions: Column


class Episodes(NamedTuple):
    """Columns of flow.play; `turn_rewards`, `turns` and `seats` have a value per token."""

    rollouts: RolloutColumns
    reward: Column
    turn_rewards: Column
    turns: Column
    seats: Column
    parts: tuple[Column, ...]


# Stored like a column of tokens, with `width` values per branch.
BRANCHES = Column(BRANCHES_COLUMN, "token", width=BRANCH_FIELDS)

# Columns that every rollout has without a stage, for functions over groups and batches, and for
# losses.
NUM_TOKENS = Column("num_tokens", is_implicit=True)  # of the completion
TRUNCATED = Column("truncated", is_implicit=True)  # 1 if ended by the token limit, else 0
# 1 for the greedy baseline of its group, else 0.
IS_GREEDY = Column("is_greedy", is_implicit=True)
# For pairs of a dataset: 1 for the first of its group, else -1.
PREFERENCE = Column("preference", is_implicit=True)
IMPLICIT_COLUMNS = (NUM_TOKENS, TRUNCATED, IS_GREEDY, PREFERENCE)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a run: those of a configured dataset, or rows that the recipe makes.

    Groups that other runs have sampled can replace some of them.

    Attributes:
        config: The data options.
        rows: Rows of the recipe, instead of a dataset.
        shared: Exchange of groups with other runs.

    Raises:
        InvalidValue: Both data.source and rows are given, or the rows are not a list of
            dictionaries.
    """

    config: DataConfig
    rows: Sequence[dict[str, Any]] | None = None
    shared: Shared | None = None

    @property
    def may_be_external(self) -> bool:
        """Return whether some prompts come with rollouts of another run."""
        return self.shared is not None and self.shared.groups_per_step > 0

    def __post_init__(self) -> None:
        require(
            isinstance(self.config, DataConfig),
            "Prompts.config",
            self.config,
            rule="is not a DataConfig",
            fix="Give the configuration's data.",
        )
        if self.rows is not None:
            default = DataConfig()
            for name in ("source",) if self.config.source else ("split", "subset"):
                given = getattr(self.config, name)
                require(
                    given == getattr(default, name),
                    f"data.{name}",
                    given,
                    rule="the recipe makes its own rows",
                    fix="Remove the option, or use a recipe that reads a dataset "
                    "(recipes/README.md).",
                )
        check_rows(self.rows, "Prompts.rows")


# Types that look like a dataset and cannot be used: the rule and the fix.
WRONG_ROWS = {
    "IterableDataset": (
        "has no length, which the order of a run needs",
        "Give the rows that the run may use, such as list(rows.take(10_000)).",
    ),
    "IterableDatasetDict": (
        "has several splits and no length",
        'Give the rows that the run may use, such as list(rows["train"].take(10_000)).',
    ),
    "DatasetDict": ("has several splits", 'Give one of them, such as rows["train"].'),
    "DataFrame": (
        "is not a datasets.Dataset",
        "Give datasets.Dataset.from_pandas(rows, preserve_index=False).",
    ),
    "Table": ("is not a datasets.Dataset", "Give datasets.Dataset(rows)."),
}


def check_rows(rows: Any, field: str) -> None:
    """Raise InvalidValue unless rows are a list of dictionaries, a datasets.Dataset or None."""
    if rows is None:
        return
    for kind in type(rows).__mro__:
        rule, fix = WRONG_ROWS.get(kind.__name__, ("", ""))
        require(not rule, f"type of {field}", kind.__name__, rule=rule, fix=fix)
    if hasattr(rows, "column_names"):
        return
    require(
        isinstance(rows, Sequence) and not isinstance(rows, str | bytes),
        field,
        rows,
        rule="is not a list of rows",
        fix="Give a list of dictionaries, or a datasets.Dataset.",
    )
    for number, row in enumerate(rows):
        require(
            isinstance(row, Mapping),
            f"{field}[{number}]",
            row,
            rule="is not a row",
            fix="Give a dictionary of columns, such as {'prompt': '1+1='}.",
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A role in the algorithm.

    Attributes:
        config: Its initial weights and its resources. None for the graph's main model, which uses
            the options model, trainer and rollout of the run.
    """

    name: str
    head: Head = "logits"
    config: Role | None = None

    @property
    def is_main(self) -> bool:
        """Return whether this is the main model of the graph."""
        return self.config is None

    @property
    def may_train(self) -> bool:
        """Return whether a stage may train this model."""
        return self.is_main or isinstance(self.config, TrainedRoleConfig)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A function over rows, with the columns that it reads and writes."""

    name: str
    reads: tuple[Column, ...] = ()
    writes: tuple[Column, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SourceStage(Stage):
    """A stage that makes rows."""

    prompts: Prompts
    group_size: int


@dataclass(frozen=True, kw_only=True)
class GenerateStage(SourceStage):
    """A stage that samples completions."""

    model: Model
    greedy_baseline: bool = False  # whether the last rollout of each group is greedy


@dataclass(frozen=True, kw_only=True)
class PlayStage(GenerateStage):
    """A stage that plays episodes, to which the environment gives rewards."""

    environment: Environment
    parts: tuple[str, ...] = ()  # parts of the reward that have columns of their own
    seats: tuple[tuple[str, Model], ...] = ()  # seats of other models

    @property
    def partners(self) -> tuple[Model, ...]:
        """The models that play seats besides the policy, frozen or trained."""
        return tuple({model.name: model for _, model in self.seats}.values())

    def trained_seats(self, model: Model) -> tuple[int, ...] | None:
        """Return the numbers of the seats whose tokens train a model.

        Return None for all sampled tokens: the model plays no seat, or is the only policy.
        """
        others = dict(self.seats)
        plays = model is self.model or model in others.values()
        if not plays or not any(one.may_train for one in others.values()):
            return None
        players = [others.get(seat, self.model) for seat in self.environment.seats]
        return tuple(number for number, one in enumerate(players) if one is model)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The columns with a value per row: the reward, then its parts."""
        return tuple(column.name for column in self.writes if column.per == "row")


@dataclass(frozen=True, kw_only=True)
class DatasetStage(SourceStage):
    """A stage that reads completions from a dataset."""

    completions: str  # a column of the prompts' dataset


@dataclass(frozen=True, kw_only=True)
class InferStage(Stage):
    """A stage that writes a model's outputs for rows.

    Attributes:
        top_k: If not 0, write the likeliest tokens and their log-probabilities instead.
        adapters: Whether to use the adapters of a model that is trained with them.
    """

    model: Model
    top_k: int = 0
    adapters: bool = True


@dataclass(frozen=True, kw_only=True)
class JudgeStage(Stage):
    """A stage that scores rows by the replies of a frozen language model."""

    model: Model
    ask: Ask
    parse: Parse
    max_tokens: int  # of a reply
    temperature: float  # 0 for the likeliest tokens


@dataclass(frozen=True, kw_only=True)
class ScoreStage(Stage):
    """A stage that writes the sum of rewards, and a column for each of `parts`."""

    rewards: tuple[Reward, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PerGroupStage(Stage):
    """A function over each group."""

    function: GroupFn


@dataclass(frozen=True, kw_only=True)
class PerBatchStage(Stage):
    """A function over all rows of a step."""

    function: Callable[..., Any]

    @property
    def has_tokens(self) -> bool:
        """Return whether it handles values per token, and so runs on the node with the bytes."""
        return any(column.per == "token" for column in (*self.reads, *self.writes))


@dataclass(frozen=True, kw_only=True)
class TrainStage(Stage):
    """The training of a model.

    Attributes:
        watches: Columns that it reads for the metrics only.
        seats: Seats whose tokens it trains on; None for all sampled tokens.
    """

    model: Model
    loss: Callable[..., Any]
    aggregation: Aggregation
    watches: tuple[Column, ...]
    seats: tuple[int, ...] | None = None

    @property
    def trains_on(self) -> tuple[Column, ...]:
        """Columns that the loss reads."""
        return tuple(column for column in self.reads if column not in self.watches)


class CoefficientController(Protocol):
    """A rule that adapts a coefficient, such as rlsys.algorithms.adaptive_kl."""

    @property
    def initial(self) -> float:
        """The coefficient of the first step."""

    def next(self, coefficient: float, divergence: float, /) -> float:
        """Return the coefficient of the next step.

        Args:
            coefficient: That of the current step.
            divergence: Mean of the stage's column over the rows of the current step.
        """


@dataclass(frozen=True, kw_only=True)
class ControlStage(Stage):
    """A coefficient that is adapted after each step."""

    controller: CoefficientController


RowStage = InferStage | JudgeStage
StepStage = PerBatchStage | InferStage | ControlStage


def names_of(columns: Iterable[Column]) -> tuple[str, ...]:
    """Return the names of columns."""
    return tuple(column.name for column in columns)

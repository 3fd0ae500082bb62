"""What a dataflow consists of: columns, models, and the kinds of stages.

Columns hold one value per row, which travels with the row's metadata, or one per token, whose bytes
live in the store's shared memory. A stage says which it reads and which it writes, and nothing of
its neighbours.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from rlsys.config import DataConfig, RoleConfig, TrainedRoleConfig, require
from rlsys.data.swarm.shared_pool import Shared
from rlsys.environments.environment import Environment
from rlsys.rewards.reward import Reward
from rlsys.types import BRANCH_FIELDS, Rollout

if TYPE_CHECKING:  # a recipe's --help does without torch, whose import takes seconds
    import torch

    from rlsys.algorithms.aggregation import Aggregation

# One tensor [G] per column read -> [G], one value per rollout of the group; None refuses the group.
GroupFn = Callable[..., "torch.Tensor | None"]
RewardFn = Callable[..., Any]
# Of a judge: the question about a rollout, as text or as messages of a chat; and the score that a
# reply gives, None where it gives none.
Ask = Callable[[Rollout], str | Sequence[Mapping[str, Any]]]
Parse = Callable[[str], float | None]

Role = RoleConfig | TrainedRoleConfig
Per = Literal["row", "token"]
Head = Literal["logits", "value", "score"]

# What sampling writes, in bytes a token.
PROXIMAL_COLUMN = "proximal_logprobs"  # by the policy at the beginning of the step
PROMPT_COLUMN, SAMPLER_COLUMN = "prompt_token_ids", "sampler_logprobs"
VERSIONS_COLUMN = "policy_versions"
ROW_COLUMNS = (PROMPT_COLUMN, "token_ids", VERSIONS_COLUMN)  # with which a model can do anything
ROLLOUT_COLUMNS = (PROMPT_COLUMN, "token_ids", SAMPLER_COLUMN, VERSIONS_COLUMN)
# Beside them, of prompt and completion, where the experts of tokens are recorded.
EXPERTS_COLUMN = "routed_experts"
BYTES_PER_VALUE = 4

# Beside them, of rollouts that are trees: which tokens stand behind which
# (rlsys.engines.models.branches).
BRANCHES_COLUMN = "branches"
# And of rollouts of several turns, of each token, for functions over a step
# (rlsys.algorithms.turn_credit): what its turn earned, at the turn's last sampled token, 0 at
# others; the number of the turn that sampled it, -1: none did; whose turn it is.
TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN = "turn_rewards", "turns", "seats"

# A row's columns of one writer are padded to the arena's alignment.
PADDING_BYTES = 64

# What a model makes of a row: one value for each of its tokens, or one for all.
PER: dict[Head, Per] = {"logits": "token", "value": "token", "score": "row"}


@dataclass(frozen=True)
class Column:
    """One field of every row."""

    name: str
    per: Per = "row"
    width: int = 1  # values of each row or token; those of a token stand one after another
    value_bytes: int = BYTES_PER_VALUE
    is_fact: bool = False  # no stage writes it


class RolloutColumns(NamedTuple):
    """Columns that sampling writes, with a value per token."""

    prompt_token_ids: Column
    token_ids: Column
    sampler_logprobs: Column
    policy_versions: Column


class Episodes(NamedTuple):
    """What flow.play writes; `turn_rewards`, `turns` and `seats` have a value per token."""

    rollouts: RolloutColumns
    reward: Column
    turn_rewards: Column
    turns: Column
    seats: Column
    parts: tuple[Column, ...]


# Its bytes lie in the store as those of tokens do; of a row it has so many for each branch.
BRANCHES = Column(BRANCHES_COLUMN, "token", width=BRANCH_FIELDS)

# Of every rollout, for functions over groups and batches, and for losses: what no stage writes, and
# a recipe names as rlsys.NUM_TOKENS, rlsys.TRUNCATED, rlsys.IS_GREEDY, rlsys.PREFERENCE.
NUM_TOKENS = Column("num_tokens", is_fact=True)  # of the completion
TRUNCATED = Column("truncated", is_fact=True)  # 1: ended by the limit on tokens, else 0
# Of groups that are sampled with a greedy baseline. 1: it is that one, else 0.
IS_GREEDY = Column("is_greedy", is_fact=True)
# Of the pairs of a dataset. 1: the first of its group, else -1.
PREFERENCE = Column("preference", is_fact=True)
IMPLICIT_COLUMNS = (NUM_TOKENS, TRUNCATED, IS_GREEDY, PREFERENCE)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Where prompts come from: a configured dataset, or rows made by the recipe; and, in place of
    some of them, groups that other runs have sampled. Raises ValueError for both, data.source and
    rows.
    """

    config: DataConfig
    rows: Sequence[dict[str, Any]] | None = None
    shared: Shared | None = None

    @property
    def may_be_external(self) -> bool:
        """Some of them come with what another run has sampled."""
        return self.shared is not None and self.shared.groups_per_step > 0

    def __post_init__(self) -> None:
        require(
            isinstance(self.config, DataConfig),
            f"Prompts.config={self.config!r} is no DataConfig; give the configuration's data.",
        )
        for name, default in (("split", DataConfig().split), ("subset", None)):
            given = getattr(self.config, name)
            require(
                self.rows is None or bool(self.config.source) or given == default,
                f"data.{name}={given!r}: the recipe makes its own rows. Remove the option, or use "
                "a recipe that reads a dataset (recipes/README.md).",
            )
        require(
            self.rows is None or not self.config.source,
            f"data.source={self.config.source!r} would not be read: the recipe makes its own rows; "
            "leave it out, or use a recipe that reads a dataset (recipes/README.md).",
        )
        check_rows(self.rows, "Prompts.rows")


# The fix for rows of a type that looks like a dataset and is none, by the name of the type.
ROWS_OF = {
    "IterableDataset": "it has no length, and the order of a run needs one; give the rows that the "
    "run may use, such as list(rows.take(10_000))",
    "IterableDatasetDict": "it has several splits and no length; give the rows that the run may "
    'use, such as rows = rows["train"]; list(rows.take(10_000))',
    "DatasetDict": 'it has several splits; give one, such as rows["train"]',
    "DataFrame": "give datasets.Dataset.from_pandas(rows, preserve_index=False)",
    "Table": "give datasets.Dataset(rows)",
}


def check_rows(rows: Any, name: str) -> None:
    """Raise ValueError for `rows`, which a recipe gives under `name`, unless they are a list of
    dictionaries, a datasets.Dataset or None.
    """
    if rows is None:
        return
    for kind in type(rows).__mro__:
        require(
            kind.__name__ not in ROWS_OF,
            f"{name} is of type {kind.__name__}: {ROWS_OF.get(kind.__name__)}.",
        )
    if hasattr(rows, "column_names"):
        return
    require(
        isinstance(rows, Sequence) and not isinstance(rows, str | bytes),
        f"{name}={reprlib.repr(rows)} is no list of rows; give a list of dictionaries, or a "
        "datasets.Dataset.",
    )
    for number, row in enumerate(rows):
        require(
            isinstance(row, Mapping),
            f"{name}[{number}]={reprlib.repr(row)} is no row; give a dictionary of columns, such "
            f"as {{'prompt': {reprlib.repr(row)}}}.",
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A role in the algorithm. `config` says whose weights it begins with and what it runs on; None
    for the graph's main model, which runs by model, trainer and rollout of the run's configuration:
    the policy, or whatever a graph without one is for.
    """

    name: str
    head: Head = "logits"
    config: Role | None = None

    @property
    def is_main(self) -> bool:
        return self.config is None

    @property
    def may_train(self) -> bool:
        return self.is_main or isinstance(self.config, TrainedRoleConfig)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A function over rows: what it reads, what it writes."""

    name: str
    reads: tuple[Column, ...] = ()
    writes: tuple[Column, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SourceStage(Stage):
    """Where rows come from."""

    prompts: Prompts
    group_size: int


@dataclass(frozen=True, kw_only=True)
class GenerateStage(SourceStage):
    model: Model
    greedy_baseline: bool = False  # the last rollout of each group is one


@dataclass(frozen=True, kw_only=True)
class PlayStage(GenerateStage):
    """An environment has the model sample, turn by turn, and says what the episode is worth."""

    environment: Environment
    parts: tuple[str, ...] = ()  # of its reward, that have columns of their own
    seats: tuple[tuple[str, Model], ...] = ()  # that other models play, and which

    @property
    def partners(self) -> tuple[Model, ...]:
        """The models that play seats beside the policy, frozen or trained."""
        return tuple({model.name: model for _, model in self.seats}.values())

    def trained_seats(self, model: Model) -> tuple[int, ...] | None:
        """Whose tokens train this model, by number; None: all that were sampled do, since it plays
        no seat, or there is no other policy.
        """
        others = dict(self.seats)
        plays = model is self.model or model in others.values()
        if not plays or not any(one.may_train for one in others.values()):
            return None
        whose = [others.get(seat, self.model) for seat in self.environment.seats]
        return tuple(number for number, one in enumerate(whose) if one is model)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The columns with a value per row: the reward, then its parts."""
        return tuple(column.name for column in self.writes if column.per == "row")


@dataclass(frozen=True, kw_only=True)
class DatasetStage(SourceStage):
    completions: str  # a column of the prompts' dataset


@dataclass(frozen=True, kw_only=True)
class InferStage(Stage):
    """With `top_k` it writes the likeliest tokens of each place and what the model says of them,
    otherwise what its head says of the token there. Without `adapters` a model that is trained by
    them says what it would without.
    """

    model: Model
    top_k: int = 0
    adapters: bool = True


@dataclass(frozen=True, kw_only=True)
class JudgeStage(Stage):
    """A frozen language model is asked about each row, and its reply is the row's score."""

    model: Model
    ask: Ask
    parse: Parse
    max_tokens: int  # of a reply
    temperature: float  # 0: the likeliest token each time


@dataclass(frozen=True, kw_only=True)
class ScoreStage(Stage):
    """It writes the sum of the rewards, and then a column for each of `parts`."""

    rewards: tuple[Reward, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PerGroupStage(Stage):
    function: GroupFn


@dataclass(frozen=True, kw_only=True)
class PerBatchStage(Stage):
    function: Callable[..., Any]

    @property
    def has_tokens(self) -> bool:
        """It reads or writes a value per token, so that it runs where the bytes are."""
        return any(column.per == "token" for column in (*self.reads, *self.writes))


@dataclass(frozen=True, kw_only=True)
class TrainStage(Stage):
    model: Model
    loss: Callable[..., Any]
    aggregation: Aggregation
    watches: tuple[Column, ...]  # of what it reads, only for the metrics
    seats: tuple[int, ...] | None = None  # whose tokens it trains on; None: all that were sampled

    @property
    def trains_on(self) -> tuple[Column, ...]:
        return tuple(column for column in self.reads if column not in self.watches)


class CoefficientController(Protocol):
    """Of a coefficient, such as rlsys.algorithms.adaptive_kl."""

    @property
    def initial(self) -> float:
        """In the first step."""

    def next(self, coefficient: float, divergence: float, /) -> float:
        """In the next step, after one with this coefficient in which the column that is read had
        this mean.
        """


@dataclass(frozen=True, kw_only=True)
class ControlStage(Stage):
    """A coefficient that each step sets for the next by what it saw."""

    controller: CoefficientController


RowStage = InferStage | JudgeStage
StepStage = PerBatchStage | InferStage | ControlStage


def names_of(columns: Iterable[Column]) -> tuple[str, ...]:
    return tuple(column.name for column in columns)

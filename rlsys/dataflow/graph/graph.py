"""The algorithm as a graph of stages over columns.

A recipe builds one `Dataflow`, in the paper's order. Each call adds a stage and returns the columns
that it writes. Edges follow from the columns. The launcher makes the graph of the run from it
(run_graph.py), which the controller runs.

    generate ─► token_ids, sampler_logprobs, ... ─► score ─► reward ─► ... ─► train
    dataset  ─► token_ids, ... ─────────────────────────────────► infer ─► ... ─► train

Rows are rollouts, or completions of a dataset. A stage runs as soon as its columns are complete:

    per row    infer (a frozen model), judge, score
    per group  per_group
    per step   per_batch, infer (a trained model, with its weights at the beginning of the step)
    per step   train; it starts with the first rows unless a stage needs the whole step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rlsys.common.user_functions import name_of
from rlsys.config.fields import checked
from rlsys.dataflow.graph.argument_checks import (
    check_batch_columns,
    check_batch_stage,
    check_columns,
    check_controller,
    check_function,
    check_greedy_baseline,
    check_group_columns,
    check_group_size,
    check_infer,
    check_judge,
    check_names,
    check_not_shared,
    check_parts_of_play,
    check_parts_of_score,
    check_prompts,
    check_rewards,
    check_rollouts,
    check_sampler,
    check_seats,
    check_train,
)
from rlsys.dataflow.graph.drawing import as_lines, as_mermaid
from rlsys.dataflow.graph.stage_graph import StageGraph, distinct
from rlsys.dataflow.graph.stages import (
    BRANCHES,
    PER,
    ROLLOUT_COLUMNS,
    SAMPLER_COLUMN,
    SEATS_COLUMN,
    TURN_REWARDS_COLUMN,
    TURNS_COLUMN,
    Ask,
    CoefficientController,
    Column,
    ControlStage,
    DatasetStage,
    Episodes,
    GenerateStage,
    GroupFn,
    Head,
    InferStage,
    JudgeStage,
    Model,
    Parse,
    Per,
    PerBatchStage,
    PerGroupStage,
    PlayStage,
    Prompts,
    RewardFn,
    Role,
    RolloutColumns,
    ScoreStage,
    Stage,
    TrainStage,
)
from rlsys.dataflow.graph.validation import (
    check_is_own,
    check_new_model,
    check_new_stage,
    check_whole,
)
from rlsys.environments.environment import as_environment
from rlsys.errors import require
from rlsys.rewards.reward import as_rewards

if TYPE_CHECKING:  # --help of a recipe must not import torch, which takes seconds
    from rlsys.algorithms.aggregation import Aggregation

S = TypeVar("S", bound=Stage)

NO_SEATS: Mapping[str, Model] = MappingProxyType({})


class Dataflow(StageGraph):
    """Stages in the order in which they were added.

    Every method raises InvalidValue for a column that no earlier stage writes, and for a second
    writer of a column. So the graph is acyclic.
    """

    def __init__(self) -> None:
        self.stages: tuple[Stage, ...] = ()
        self.models: dict[str, Model] = {}

    def model(self, name: str, config: Role | None = None, *, head: Head = "logits") -> Model:
        """Add a model that stages run.

        Args:
            name: Name of the model in messages and metrics.
            config: Its configuration; None for the main model, which uses the run's own
                configuration. The main model is trained, sampled and exported at the end.
            head: Output per token (logits, value) or per row (score).
        """
        check_new_model(self, name, config, head)
        self.models[name] = Model(name=name, head=head, config=config)
        return self.models[name]

    def generate(
        self, model: Model, prompts: Prompts, *, group_size: int, greedy_baseline: bool = False
    ) -> RolloutColumns:
        """Sample completions of each prompt.

        Args:
            model: The main model, which must have logits.
            prompts: Source of the prompts.
            group_size: Number of completions of each prompt.
            greedy_baseline: Whether the last completion of each group is greedy. It is scored like
                the others and never trained on. The column IS_GREEDY marks it.

        Returns:
            Columns with the tokens of prompts and completions, their log-probabilities under the
            sampling policy, and their policy versions.
        """
        check_is_own(self, "generate", model)
        check_prompts("generate", "prompts", prompts)
        check_sampler("generate", model)
        check_group_size("generate", group_size)
        check_greedy_baseline(group_size, greedy_baseline, prompts)
        columns = RolloutColumns(*(Column(name, "token") for name in ROLLOUT_COLUMNS))
        self._add_all(
            GenerateStage(
                name="generate",
                writes=columns,
                model=model,
                prompts=prompts,
                group_size=group_size,
                greedy_baseline=greedy_baseline,
            )
        )
        return columns

    def play(
        self,
        model: Model,
        environment: Any,
        tasks: Prompts,
        *,
        group_size: int,
        writes: str = "reward",
        parts: Sequence[str] = (),
        seats: Mapping[str, Model] = NO_SEATS,
    ) -> Episodes:
        """Play episodes of each task in an environment, instead of flow.generate and flow.score.

        The environment calls the model turn by turn and gives the reward of the episode. Rollouts
        may be trees of branches; models that read them handle this themselves.

        Args:
            model: The main model, which plays all seats that are not in `seats`.
            environment: An environment or its function.
            tasks: Rows with the tasks, which need no prompt.
            group_size: Number of episodes of each task.
            writes: Name of the reward's column.
            parts: Named numbers of the reward that get columns of their own.
            seats: Other models, by the seats that they play. Tokens of frozen models are not part
                of the rollouts, unless the environment shows them to others. Each trained model
                has a flow.train of its own, which trains it on the tokens of its seats.

        Returns:
            Rollouts as of flow.generate, rewards, and the columns that functions over turns read
            (rlsys.algorithms.turn_advantage): turn_rewards (at the last token of each turn), turns
            and seats.
        """
        check_is_own(self, "play", model)
        check_prompts("play", "tasks", tasks)
        check_group_size("play", group_size)
        check_sampler("play", model)
        check_not_shared("play", tasks)
        own_columns = {writes, *ROLLOUT_COLUMNS, TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN}
        check_parts_of_play(parts, own_columns)
        played = as_environment(environment)
        check_seats(played, seats)
        for partner in seats.values():
            check_is_own(self, "play", partner)
        rollouts = RolloutColumns(*(Column(name, "token") for name in ROLLOUT_COLUMNS))
        turn_rewards, turns, seat_numbers = (
            Column(name, "token") for name in (TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN)
        )
        reward = Column(writes)
        part_columns = tuple(Column(part) for part in parts)
        self._add_all(
            PlayStage(
                name="play",
                writes=(
                    *rollouts,
                    turn_rewards,
                    turns,
                    seat_numbers,
                    BRANCHES,
                    reward,
                    *part_columns,
                ),
                model=model,
                prompts=tasks,
                group_size=group_size,
                environment=played,
                parts=tuple(parts),
                seats=tuple(seats.items()),
            )
        )
        return Episodes(rollouts, reward, turn_rewards, turns, seat_numbers, part_columns)

    def dataset(
        self, prompts: Prompts, *, group_size: int, completions: str = "completions"
    ) -> tuple[Column, ...]:
        """Read completions from the prompts' dataset instead of sampling them.

        Use group_size=1 for demonstrations and group_size=2 for pairs, whose first completion is
        the better one (PREFERENCE).

        Args:
            prompts: Dataset with the prompts and completions.
            group_size: Number of completions of each prompt.
            completions: Column with a list of `group_size` completions, or with a single one. Each
                is a text or a list of chat messages. If it is the prompt column, that column has
                chats: the messages before the first reply are the prompt, and all replies are
                trained on. Without such a column, pairs come from the columns "chosen" and
                "rejected" (docs/formats.md).

        Returns:
            The columns of flow.generate without the sampler's log-probabilities, which are unknown.
            So losses with a ratio do not accept them.
        """
        check_prompts("dataset", "prompts", prompts)
        check_group_size("dataset", group_size)
        check_not_shared("dataset", prompts)
        columns = self._add_all(
            DatasetStage(
                name="dataset",
                writes=tuple(Column(name, "token") for name in ROLLOUT_COLUMNS),
                prompts=prompts,
                group_size=group_size,
                completions=completions,
            )
        )
        return tuple(column for column in columns if column.name != SAMPLER_COLUMN)

    def infer(
        self,
        model: Model,
        rollouts: Sequence[Column],
        *,
        writes: str,
        top_k: int = 0,
        adapters: bool = True,
    ) -> Column:
        """Compute a model's output for each rollout.

        The output is the log-probability of each token (head "logits"), a value per token
        ("value") or a score per rollout ("score"). A trained model computes it at the beginning of
        each step, with its weights at that time.

        Args:
            model: The model to run.
            rollouts: Columns of flow.generate, flow.dataset or flow.play.
            writes: Name of the column.
            top_k: Write the `top_k` likeliest tokens at each position instead, for losses that read
                them (rlsys.algorithms.top_k_distill). Each token then has 2 · top_k + 1 values: the
                ids, their log-probabilities, and that of all other tokens together. For frozen
                models only.
            adapters: Whether to use the adapters of a policy that is trained with them
                (model.lora). Without them the policy is its own reference, at no cost in memory.
        """
        check_is_own(self, "infer", model)
        check_infer(model, rollouts, top_k=top_k, adapters=adapters)
        return self._add(
            InferStage(
                name=f"infer {writes}",
                reads=tuple(rollouts),
                writes=(Column(writes, PER[model.head], 2 * top_k + 1),),
                model=model,
                top_k=top_k,
                adapters=adapters,
            )
        )

    def judge(
        self,
        model: Model,
        rollouts: Sequence[Column],
        *,
        ask: Ask,
        parse: Parse,
        writes: str = "score",
        max_tokens: int = 256,
        temperature: float = 0.0,
    ) -> Column:
        """Score each rollout by the reply of a frozen language model.

        A rollout without a score drops its group, like a failed reward function. Both functions
        run in the judge's process without a time limit, and should take milliseconds.

        Args:
            model: The judge, which has its own tokenizer and chat template.
            rollouts: Columns of flow.generate, flow.dataset or flow.play.
            ask: Returns the question about a rollout, as a text or a list of chat messages.
            parse: Returns the score in a reply, or None if there is none.
            writes: Name of the column.
            max_tokens: Maximum length of a reply.
            temperature: 0 for the likeliest tokens. Otherwise each rollout has its own random
                numbers, which are the same when it is judged again.
        """
        check_is_own(self, "judge", model)
        check_rollouts("judge", rollouts)
        check_judge(model, ask=ask, parse=parse, max_tokens=max_tokens, temperature=temperature)
        return self._add(
            JudgeStage(
                name=f"judge {writes}",
                reads=tuple(rollouts),
                writes=(Column(writes),),
                model=model,
                ask=ask,
                parse=parse,
                max_tokens=max_tokens,
                temperature=temperature,
            )
        )

    @overload
    def score(
        self, rollouts: Sequence[Column], rewards: Sequence[RewardFn], *, writes: str = "reward"
    ) -> Column: ...

    @overload
    def score(
        self,
        rollouts: Sequence[Column],
        rewards: Sequence[RewardFn],
        *,
        writes: str = "reward",
        parts: Sequence[str],
    ) -> tuple[Column, ...]: ...

    def score(
        self,
        rollouts: Sequence[Column],
        rewards: Sequence[RewardFn],
        *,
        writes: str = "reward",
        parts: Sequence[str] = (),
    ) -> Column | tuple[Column, ...]:
        """Compute the reward of each finished rollout: the weighted sum of all functions.

        Args:
            rollouts: Columns of flow.generate, flow.dataset or flow.play.
            rewards: Reward functions.
            writes: Name of the reward's column.
            parts: Unweighted rewards that get columns of their own, by the name of the function, or
                "name/key" for a function that returns a dictionary.

        Returns:
            The column of the reward, or a tuple of it and the columns of `parts` if there are any.
        """
        check_columns("score", "rollouts", rollouts)
        require(
            not self.all(ScoreStage),
            "flow.score",
            rule="the dataflow has a flow.score already",
            fix="Give one flow.score all functions, and name in parts=[...] those that should have "
            "columns of their own.",
        )
        check_rewards(rewards)
        functions = as_rewards(rewards)
        check_parts_of_score(parts, [one.name for one in functions])
        columns = self._add_all(
            ScoreStage(
                name="score",
                reads=tuple(rollouts),
                writes=(Column(writes), *map(Column, parts)),
                rewards=functions,
                parts=tuple(parts),
            )
        )
        return columns if parts else columns[0]

    def per_group(self, function: GroupFn, *columns: Column, name: str = "advantages") -> Column:
        """Compute a column over each group, as soon as its columns are complete.

        Args:
            function: Takes a tensor [G] for each column and returns one [G]. None refuses the
                group, and another one is issued.
            columns: Columns with a value per row.
            name: Name of the new column.
        """
        check_function("per_group", "function", function, "group_advantage")
        check_columns("per_group", "columns", columns)
        check_group_columns(function, columns)
        from rlsys.algorithms.group_functions import check_group_function

        check_group_function(function, len(columns))
        self._check_group_size(function)
        return self._add(
            PerGroupStage(name=name, reads=columns, writes=(Column(name),), function=function)
        )

    def per_batch(
        self,
        function: Callable[..., Any],
        *columns: Column,
        writes: Sequence[str] = ("advantages",),
        per: Per = "row",
    ) -> tuple[Column, ...]:
        """Compute columns over all rows of a step, once its rows are chosen.

        Args:
            function: rlsys.algorithms.batch_functions describes its arguments and results.
            columns: Columns that it reads.
            writes: Names of the new columns.
            per: Whether these have a value per row or per token.

        Returns:
            A tuple of the new columns: `(advantages,) = flow.per_batch(...)`.
        """
        check_function("per_batch", "function", function, "batch_advantage", "token_advantage")
        check_columns("per_batch", "columns", columns)
        check_names("per_batch", "writes", writes, "advantages")
        require(
            len(writes) > 0,
            "flow.per_batch: writes",
            writes,
            rule="is empty",
            fix="Give the name of a column.",
        )
        checked(per, Per, f"flow.per_batch({name_of(function)}): per")
        check_batch_columns(function, columns)
        stage = PerBatchStage(
            name=" and ".join(writes),
            reads=columns,
            writes=tuple(Column(name, per) for name in writes),
            function=function,
        )
        check_batch_stage(stage)
        self._check_group_size(function)
        return self._add_all(stage)

    def control(
        self, controller: CoefficientController, column: Column, *, writes: str = "kl_coefficient"
    ) -> Column:
        """Add a coefficient that is the same for all rows of a step and adapted after each step.

        A resumed run continues with its last value.

        Args:
            controller: Gives the first value (`initial`) and each next one: `next(value, mean of
                column over the rows of the step)`.
            column: Column with a value per row.
            writes: Name of the coefficient's column.
        """
        check_controller(controller, column)
        return self._add(
            ControlStage(
                name=writes, reads=(column,), writes=(Column(writes),), controller=controller
            )
        )

    def train(
        self,
        model: Model,
        rollouts: Sequence[Column],
        *columns: Column,
        loss: Callable[..., Any],
        aggregation: Aggregation,
        watch: Sequence[Column] = (),
    ) -> None:
        """Train a model: minimize a loss per token over the rollouts.

        Args:
            model: The main model, or one with a TrainedRoleConfig.
            rollouts: Columns of flow.generate, flow.dataset or flow.play.
            columns: Other columns that the loss reads.
            loss: Function of LossInputs, ValueInputs or ScoreInputs.
            aggregation: Weights of the tokens in the sum of their losses.
            watch: Columns for the metrics only.
        """
        check_is_own(self, "train", model)
        source = self.source
        check_train(
            model,
            rollouts,
            columns,
            loss=loss,
            aggregation=aggregation,
            watch=watch,
            group_size=source.group_size,
        )
        seats = source.trained_seats(model) if isinstance(source, PlayStage) else None
        seat_numbers = (Column(SEATS_COLUMN, "token"),) if seats is not None else ()
        self._add(
            TrainStage(
                name="train" if model.is_main else f"train {model.name}",
                reads=distinct((*rollouts, *columns, *watch, *seat_numbers)),
                model=model,
                loss=loss,
                aggregation=aggregation,
                watches=tuple(one for one in watch if one not in (*columns, *seat_numbers)),
                seats=seats,
            )
        )

    def check(self) -> None:
        """Raise InvalidValue for mistakes that only the complete graph shows."""
        check_whole(self)

    def to_mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart."""
        return as_mermaid(self)

    def describe(self) -> str:
        """Return one line per stage: its name, the columns it reads, the columns it writes."""
        return as_lines(self)

    def _check_group_size(self, function: Callable[..., Any]) -> None:
        from rlsys.algorithms.group_functions import check_group_size

        check_group_size(function, self.source.group_size)

    def _add(self, stage: Stage) -> Column:
        return (*self._add_all(stage), Column(""))[0]

    def _add_all(self, stage: Stage) -> tuple[Column, ...]:
        has_branches = any(BRANCHES in one.writes for one in self.stages)
        if has_branches and isinstance(stage, InferStage | TrainStage):
            # Without them a model would read a tree of branches as one sequence.
            stage = replace(stage, reads=distinct((*stage.reads, BRANCHES)))
        check_new_stage(stage, self.stages)
        self.stages = (*self.stages, stage)
        return stage.writes

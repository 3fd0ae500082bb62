"""The algorithm as a graph of stages over columns.

A recipe builds one `Dataflow`, in the paper's order; each call adds a stage and returns the columns
that it writes. Edges follow from the columns. The controller runs this object.

    generate ─► token_ids, sampler_logprobs, ... ─► score ─► reward ─► ... ─► train
    dataset  ─► token_ids, ... ─────────────────────────────────► infer ─► ... ─► train

Rows are rollouts, or completions that a dataset holds. A stage runs as soon as what it reads is
there:

    for each row    infer (a frozen model), judge, score
    for each group  per_group
    for each step   per_batch, infer (a model that is trained: its weights at the step's beginning)
    for each step   train; rows stream in where nothing else waits for the whole step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rlsys.common.user_functions import name_of
from rlsys.config import JudgeConfig, require
from rlsys.config.fields import checked
from rlsys.dataflow.graph.argument_checks import (
    check_aggregation,
    check_columns,
    check_function,
    check_group_size,
    check_is,
    check_judge,
    check_loss,
    check_names,
    check_pairs,
    check_read,
    check_rollouts,
    check_seats,
    check_stage,
    check_text_function,
    check_tokens,
)
from rlsys.dataflow.graph.drawing import as_lines, as_mermaid
from rlsys.dataflow.graph.stage_graph import StageGraph, distinct
from rlsys.dataflow.graph.stages import (
    BRANCHES,
    BRANCHES_COLUMN,
    EXPERTS_COLUMN,
    PER,
    PROMPT_COLUMN,
    PROXIMAL_COLUMN,
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
    SourceStage,
    Stage,
    TrainStage,
)
from rlsys.dataflow.graph.validation import check_groups, check_whole
from rlsys.environments.environment import as_environment
from rlsys.rewards.reward import as_rewards

if TYPE_CHECKING:  # a recipe's --help does without torch, whose import takes seconds
    from rlsys.algorithms.aggregation import Aggregation

S = TypeVar("S", bound=Stage)

NO_SEATS: Mapping[str, Model] = MappingProxyType({})


A_SOURCE = "Prompts(config=cfg.data), with rows=... for rows of your own"


class Dataflow(StageGraph):
    """Stages in the order in which they were stated.

    Every method raises ValueError for a column that no earlier stage writes (so the graph is
    acyclic by construction) and for a second writer of a column, naming both stages.
    """

    def model(self, name: str, config: Role | None = None, *, head: Head = "logits") -> Model:
        """A model that stages run. One of them, the main model, has no configuration of its own;
        it is trained, sampled where anything is, and exported at the end.
        """
        require(
            isinstance(name, str) and bool(name),
            f"flow.model is given {name!r} for its name; give a text, such as 'reference'.",
        )
        told = f"model({name!r})"
        fix = (
            "a RoleConfig, with the path in its model, or a TrainedRoleConfig if a stage trains it"
        )
        check_is(told, "configuration", config, Role | None, fix)
        checked(head, Head, f"flow.{told}: head")
        require(
            name not in self.models,
            f"model {name!r} stands twice in the dataflow; give the second another name.",
        )
        mains = [model.name for model in self.models.values() if model.is_main]
        require(
            config is not None or not mains,
            f"flow.model({name!r}) without a configuration: {mains} runs by the run's own model, "
            "trainer and rollout already; give every other model a RoleConfig, or a "
            "TrainedRoleConfig if a stage trains it.",
        )
        self.models[name] = Model(name=name, head=head, config=config)
        return self.models[name]

    def generate(
        self, model: Model, prompts: Prompts, *, group_size: int, greedy_baseline: bool = False
    ) -> RolloutColumns:
        """Sample `group_size` completions of each prompt with `model`.

        `greedy_baseline`: the last one of each group takes the likeliest token each time. It is
        scored as the others are and never trained on; IS_GREEDY tells functions which it is.
        """
        self._check_model("generate", model)
        check_is("generate", "prompts", prompts, Prompts, A_SOURCE)
        require(
            model.is_main and model.head == "logits",
            f"flow.generate samples with {model.name!r} (head {model.head!r}); replicas run the "
            "model without a configuration of its own, and it must have logits.",
        )
        check_group_size("generate", group_size)
        checked(greedy_baseline, bool, "flow.generate: greedy_baseline")
        require(
            group_size >= 2 or not greedy_baseline,
            f"flow.generate(greedy_baseline=True): group_size={group_size} counts the greedy "
            "rollout, which is not trained on, so that nothing would be; use group_size >= 2.",
        )
        require(
            not (greedy_baseline and prompts.may_be_external),
            "flow.generate(greedy_baseline=True): groups that other runs share have no greedy "
            "rollout; leave Prompts.shared out, or greedy_baseline.",
        )
        self._check_first_source()
        columns = RolloutColumns(*(Column(name, "token") for name in ROLLOUT_COLUMNS))
        self._add(
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
        """Let `environment` play `group_size` episodes of each task with `model`, where
        flow.generate and flow.score would stand: it asks the model, turn by turn, and says what an
        episode is worth. `tasks` are rows, and need no prompt.

        Returns rollouts, as flow.generate does; their rewards, one each; and what functions over
        turns read (rlsys.algorithms.turn_advantage): turn_rewards, which stand at the last token of
        each turn, turns and seats. `parts`: named numbers of the reward that get columns of their
        own. Where a rollout is a tree of branches, models read it as one by themselves.

        `seats`: other models, by the seats of the environment that they play; `model` plays the
        rest. What frozen ones say is no part of the rollouts, but for what the environment tells
        others of it. Trained ones have `model`'s tokens, and a flow.train each, which trains them
        on the tokens of their own seats.
        """
        self._check_model("play", model)
        check_is("play", "tasks", tasks, Prompts, A_SOURCE)
        check_group_size("play", group_size)
        require(
            model.is_main and model.head == "logits",
            f"flow.play samples with {model.name!r} (head {model.head!r}); replicas run the "
            "model without a configuration of its own, and it must have logits.",
        )
        require(
            tasks.shared is None,
            "flow.play plays its own episodes, none that other runs share; leave Prompts.shared "
            "out.",
        )
        check_names("play(parts=", parts, "calls")
        taken = {writes, *ROLLOUT_COLUMNS, TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN}
        require(
            not (clash := sorted(taken.intersection(parts))),
            f"flow.play(parts={[*parts]}): it writes {clash} by itself; name numbers that the "
            "environment returns, or gives with chat.reward, in words of their own.",
        )
        played = as_environment(environment)
        check_seats(played, seats)
        for partner in seats.values():
            self._check_model("play", partner)
        self._check_first_source()
        rollouts = RolloutColumns(*(Column(name, "token") for name in ROLLOUT_COLUMNS))
        turn_rewards, turns, whose = (
            Column(name, "token") for name in (TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN)
        )
        reward = Column(writes)
        beside = tuple(Column(part) for part in parts)
        self._add_all(
            PlayStage(
                name="play",
                writes=(*rollouts, turn_rewards, turns, whose, BRANCHES, reward, *beside),
                model=model,
                prompts=tasks,
                group_size=group_size,
                environment=played,
                parts=tuple(parts),
                seats=tuple(seats.items()),
            )
        )
        return Episodes(rollouts, reward, turn_rewards, turns, whose, beside)

    def dataset(
        self, prompts: Prompts, *, group_size: int, completions: str = "completions"
    ) -> tuple[Column, ...]:
        """Rows of completions that the prompts' dataset holds, instead of a model sampling them:
        demonstrations, with group_size=1, or pairs, of which the first is the better one
        (PREFERENCE). `completions` is the column with a list of `group_size` texts or
        continuations, which are lists of chat messages, or with one of them without a list. If it
        is the prompt column, that holds chats, whose replies are trained on, and the messages
        before the first reply are the prompt. Without such a column, pairs come from the columns
        "chosen" and "rejected" (docs/formats.md).

        The columns returned are those of `generate` but for the sampler's log-probabilities, which
        nobody knows, so that no loss with a ratio takes them.
        """
        self._check_first_source()
        check_is("dataset", "prompts", prompts, Prompts, A_SOURCE)
        check_group_size("dataset", group_size)
        require(
            prompts.shared is None,
            "flow.dataset takes completions from the dataset alone, none that other runs share; "
            "leave Prompts.shared out.",
        )
        columns = tuple(Column(name, "token") for name in ROLLOUT_COLUMNS)
        self._add(
            DatasetStage(
                name="dataset",
                writes=columns,
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
        """What `model` makes of each rollout: log-probabilities of its tokens (head "logits"),
        their values ("value"), or its score ("score"). A model that is trained does so at the
        beginning of each step, with the weights of then.

        `top_k`: in place of its tokens' log-probabilities those of the top_k likeliest tokens at
        each of them, for losses that read such a column (rlsys.algorithms.top_k_distill): 2 top_k
        + 1 values a token, the ids, then their log-probabilities, then that of all other tokens
        together. Of frozen models only.

        `adapters=False`: what a policy that is trained by adapters (model.lora) would say without
        them. So it is its own reference, which takes no memory.
        """
        self._check_model("infer", model)
        require(
            not isinstance(model.config, JudgeConfig),
            f"flow.infer({model.name!r}) generates nothing, and a JudgeConfig says with what; give "
            "flow.model a RoleConfig, or use flow.judge.",
        )
        check_rollouts("infer", rollouts)
        checked(top_k, int, "flow.infer: top_k")
        require(top_k >= 0, f"flow.infer: top_k={top_k} is negative; use 0 for none.")
        require(
            not top_k or (model.head == "logits" and not model.may_train),
            f"flow.infer({model.name!r}, top_k={top_k}): only a frozen language model tells its "
            "likeliest tokens; give flow.model a RoleConfig and no other head.",
        )
        checked(adapters, bool, "flow.infer: adapters")
        require(
            adapters or (model.head == "logits" and model.may_train),
            f"flow.infer({model.name!r}, adapters=False): a frozen model has none, and a critic or "
            "reward model is more than its base without them; leave it out.",
        )
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
        """The score that a frozen language model gives each rollout by what it writes about it:
        `ask(rollout)` is the question, a text or a list of chat messages, which the judge's own
        chat template renders; `parse(reply)` is the score of a reply of at most `max_tokens`
        tokens, or None for a reply that says none. The judge has its own tokenizer.

        At temperature 0 a reply is of the likeliest tokens; above it a rollout has random numbers
        of its own, which are the same when it is judged again. A rollout without a score drops its
        group, as one does whose reward function fails. Both functions run in the judge's process
        and have no time limit of their own: they should take milliseconds.
        """
        self._check_model("judge", model)
        check_rollouts("judge", rollouts)
        check_judge(model, max_tokens=max_tokens, temperature=temperature)
        check_text_function(f"flow.judge({model.name!r}, ask=)", ask, "a rollout")
        check_text_function(f"flow.judge({model.name!r}, parse=)", parse, "the reply")
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
        """Reward of each rollout, as soon as it has ended: the weighted sum of all functions.
        `parts`: what should have a column of its own beside it, before weights, by the function's
        name, or "name/key" of one that returns a dictionary; a tuple of the sum and these comes
        back then.
        """
        check_columns("score", rollouts)
        require(
            not self.all(ScoreStage),
            "flow.score stands twice in the dataflow; give one all the functions, and name in "
            "parts=[...] those that should have a column of their own.",
        )
        require(
            isinstance(rewards, Sequence) and not isinstance(rewards, str),
            f"flow.score is given {rewards!r} for its rewards; give a list, such as [correct].",
        )
        require(
            len(rewards) > 0,
            "rewards=() scores nothing; give flow.score at least one reward function.",
        )
        functions = as_rewards(rewards)
        names = [one.name for one in functions]
        check_names("score(parts=", parts, names[0])
        for part in parts:
            require(
                part.partition("/")[0] in names,
                f"flow.score(parts=[{part!r}]) is none of the rewards {names}; name one of them, "
                "or its part as 'name/key'.",
            )
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
        """`function(*[G] tensors) -> [G]` over each group, as soon as it is complete; None refuses
        the group, and another is issued in its place.
        """
        check_function("per_group", "function", function, "group_advantage")
        check_columns("per_group", columns)
        for column in columns:
            require(
                column.per == "row",
                f"flow.per_group({name_of(function)}) reads {column.name!r}, which has a value per "
                "token; a function over a group reads one value per row. Use flow.per_batch, whose "
                "functions get tokens too.",
            )
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
        """`function` over all rows of a step, once they are chosen:
        rlsys.algorithms.batch_functions says what it is given and returns. `per`: of what it
        returns. Returns a tuple of as many columns as it writes: `(advantages,) =
        flow.per_batch(...)`.
        """
        check_function("per_batch", "function", function, "batch_advantage", "token_advantage")
        check_columns("per_batch", columns)
        check_names("per_batch(writes=", writes, "advantages")
        require(len(writes) > 0, "flow.per_batch(writes=()) writes nothing; name a column.")
        checked(per, Per, f"flow.per_batch({name_of(function)}): per")
        require(
            all(column.name != PROMPT_COLUMN for column in columns),
            f"flow.per_batch({name_of(function)}) reads {PROMPT_COLUMN!r}, whose tokens are others "
            "than those of the completions, which a function over a step is given; leave it out.",
        )
        check_tokens(function, columns)
        stage = PerBatchStage(
            name=" and ".join(writes),
            reads=columns,
            writes=tuple(Column(name, per) for name in writes),
            function=function,
        )
        from rlsys.algorithms.batch_functions import check_batch_function

        check_batch_function(function, len(columns), has_tokens=stage.has_tokens)
        self._check_group_size(function)
        return self._add_all(stage)

    def control(
        self, controller: CoefficientController, column: Column, *, writes: str = "kl_coefficient"
    ) -> Column:
        """A number that is the same for all rows of a step, and set anew by `controller` after it:
        `next(number, mean of column over the step's rows)`, from `controller.initial` on. A resumed
        run goes on with the number that it had.
        """
        require(
            callable(getattr(controller, "next", None)) and hasattr(controller, "initial"),
            f"flow.control is given {controller!r}, which has no initial and next; give a "
            "controller such as rlsys.algorithms.adaptive_kl(0.2, target=6.0).",
        )
        check_columns("control", [column])
        require(
            column.per == "row",
            f"flow.control reads {column.name!r}, which has a value per token; make one per row of "
            'them with flow.per_batch(..., per="row").',
        )
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
        """Gradient steps of `model`: per-token `loss` over the rollouts and `columns`, summed up by
        `aggregation`. `watch`: columns that only the metrics show.
        """
        self._check_model("train", model)
        check_rollouts("train", rollouts)
        check_columns("train", columns, watch)
        check_loss(loss, model.head)
        check_aggregation(aggregation)
        check_pairs(loss, aggregation)
        require(
            model.may_train,
            f"flow.train({model.name!r}): it has no trainer; give flow.model a TrainedRoleConfig.",
        )
        from rlsys.algorithms.loss_inputs import candidates_of, needs_of, of_pairs, uses_advantages

        size = self.source.group_size
        require(
            size == 2 or not of_pairs(loss),
            f"flow.train({model.name!r}): group_size={size} is no pair, which {name_of(loss)} is "
            "about; use group_size=2.",
        )
        has = {column.name for column in columns}
        needs = needs_of(loss)
        if model.head == "logits" and uses_advantages(loss):
            needs = ("advantages", *needs)
            require(
                any(column.name == SAMPLER_COLUMN for column in rollouts),
                f"flow.train({model.name!r}): {name_of(loss)} compares the policy with the one "
                "that sampled the rollouts, and those of a dataset have none; use a loss without "
                "advantages, such as one of rlsys.algorithms.preferences.",
            )
        of_loss = candidates_of(loss)
        for column in columns:
            require(
                (column.width > 1) == (column.name == of_loss),
                f"flow.train({model.name!r}): {name_of(loss)} takes one value a token of "
                f"{column.name!r}, which has {column.width}; leave top_k out of flow.infer."
                if column.width > 1
                else f"flow.train({model.name!r}): {name_of(loss)} reads the likeliest tokens from "
                f"{column.name!r}; let flow.infer(..., top_k=16) write it.",
            )
        lacks = [name for name in needs if name not in has]
        require(
            not lacks,
            f"flow.train({model.name!r}): {name_of(loss)} needs the columns {lacks}, and is given "
            f"{sorted(has)}; add the stages that write them, and name them here.",
        )
        check_read(loss, columns, {*needs, PROXIMAL_COLUMN} if model.head == "logits" else {*needs})
        name = "train" if model.is_main else f"train {model.name}"
        source = self.source
        seats = source.trained_seats(model) if isinstance(source, PlayStage) else None
        whose = (Column(SEATS_COLUMN, "token"),) if seats is not None else ()
        self._add(
            TrainStage(
                name=name,
                reads=distinct((*rollouts, *columns, *watch, *whose)),
                model=model,
                loss=loss,
                aggregation=aggregation,
                watches=tuple(column for column in watch if column not in (*columns, *whose)),
                seats=seats,
            )
        )

    def hold_proximal(self, updates_per_step: int) -> None:
        """Where a step makes several updates of a policy, the losses' π_prox is not the policy of
        each update but that of the step's beginning: add the stage that computes it, unless the
        graph has a column "proximal_logprobs", or the loss interpolates it.
        """
        stage = self.trained(self.main.name)
        columns = {column.name for one in self.stages for column in one.writes}
        if updates_per_step == 1 or self.main.head != "logits" or PROXIMAL_COLUMN in columns:
            return
        if getattr(stage.loss, "interpolates_proximal", False):
            return
        place = self.stages.index(stage)
        rollouts = (*ROLLOUT_COLUMNS, BRANCHES_COLUMN)
        reads = tuple(c for c in stage.reads if c.name in rollouts)
        column = Column(PROXIMAL_COLUMN, "token")
        held = InferStage(
            name=f"infer {PROXIMAL_COLUMN}", reads=reads, writes=(column,), model=stage.model
        )
        self.stages[place:] = [
            held,
            replace(stage, reads=(*stage.reads, column)),
            *self.stages[place + 1 :],
        ]

    def replay_routing(self, width: int, value_bytes: int) -> None:
        """Let the rollouts carry the experts of their tokens, `width` numbers each, to whatever the
        main model computes of them (rlsys.engines.models.routing); after `hold_proximal`. Raises
        ValueError for rows that this model has not sampled.
        """
        source = self.source
        require(
            isinstance(source, GenerateStage) and not source.prompts.may_be_external,
            f"rollout.replay_routing=True needs rows that this run samples, and those of flow."
            f"{source.name} are not, or not all; leave it out.",
        )
        column = Column(EXPERTS_COLUMN, "token", width, value_bytes)
        if column in source.writes:
            return
        for place, stage in enumerate(self.stages):
            if stage is source:
                self.stages[place] = replace(stage, writes=(*stage.writes, column))
            elif isinstance(stage, InferStage | TrainStage) and stage.model.is_main:
                self.stages[place] = replace(stage, reads=(*stage.reads, column))

    def check(self) -> None:
        """Raise ValueError for what only the whole graph shows."""
        check_whole(self)

    def check_groups(self, group_size: int) -> None:
        """Raise ValueError unless groups are as large as the configuration has them."""
        check_groups(self, group_size)

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart."""
        return as_mermaid(self)

    def describe(self) -> str:
        """One line per stage: name, what it reads, what it writes."""
        return as_lines(self)

    def _check_group_size(self, function: Callable[..., Any]) -> None:
        from rlsys.algorithms.group_functions import check_group_size

        check_group_size(function, self.source.group_size)

    def _check_model(self, stage: str, model: Any) -> None:
        check_is(stage, "model", model, Model, "what flow.model returns")
        require(
            self.models.get(model.name) is model,
            f"flow.{stage} is given the model {model.name!r} of another dataflow; give one that "
            "this one's flow.model has made.",
        )

    def _check_first_source(self) -> None:
        found = self.all(SourceStage)
        require(
            not found,
            f"rows come from stage {[s.name for s in found]} already; a graph has one source.",
        )

    def _add(self, stage: Stage) -> Column:
        return (*self._add_all(stage), Column(""))[0]

    def _add_all(self, stage: Stage) -> tuple[Column, ...]:
        has_branches = any(BRANCHES in one.writes for one in self.stages)
        if has_branches and isinstance(stage, InferStage | TrainStage):
            # Without them a model would read a tree as one line, so no recipe has to name them.
            stage = replace(stage, reads=distinct((*stage.reads, BRANCHES)))
        check_stage(stage, self.stages)
        self.stages.append(stage)
        return stage.writes

"""Functions of the user in a graph: losses, aggregations, advantages, rewards, heads."""

from functools import partial
from typing import Any

import pytest

from rlsys.algorithms import (
    bradley_terry,
    constant_length,
    entropy_bonus,
    grpo_advantage,
    scale_rl_advantage,
    sequence_mean,
    simpo,
    token_mean,
    with_kl,
)
from rlsys.algorithms.group_functions import needs_group
from rlsys.config import (
    RoleConfig,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import (
    PREFERENCE,
    Column,
)
from rlsys.errors import NOT_GIVEN
from rlsys.rewards.reward import reward as reward_function
from rlsys.types import Rollout
from tests.dataflow.graphs import PROMPTS, generated, mine, trained
from tests.errors import invalid


async def later(values: Any) -> Any:
    return values


def yielding(values: Any) -> Any:
    yield values


def correct(rollout: Rollout) -> float:
    return 1.0


def sized(size: Any) -> Any:
    return needs_group(size)(lambda rewards: rewards)


wrongly: Any = partial  # with keywords that no checker of types would let pass


COLUMNS = "flow.train('policy'): columns"


# The last column is a name in the message.
WRONG_FUNCTIONS: list[tuple[str, Any, str, Any, str]] = [
    ("loss", mine(needs=None), "mine(): needs", None, ""),
    ("loss", mine(needs="reference_logprobs"), "mine(): needs", "reference_logprobs", ""),
    ("loss", mine(needs=(1,)), "mine(): needs", (1,), ""),
    ("loss", with_kl(mine(needs="abc"), "k3", 0.1), "mine(): needs", "abc", ""),
    ("loss", mine(uses_advantages="no"), "mine(): uses_advantages", "no", ""),
    ("loss", mine(whole_groups=1), "mine(): whole_groups", 1, ""),
    ("loss", mine(candidates=("a",)), "mine(): candidates", ("a",), ""),
    ("loss", mine(candidates="teacher_top_k"), COLUMNS, ["advantages"], "['teacher_top_k']"),
    ("loss", partial(mine(needs=("a",))), COLUMNS, ["advantages"], "['a']"),
    ("loss", later, "flow.train: loss", "later", ""),
    ("loss", wrongly(mine(), beta=1), "flow.train: loss", "mine()", "'beta'"),
    ("aggregation", later, "flow.train: aggregation", "later", ""),
    ("per_group", later, "flow.per_group: function", "later", ""),
    ("per_group", yielding, "flow.per_group: function", "yielding", ""),
    ("per_batch", later, "flow.per_batch: function", "later", ""),
    (
        "per_group",
        wrongly(grpo_advantage, eps=1.0),
        "flow.per_group(grpo_advantage)",
        NOT_GIVEN,
        "'eps'",
    ),
    (
        "per_batch",
        wrongly(scale_rl_advantage, eps=1.0),
        "flow.per_batch(scale_rl_advantage)",
        NOT_GIVEN,
        "'eps'",
    ),
    ("per_group", correct, "flow.per_group: function", "correct", "flow.score"),
    (
        "per_group",
        reward_function(lambda ro: 1.0),
        "flow.per_group: function",
        NOT_GIVEN,
        "flow.score",
    ),
    ("per_group", sized("2"), "<lambda>: min_group_size", "2", ""),
    ("per_batch", sized(None), "<lambda>: min_group_size", None, ""),
    ("score", yielding, "reward 'yielding'", NOT_GIVEN, ""),
    ("score", wrongly(correct, strict=True), "reward 'partial'", NOT_GIVEN, "'strict'"),
]


@pytest.mark.parametrize(("stage", "function", "field", "value", "name"), WRONG_FUNCTIONS)
def test_functions_of_the_user_are_checked(
    stage: str, function: Any, field: str, value: Any, name: str
) -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    reward = Column("reward") if stage == "score" else flow.score(rollouts, [lambda rollout: 1.0])
    calls: dict[str, Any] = {
        "score": lambda: flow.score(rollouts, [function]),
        "per_group": lambda: flow.per_group(function, reward),
        "per_batch": lambda: flow.per_batch(function, reward),
    }
    call = calls.get(stage, lambda: trained(flow, rollouts, reward, **{stage: function}))
    with invalid(field, value) as found:
        call()
    assert name in str(found.value)


@pytest.mark.parametrize(
    ("head", "name", "is_refused"),
    [
        ("logits", "staleness", True),
        ("logits", "score", False),
        ("score", "score", True),
        ("score", "value", False),
    ],
)
def test_the_mean_of_a_column_is_no_other_metric(head: Any, name: str, is_refused: bool) -> None:
    flow = Dataflow()
    model = flow.model("model", head=head)
    rows = flow.dataset(PROMPTS, group_size=2)
    judge = flow.model("judge", RoleConfig(), head="score")
    column = flow.infer(judge, rows, writes=name)
    loss = mine(uses_advantages=False)
    flow.train(model, rows, loss=loss, aggregation=token_mean, watch=[column])
    if not is_refused:
        return flow.check()
    with invalid(f"stage 'infer {name}'", name):
        flow.check()
    return None


def half(group_size: int, group_num_tokens: int, row_num_tokens: int) -> tuple[float, float]:
    return 0.5 / row_num_tokens, 0.5


def test_losses_of_pairs_are_means_over_pairs() -> None:
    def train(loss: Any, aggregation: Any, head: Any = "logits") -> None:
        flow = Dataflow()
        model = flow.model("model", head=head)
        pairs = flow.dataset(PROMPTS, group_size=2)
        flow.train(model, pairs, PREFERENCE, loss=loss, aggregation=aggregation)

    for aggregation in (token_mean, constant_length(8)):
        for loss in (simpo(), entropy_bonus(simpo(), 0.1), partial(simpo())):
            with invalid("flow.train: aggregation"):
                train(loss, aggregation)
        with invalid("flow.train: aggregation"):
            train(bradley_terry(), aggregation, "score")
    for aggregation in (sequence_mean, half):
        train(simpo(), aggregation)


def test_parts_are_names_and_no_column_is_written_twice_by_one_stage() -> None:
    flow = Dataflow()
    rollouts = generated(flow)

    def reward(rollout: Any) -> float:
        return 1.0

    parts: Any = [reward]
    with invalid("flow.score: parts", parts):
        flow.score(rollouts, [reward], parts=parts)
    with invalid("stage 'score'", "reward"):
        flow.score(rollouts, [reward], parts=["reward"])

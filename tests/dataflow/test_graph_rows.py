"""Rows of a graph from data: datasets, pairs, groups of other runs, rows of a recipe."""

from typing import Any

import pytest

from recipes.reward_model import RewardModelConfig, reward_model
from rlsys.algorithms import (
    bradley_terry,
    clipped_surrogate,
    reinforce,
    sequence_mean,
    simpo,
    token_mean,
)
from rlsys.config import (
    DataConfig,
    RunConfig,
)
from rlsys.data.swarm.shared_pool import Shared
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.dataflow.graph.stages import (
    NUM_TOKENS,
    PREFERENCE,
    Prompts,
)
from rlsys.dataflow.graph.store_layout import open_store
from tests.dataflow.graphs import PROMPTS, center, scored
from tests.errors import invalid


def test_completions_of_a_dataset_make_rows_without_a_sampler() -> None:
    flow = Dataflow()
    judge = flow.model("judge", head="score")
    pairs = flow.dataset(PROMPTS, group_size=2)
    assert [column.name for column in pairs] == ["prompt_token_ids", "token_ids", "policy_versions"]
    with invalid("flow.dataset"):
        flow.dataset(PROMPTS, group_size=2)
    with invalid("flow.generate: model", "judge"):
        flow.generate(judge, PROMPTS, group_size=2)
    flow.train(judge, pairs, PREFERENCE, loss=bradley_terry(), aggregation=sequence_mean)
    flow.check()
    graph = complete_graph(flow, RunConfig(group_size=2))
    store = open_store(graph, max_bytes=1 << 20, max_row_bytes=1 << 10, on_free=lambda _: None)
    assert store.max_groups == 0  # until a replica has a node
    assert "dataset" in flow.describe()
    assert "-. weights" not in flow.to_mermaid()


def test_what_a_dataset_cannot_be_trained_by_is_refused() -> None:
    flow = Dataflow()
    policy = flow.model("policy")
    rows = flow.dataset(PROMPTS, group_size=1)
    with invalid("flow.train: loss"):
        flow.train(policy, rows, loss=clipped_surrogate(0.2, 0.2), aggregation=token_mean)
    with invalid("flow.train: group_size", 1):
        flow.train(policy, rows, PREFERENCE, loss=simpo(), aggregation=sequence_mean)


def test_a_stage_says_which_of_two_samples_is_the_better_one() -> None:
    flow = Dataflow()
    policy, rollouts, reward = scored(flow)
    with invalid("stage 'train'", "preference"):
        flow.train(policy, rollouts, PREFERENCE, loss=simpo(), aggregation=sequence_mean)
    with invalid("stage 'x'", "preference"):
        flow.per_group(center, PREFERENCE, name="x")
    preference = flow.per_group(center, reward, name="preference")
    flow.train(policy, rollouts, preference, loss=simpo(), aggregation=sequence_mean)
    flow.check()
    stored = flow.step_reads
    assert preference in stored
    of_dataset = Dataflow()
    of_dataset.model("policy")
    of_dataset.dataset(PROMPTS, group_size=2)
    with invalid("stage 'preference'", "preference"):
        of_dataset.per_group(center, NUM_TOKENS, name="preference")


def test_four_samples_are_no_pair() -> None:
    flow = Dataflow()
    policy, rollouts, reward = scored(flow, group_size=4)
    preference = flow.per_group(center, reward, name="preference")
    with invalid("flow.train: group_size", 4):
        flow.train(policy, rollouts, preference, loss=simpo(), aggregation=sequence_mean)


def test_groups_of_other_runs_come_without_a_sampler() -> None:
    """No function over the step can read the sampler's log-probabilities."""
    shared = Prompts(config=DataConfig(), shared=Shared(peers=["a"], groups_per_step=1))
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, shared, group_size=2)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    sampler = next(column for column in rollouts if column.name == "sampler_logprobs")
    (advantages,) = flow.per_batch(lambda sampler, rewards: rewards, sampler, reward)
    flow.train(policy, rollouts, advantages, loss=reinforce(), aggregation=token_mean)
    with invalid("stage 'advantages'", "sampler_logprobs"):
        flow.check()
    with invalid("flow.dataset: Prompts.shared"):
        Dataflow().dataset(shared, group_size=2)


def test_a_recipe_over_pairs_needs_pairs() -> None:
    reward_model(RewardModelConfig()).check()
    with invalid("flow.train: group_size", 4):
        reward_model(RewardModelConfig(group_size=4))


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        (["1+1=", "2+2="], "Prompts.rows[0]"),
        ("1+1=", "Prompts.rows"),
        ({"prompt": ["1+1="]}, "Prompts.rows"),
        (iter([{"prompt": "1+1="}]), "Prompts.rows"),
    ],
)
def test_rows_of_a_recipe_are_a_list_of_dictionaries(rows: Any, field: str) -> None:
    with invalid(field):
        Prompts(config=DataConfig(), rows=rows)


def test_rows_without_a_length_or_with_splits_are_refused_with_the_way_to_give_them() -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "1+1="}])
    for wrong, fix in (
        (rows.to_iterable_dataset(), "rows.take"),
        (datasets.DatasetDict(train=rows), 'rows["train"]'),
        (datasets.IterableDatasetDict(train=rows.to_iterable_dataset()), '["train"].take'),
        (rows.to_pandas(), "from_pandas"),
        (rows.data.table, "datasets.Dataset(rows)"),
    ):
        with invalid("type of Prompts.rows") as refused:
            Prompts(config=DataConfig(), rows=wrong)
        assert fix in refused.value.fix
    for right in (rows, list(rows.to_iterable_dataset().take(1)), datasets.Dataset(rows.data)):
        assert list(Prompts(config=DataConfig(), rows=right).rows or ()) == [{"prompt": "1+1="}]


def test_rows_and_a_dataset_are_one_too_many() -> None:
    config = DataConfig(source="mine.jsonl")
    with invalid("data.source", "mine.jsonl"):
        Prompts(config=config, rows=[{"prompt": "1+1="}])
    assert Prompts(config=config).rows is None


@pytest.mark.parametrize("given", [{"split": "test"}, {"subset": "main"}])
def test_rows_of_a_recipe_have_no_splits(given: dict[str, str]) -> None:
    (name,) = given
    with invalid(f"data.{name}", given[name]):
        Prompts(config=DataConfig(**given), rows=[{"prompt": "1+1="}])  # type: ignore[arg-type]

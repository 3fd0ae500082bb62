"""Dataflow graphs: columns connect the stages, and mistakes are rejected by name."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from recipes.dpo import DPOConfig, dpo
from recipes.grpo import GRPOConfig, grpo
from recipes.ppo import PPOConfig, ppo
from rlsys.algorithms import (
    bradley_terry,
    cispo,
    clipped_surrogate,
    constant_length,
    corrected,
    cross_entropy,
    decoupled_clipped_surrogate,
    distill,
    dynamic_sampling,
    gae,
    grpo_advantage,
    interpolate_proximal,
    m2po,
    observed,
    opsm,
    reinforce,
    remax_advantage,
    scale_rl_advantage,
    tis,
    token_mean,
    top_k_distill,
    turn_advantage,
    value_loss,
    whitened,
    with_kl,
)
from rlsys.config import (
    AsyncConfig,
    DataConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.data.swarm.shared_pool import Shared
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.dataflow.graph.stages import (
    BRANCHES,
    IS_GREEDY,
    NUM_TOKENS,
    Column,
    Episodes,
    GenerateStage,
    InferStage,
    Model,
    Prompts,
    TrainStage,
)
from rlsys.dataflow.graph.store_layout import open_store, row_bytes
from rlsys.environments.environment import environment
from rlsys.rewards import exact_match
from tests.dataflow.graphs import PROMPTS, center, generated, mine, scored, trained
from tests.errors import invalid

TWO_UPDATES = RunConfig(
    group_size=2,
    trainer=TrainerConfig(num_minibatches=2),
    asynchrony=AsyncConfig(max_staleness=3),
)


def test_columns_connect_the_stages() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    advantage = flow.per_group(center, reward)
    assert reward == Column("reward")
    assert advantage == Column("advantages")
    assert flow.stage(GenerateStage).group_size == 2
    assert "score" in flow.describe()
    with invalid("dataflow", ["generate", "score", "advantages"]):
        flow.stage(TrainStage)


def test_a_column_that_nobody_writes_is_refused() -> None:
    flow = Dataflow()
    generated(flow)
    with invalid("stage 'advantages'", "values"):
        flow.per_group(center, Column("values"))


def test_two_writers_of_one_column_are_refused() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    flow.score(rollouts, [lambda rollout: 1.0])
    with invalid("flow.score"):
        flow.score(rollouts, [lambda rollout: 1.0])
    with invalid("stage 'reward'", "reward"):
        flow.per_group(center, Column("reward"), name="reward")


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        (["lenght"], "lenght"),
        (["length", "length"], ["length", "length"]),
        ("length", "length"),
        (["reward"], "reward"),
    ],
)
def test_parts_are_names_of_rewards(parts: Any, value: object) -> None:
    def length(rollout: Any) -> float:
        return 1.0

    flow = Dataflow()
    rollouts = generated(flow)
    with invalid("flow.score: parts", value):
        flow.score(rollouts, [length], parts=parts)
    total, part = flow.score(rollouts, [length], parts=["length"])
    assert (total, part) == (Column("reward"), Column("length"))


def test_no_reward_is_refused() -> None:
    flow = Dataflow()
    with invalid("flow.score: rewards", []):
        flow.score(generated(flow), [])


def test_the_documentation_shows_the_graphs_that_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dataflow.md").read_text()
    for flow in (
        grpo(GRPOConfig(), [lambda rollout: 1.0]),
        ppo(PPOConfig(), [lambda rollout: 1.0]),
        dpo(DPOConfig()),
    ):
        flow.check()
        assert f"```mermaid\n{flow.to_mermaid()}\n```" in page


def test_what_only_the_whole_graph_shows_is_refused() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    flow.score(rollouts, [lambda rollout: 1.0])
    policy = flow.models["policy"]
    with invalid("dataflow", "policy"):
        flow.check()
    teacher = flow.model("teacher", RoleConfig())
    logprobs = flow.infer(teacher, rollouts, writes="teacher_logprobs")
    flow.train(policy, rollouts, logprobs, loss=distill(reinforce()), aggregation=token_mean)
    with invalid("stage 'score'", ["reward"]):
        flow.check()


def test_an_advantage_over_groups_of_one_is_refused() -> None:
    flow = Dataflow()
    rollouts = flow.generate(flow.model("policy"), PROMPTS, group_size=1)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    with invalid("group_size", 1) as found:
        flow.per_group(grpo_advantage, reward)
    assert "grpo_advantage" in found.value.rule


def test_a_greedy_baseline_is_sampled_and_compared_with() -> None:
    flow = Dataflow()
    policy, rollouts, reward = scored(flow)
    with invalid("stage 'advantages'", "is_greedy"):
        flow.per_group(remax_advantage, reward, IS_GREEDY)

    flow = Dataflow()
    policy = flow.model("policy")
    with invalid("flow.generate: group_size", 1):
        flow.generate(policy, PROMPTS, group_size=1, greedy_baseline=True)
    wrong: Any = "yes"
    with invalid("flow.generate: greedy_baseline", wrong):
        flow.generate(policy, PROMPTS, group_size=2, greedy_baseline=wrong)
    shared = Prompts(config=DataConfig(), shared=Shared(peers=("a",), groups_per_step=1))
    with invalid("flow.generate: greedy_baseline", True):
        flow.generate(policy, shared, group_size=2, greedy_baseline=True)
    rollouts = flow.generate(policy, PROMPTS, group_size=2, greedy_baseline=True)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    with invalid("stage 'is_greedy'", "is_greedy"):
        flow.per_group(center, reward, name="is_greedy")
    advantages = flow.per_group(center, reward)
    flow.train(policy, rollouts, advantages, loss=reinforce(), aggregation=token_mean)
    with invalid("flow.generate: greedy_baseline", True):
        flow.check()


def test_a_graph_of_remax() -> None:
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, PROMPTS, group_size=2, greedy_baseline=True)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    advantages = flow.per_group(remax_advantage, reward, IS_GREEDY)
    flow.train(policy, rollouts, advantages, loss=reinforce(), aggregation=token_mean)
    flow.check()
    assert IS_GREEDY not in flow.step_reads
    assert "is_greedy" not in flow.to_mermaid()


def test_a_value_per_token_is_no_value_of_a_group() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    with invalid("flow.per_group(center)", "token_ids"):
        flow.per_group(center, rollouts[1])


def test_a_loss_without_its_columns_is_refused() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    advantages = flow.per_group(center, reward)
    policy = flow.models["policy"]
    with invalid("flow.train('policy'): columns", ["advantages"]) as lacking:
        flow.train(
            policy,
            rollouts,
            advantages,
            loss=with_kl(clipped_surrogate(0.2, 0.2), "k3", 0.1),
            aggregation=token_mean,
        )
    assert "reference_logprobs" in lacking.value.rule
    with invalid("flow.train('policy'): columns", ["reward"]) as lacking:
        flow.train(
            policy, rollouts, reward, loss=clipped_surrogate(0.2, 0.2), aggregation=token_mean
        )
    assert "advantages" in lacking.value.rule


def test_only_columns_and_functions_are_accepted() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    policy = flow.models["policy"]
    right: Any = lambda rollout: 1.0  # noqa: E731
    with invalid("flow.score: rewards", right):
        flow.score(rollouts, right)
    reward = flow.score(rollouts, [right])
    lengths: Any = "num_tokens"
    with invalid("flow.per_group: columns", "num_tokens"):
        flow.per_group(center, reward, lengths)
    name: Any = "grpo_advantage"
    with invalid("flow.per_group: function", "grpo_advantage"):
        flow.per_group(name, reward)
    advantages = flow.per_group(center, reward)
    with invalid("flow.train: loss", "reinforce"):
        flow.train(policy, rollouts, advantages, loss=reinforce, aggregation=token_mean)
    flow.train(policy, rollouts, advantages, loss=reinforce(), aggregation=token_mean)


@pytest.mark.parametrize(
    ("stage", "given", "field", "value", "use"),
    [
        ("per_batch", grpo_advantage, "", "grpo_advantage", "flow.per_group"),
        ("per_batch", partial(grpo_advantage, epsilon=1.0), "", "grpo_advantage", "flow.per_group"),
        (
            "per_batch",
            dynamic_sampling(grpo_advantage),
            "",
            "dynamic_sampling(advantage=grpo_advantage, by_last_column=False)",
            "flow.per_group",
        ),
        ("per_batch", reinforce(), "", "reinforce()", "flow.train"),
        ("per_group", scale_rl_advantage, "", "scale_rl_advantage", "flow.per_batch"),
        ("per_group", whitened, "", "whitened", 'flow.per_batch(..., per="token")'),
        (
            "per_group",
            dynamic_sampling(scale_rl_advantage),
            "dynamic_sampling(advantage=scale_rl_advantage, by_last_column=False): advantage",
            "scale_rl_advantage",
            "flow.per_batch",
        ),
        ("per_group", token_mean, "", "token_mean", "flow.train(aggregation=...)"),
        ("loss", tis(2.0), "", "tis(cap=2.0, floor=0.0)", "corrected(loss, correction)"),
        ("loss", value_loss(), "", "value_loss()", "flow.train"),
        ("loss", bradley_terry(), "", "bradley_terry(centre=0.0)", "flow.train"),
        ("loss", grpo_advantage, "", "grpo_advantage", "flow.per_group"),
        (
            "loss",
            with_kl(opsm(0.5), "k3", 0.1),
            "with_kl(loss=opsm(threshold=0.5), estimator='k3', coefficient=0.1): loss",
            "opsm(threshold=0.5)",
            "corrected",
        ),
        (
            "loss",
            corrected(cast(Any, grpo_advantage), opsm(0.5)),
            "corrected(loss=grpo_advantage, correction=opsm(threshold=0.5)): loss",
            "grpo_advantage",
            "flow.per_group",
        ),
        ("loss", m2po, "", "m2po", "m2po(...)"),
        ("loss", partial(m2po, 0.1), "", "m2po", "m2po(...)"),
        ("aggregation", reinforce(), "", "reinforce()", "flow.train"),
        (
            "aggregation",
            partial(constant_length, 5),
            "",
            "constant_length",
            "constant_length(...)",
        ),
    ],
)
def test_an_object_of_another_kind_is_refused(
    stage: str, given: Any, field: str, value: str, use: str
) -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    training: dict[str, Any] = {"loss": reinforce(), "aggregation": token_mean}
    if stage in training:
        advantages = flow.per_group(center, reward)
        refused = partial(flow.train, flow.main, rollouts, advantages, **{**training, stage: given})
    else:
        refused = partial(getattr(flow, stage), given, reward)
    argument = f"flow.train: {stage}" if stage in training else f"flow.{stage}: function"
    with invalid(field or argument) as found:
        refused()
    assert found.value.rule.startswith(f"{value} is ")
    assert use in found.value.fix


def test_a_critics_loss_is_a_value_loss() -> None:
    flow = Dataflow()
    critic = flow.model("critic", TrainedRoleConfig(), head="value")
    rollouts = generated(flow)
    with invalid("flow.train: loss", reinforce()) as found:
        flow.train(critic, rollouts, loss=reinforce(), aggregation=token_mean)
    assert "value_loss" in found.value.rule


@pytest.mark.parametrize(
    "functions",
    [
        {"loss": lambda: 1},
        {"loss": lambda inputs, beta: 1},
        {"aggregation": lambda tokens: 1},
    ],
)
def test_functions_of_the_training_take_what_they_are_given(functions: Any) -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    advantages = flow.per_group(center, flow.score(rollouts, [lambda rollout: 1.0]))
    with invalid(f"flow.train: {next(iter(functions))}", "<lambda>"):
        flow.train(
            flow.main,
            rollouts,
            advantages,
            **{"loss": reinforce(), "aggregation": token_mean, **functions},
        )


@pytest.mark.parametrize("group_size", ["4", 2.0, True, None, 0])
@pytest.mark.parametrize("source", ["generate", "dataset"])
def test_a_group_size_is_a_whole_number(source: str, group_size: Any) -> None:
    flow = Dataflow()
    policy = flow.model("policy")
    arguments = [policy, PROMPTS] if source == "generate" else [PROMPTS]
    with invalid(f"flow.{source}: group_size", group_size):
        getattr(flow, source)(*arguments, group_size=group_size)


def test_roles_are_told_apart() -> None:
    flow = Dataflow()
    critic = flow.model("critic", TrainedRoleConfig(), head="value")
    frozen = flow.model("reference", RoleConfig())
    with invalid("flow.model: name", "critic"):
        flow.model("critic", TrainedRoleConfig())
    with invalid("flow.generate: model", "critic"):
        flow.generate(critic, PROMPTS, group_size=2)
    with invalid("dataflow", ["critic", "reference"]):
        _ = flow.main
    rollouts = generated(flow)
    with invalid("flow.model('judge'): config", None):
        flow.model("judge", head="score")
    with invalid("flow.train: model", "reference"):
        flow.train(frozen, rollouts, loss=distill(reinforce()), aggregation=token_mean)


def test_a_function_over_a_step_takes_the_columns_that_it_is_given() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    with invalid("flow.per_batch(scale_rl_advantage)"):
        flow.per_batch(scale_rl_advantage, reward, reward)

    def by_another_name(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return rewards

    with invalid("flow.per_batch(by_another_name)") as found:
        flow.per_batch(by_another_name, reward)
    assert "'groups'" in found.value.rule
    assert "group_index" in found.value.fix
    assert flow.per_batch(scale_rl_advantage, reward) == (Column("advantages"),)


def test_what_is_told_of_tokens_is_told_where_there_are_any() -> None:
    def mine(reward: torch.Tensor, row_offsets: torch.Tensor) -> torch.Tensor:
        return reward

    flow = Dataflow()
    rollouts = generated(flow)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    with invalid("flow.per_batch(mine)") as found:
        flow.per_batch(mine, reward)
    assert "'row_offsets'" in found.value.rule
    flow.per_batch(mine, reward, per="token")
    flow.per_batch(mine, rollouts[2], writes=("sums",))


def test_a_row_takes_the_bytes_of_its_columns() -> None:
    flow = ppo(PPOConfig(), [lambda rollout: 1.0])
    # prompt; ids, log-probabilities and versions; the reference's log-probabilities; values and
    # what is made of them never lie in rows.
    assert row_bytes(flow, max_prompt_tokens=10, max_tokens=100) == (
        10 * 4 + 3 * 100 * 4 + 64 + 100 * 4 + 64
    )


def test_a_proximal_policy_that_is_interpolated_takes_no_pass() -> None:
    def stages(loss: Any) -> list[str]:
        flow = Dataflow()
        policy = flow.model("policy")
        rollouts = flow.generate(policy, PROMPTS, group_size=2)
        rewards = flow.score(rollouts, [lambda rollout: 1.0])
        advantages = flow.per_group(grpo_advantage, rewards)
        flow.train(policy, rollouts, advantages, loss=loss, aggregation=token_mean)
        return [stage.name for stage in complete_graph(flow, TWO_UPDATES).stages]

    loss = decoupled_clipped_surrogate(0.2, 0.2, 5.0)
    assert "infer proximal_logprobs" in stages(loss)
    assert "infer proximal_logprobs" not in stages(observed(interpolate_proximal(loss)))


def test_experts_travel_with_rollouts_to_the_main_model_alone() -> None:
    stated = ppo(PPOConfig(group_size=2), [lambda rollout: 1.0])
    flow = complete_graph(stated, TWO_UPDATES, experts=(6, 2))
    # 6 numbers of 2 bytes for each token of prompt and completion, beside what is there without.
    assert row_bytes(flow, max_prompt_tokens=10, max_tokens=100) == (
        10 * 4 + 3 * 100 * 4 + 110 * 6 * 2 + 64 + 100 * 4 + 64
    )
    readers = [s.name for s in flow.stages if any(c.name == "routed_experts" for c in s.reads)]
    assert readers == ["infer proximal_logprobs", "train"]

    replaying = DPOConfig(rollout=RolloutConfig(replay_routing=True))
    with invalid("rollout.replay_routing", True):
        complete_graph(dpo(DPOConfig(), rows=[]), replaying)


def played(flow: Dataflow, policy: Model) -> Episodes:

    @environment
    async def ask(chat: Any, task: Any) -> float:
        return float(await chat("1"))

    return flow.play(policy, ask, PROMPTS, group_size=2)


def test_arguments_of_play_are_not_mixed_up() -> None:
    flow: Any = Dataflow()
    policy = flow.model("policy")
    episodes = played(flow, policy)
    settings = {"loss": clipped_surrogate(), "aggregation": token_mean}
    with invalid("flow.score: rollouts"):
        flow.score(episodes, [exact_match()])
    with invalid("flow.per_group: columns"):
        flow.per_group(grpo_advantage, episodes)
    with invalid("flow.train: rollouts"):
        flow.train(policy, episodes, episodes.reward, **settings)
    other: Any = Dataflow()
    policy = other.model("policy")
    with invalid("flow.generate: prompts", "ask_once"):
        other.generate(policy, environment(ask_once), group_size=2)
    with invalid("flow.play: parts", ["turns"]):
        other.play(policy, ask_once, PROMPTS, group_size=2, parts=["turns"])


async def ask_once(chat: Any, task: Any) -> float:
    return float(await chat("1"))


def test_every_model_reads_the_branches_of_rollouts() -> None:
    flow = Dataflow()
    policy = flow.model("policy")
    episodes = played(flow, policy)
    rollouts = episodes.rollouts
    reference = flow.model("reference", RoleConfig())
    logprobs = flow.infer(reference, rollouts, writes="reference_logprobs")
    (advantages,) = flow.per_batch(
        turn_advantage, episodes.turn_rewards, episodes.turns, episodes.seats, per="token"
    )
    loss = with_kl(clipped_surrogate(), "k3", 0.1)
    flow.train(policy, rollouts, advantages, logprobs, loss=loss, aggregation=token_mean)
    graph = complete_graph(flow, TWO_UPDATES)
    readers = [stage.name for stage in graph.stages if BRANCHES in stage.reads]
    assert readers == ["infer reference_logprobs", "infer proximal_logprobs", "train"]
    assert BRANCHES in graph.step_reads
    # 4 numbers of 4 bytes for each of 64 branches, beside prompt and six columns of tokens.
    of_source = 10 * 4 + 6 * 100 * 4 + 64 * 4 * 4 + 64
    of_reference = 100 * 4 + 64
    assert row_bytes(graph, max_prompt_tokens=10, max_tokens=100) == of_source + of_reference


def test_a_function_over_a_step_reads_no_branches() -> None:
    flow = Dataflow()
    policy = flow.model("policy")
    episodes = played(flow, policy)

    def of_branches(rewards: torch.Tensor, branches: torch.Tensor) -> torch.Tensor:
        return rewards

    (advantages,) = flow.per_batch(of_branches, episodes.turn_rewards, BRANCHES, per="token")
    flow.train(policy, episodes.rollouts, advantages, loss=reinforce(), aggregation=token_mean)
    with invalid("stage 'advantages'", "branches"):
        flow.check()


@pytest.mark.parametrize("name", ["reward", "value", "time", "rollouts"])
def test_a_trained_model_is_not_called_as_metrics_are(name: str) -> None:
    flow = Dataflow()
    policy = flow.model("policy")
    other = flow.model(name, TrainedRoleConfig(), head="value")
    rows = flow.dataset(PROMPTS, group_size=2)
    loss = mine(uses_advantages=False)
    flow.train(policy, rows, loss=loss, aggregation=token_mean)
    flow.train(other, rows, loss=loss, aggregation=token_mean)
    with invalid("flow.model: name", name):
        flow.check()


def test_a_function_of_facts_alone_waits_for_the_completions() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    shorter = flow.per_group(center, NUM_TOKENS)
    flow.train(
        flow.main, rollouts, shorter, loss=clipped_surrogate(0.2, 0.2), aggregation=token_mean
    )
    flow.check()
    graph = complete_graph(flow, RunConfig(group_size=2))
    store = open_store(graph, max_bytes=1 << 20, max_row_bytes=1 << 10, on_free=lambda _: None)
    assert store.subscribe("advantages", at_most=2) is not None


def two_rewards(rewards: torch.Tensor, greedy_rewards: torch.Tensor) -> torch.Tensor:
    return rewards - greedy_rewards


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (two_rewards, "two_rewards"),
        (dynamic_sampling(two_rewards), "two_rewards"),
        (dynamic_sampling(lambda: None), "<lambda>"),
    ],
)
def test_a_function_over_groups_takes_as_many_columns_as_it_is_given(
    function: Any, name: str
) -> None:
    flow = Dataflow()
    prompts = Prompts(config=DataConfig())
    rollouts = flow.generate(flow.model("policy"), prompts, group_size=2)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    with invalid(f"flow.per_group({name})"):
        flow.per_group(function, reward)
    assert flow.per_group(two_rewards, reward, NUM_TOKENS) == Column("advantages")


def test_a_reward_function_takes_a_rollout() -> None:
    flow = Dataflow()
    rollouts = flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)
    with invalid("reward 'two_rewards'"):
        flow.score(rollouts, [two_rewards])


def wide_flow(*, top_k: int, loss: Any) -> Dataflow:
    flow = Dataflow()
    policy, teacher = flow.model("policy"), flow.model("teacher", RoleConfig())
    rollouts = flow.generate(policy, PROMPTS, group_size=4)
    said = flow.infer(teacher, rollouts, writes="teacher_top_k", top_k=top_k)
    flow.train(policy, rollouts, said, loss=loss, aggregation=token_mean)
    return flow


def test_likeliest_tokens_go_to_a_loss_that_asks_for_them() -> None:
    flow = wide_flow(top_k=3, loss=top_k_distill())
    flow.check()
    narrow = wide_flow(top_k=0, loss=reads_one_value)
    sizes = [row_bytes(one, max_prompt_tokens=0, max_tokens=100) for one in (flow, narrow)]
    assert sizes[0] - sizes[1] == 6 * 100 * 4
    for top_k, loss in ((0, top_k_distill()), (3, reads_one_value)):
        with invalid("flow.train('policy'): columns", "teacher_top_k"):
            wide_flow(top_k=top_k, loss=loss)


def reads_one_value(inputs: Any) -> Any:
    return inputs.trainer_logprobs * inputs.column("teacher_top_k"), {}


reads_one_value.needs = ("teacher_top_k",)  # type: ignore[attr-defined]


reads_one_value.uses_advantages = False  # type: ignore[attr-defined]


def test_only_frozen_language_models_give_their_likeliest_tokens() -> None:
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, PROMPTS, group_size=4)
    judge = flow.model("judge", RoleConfig(), head="score")
    for model, top_k in ((policy, 2), (judge, 2), (judge, -1)):
        with invalid("flow.infer: top_k", top_k):
            flow.infer(model, rollouts, writes="likeliest", top_k=top_k)
    teacher = flow.model("teacher", RoleConfig())
    said = flow.infer(teacher, rollouts, writes="likeliest", top_k=2)
    (advantages,) = flow.per_batch(lambda likeliest, row_offsets: likeliest, said, per="token")
    flow.train(policy, rollouts, advantages, loss=cispo(), aggregation=token_mean)
    with invalid("stage 'advantages'", "likeliest"):
        flow.check()


def test_only_a_trained_policy_leaves_its_adapters_out() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    policy = flow.models["policy"]
    critic = flow.model("critic", TrainedRoleConfig(), head="value")
    frozen = flow.model("reference", RoleConfig())
    for model in (critic, frozen):
        with invalid("flow.infer: adapters", False):
            flow.infer(model, rollouts, writes="reference_logprobs", adapters=False)
    flow.infer(policy, rollouts, writes="reference_logprobs", adapters=False)
    assert [stage.adapters for stage in flow.all(InferStage)] == [False]


def judged(flow: Dataflow) -> tuple[Any, tuple[Column, ...], Column]:
    """A frozen judge, the rollouts, and their reward."""
    judge = flow.model("judge", RoleConfig(), head="score")
    rollouts = generated(flow)
    return judge, rollouts, flow.score(rollouts, [lambda rollout: 1.0])


REFUSED: list[tuple[Any, str, Any]] = [
    (lambda f, m, ro, r: f.model(""), "flow.model: name", ""),
    (lambda f, m, ro, r: f.model("ref", "/a/path"), "flow.model('ref'): config", "/a/path"),
    (
        lambda f, m, ro, r: f.model("x", RoleConfig(), head="scores"),
        "flow.model('x'): head",
        "scores",
    ),
    (
        lambda f, m, ro, r: f.generate("policy", PROMPTS, group_size=2),
        "flow.generate: model",
        "policy",
    ),
    (
        lambda f, m, ro, r: f.generate(f.main, [{"prompt": "1"}], group_size=2),
        "flow.generate: prompts",
        [{"prompt": "1"}],
    ),
    (lambda f, m, ro, r: f.infer("judge", ro, writes="x"), "flow.infer: model", "judge"),
    (
        lambda f, m, ro, r: f.infer(m, ro[:1], writes="x"),
        "flow.infer: rollouts",
        ["prompt_token_ids"],
    ),
    (lambda f, m, ro, r: f.infer(m, ro, writes=""), "stage 'infer '", ""),
    (lambda f, m, ro, r: f.infer(m, ro, writes=3), "stage 'infer 3'", 3),
    (
        lambda f, m, ro, r: f.infer(m, ro, writes="num_tokens"),
        "stage 'infer num_tokens'",
        "num_tokens",
    ),
    (lambda f, m, ro, r: f.infer(m, ro, writes="reward"), "stage 'infer reward'", "reward"),
    (lambda f, m, ro, r: f.infer(m, ro, writes="x", top_k="8"), "flow.infer: top_k", "8"),
    (lambda f, m, ro, r: f.infer(m, ro, writes="x", top_k=1.5), "flow.infer: top_k", 1.5),
    (lambda f, m, ro, r: f.per_batch(center, r, writes="a"), "flow.per_batch: writes", "a"),
    (
        lambda f, m, ro, r: f.per_batch(center, r, writes=("a", "a")),
        "flow.per_batch: writes",
        ("a", "a"),
    ),
    (lambda f, m, ro, r: f.per_batch(center, r, writes=()), "flow.per_batch: writes", ()),
    (
        lambda f, m, ro, r: f.per_batch(center, r, per="tokens"),
        "flow.per_batch(center): per",
        "tokens",
    ),
    (lambda f, m, ro, r: f.per_batch(center, ro[0]), "flow.per_batch(center)", "prompt_token_ids"),
    (
        lambda f, m, ro, r: f.per_batch(gae, r, r, per="token"),
        "flow.per_batch(gae)",
        ["reward", "reward"],
    ),
]


@pytest.mark.parametrize(("call", "field", "value"), REFUSED)
def test_invalid_arguments_are_named_with_their_value(call: Any, field: str, value: Any) -> None:
    flow = Dataflow()
    judge, rollouts, reward = judged(flow)
    with invalid(field, value):
        call(flow, judge, rollouts, reward)


def test_columns_in_the_wrong_place_are_refused() -> None:
    flow: Any = Dataflow()
    judge, rollouts, _ = judged(flow)
    with invalid("flow.infer: rollouts", rollouts[0]):
        flow.infer(judge, rollouts[0], writes="x")
    with invalid("flow.train: model", rollouts):
        flow.train(rollouts, flow.main, loss=1, aggregation=1)


def test_a_column_that_the_loss_does_not_read_is_refused() -> None:
    """Otherwise a reference model would run without any effect."""
    flow = Dataflow()
    _, rollouts, reward = judged(flow)
    reference = flow.model("reference", RoleConfig())
    logprobs = flow.infer(reference, rollouts, writes="reference_logprobs")
    with invalid("flow.train('policy'): columns", ["reference_logprobs"]):
        trained(flow, rollouts, reward, logprobs)
    with invalid("flow.train('policy'): columns", ["advantages"]):
        flow.train(
            flow.main, rollouts, Column("advantages"), loss=cross_entropy(), aggregation=token_mean
        )
    with invalid("flow.train: watch", reward):
        flow.train(
            flow.main,
            rollouts,
            Column("advantages"),
            loss=cispo(),
            aggregation=token_mean,
            watch=cast(Any, reward),
        )


def test_a_model_that_no_stage_runs_or_trains_is_refused() -> None:
    flow = Dataflow()
    _, rollouts, reward = judged(flow)
    trained(flow, rollouts, reward)
    with invalid("flow.model: name", "judge"):
        flow.check()

    flow = Dataflow()
    rollouts = generated(flow)
    critic = flow.model("critic", TrainedRoleConfig(), head="value")
    values = flow.infer(critic, rollouts, writes="values")
    (advantages,) = flow.per_batch(center, values, per="token")
    flow.train(flow.main, rollouts, advantages, loss=cispo(), aggregation=token_mean)
    with invalid("flow.model('critic'): config"):
        flow.check()


def test_a_model_of_another_graph_is_refused() -> None:
    flow, other = Dataflow(), Dataflow()
    rollouts = generated(flow)
    with invalid("flow.infer: model", "reference"):
        flow.infer(other.model("reference", RoleConfig()), rollouts, writes="x")

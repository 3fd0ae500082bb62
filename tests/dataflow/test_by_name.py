"""Advantages, losses and aggregations that GRPO's command line names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recipes.arithmetic import correct, problems
from recipes.grpo import grpo
from recipes.quickstart import QuickstartConfig
from rlsys.algorithms.registry import REGISTRY, parse
from rlsys.config.command_line import parse as parse_command_line
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.named_advantages import ADVANTAGES
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.dataflow.graph.stages import GenerateStage, PerBatchStage, PerGroupStage, TrainStage
from rlsys.errors import InvalidValue
from tests.algorithms.examples import LOSSES, OTHERS, WIDE_LOSSES
from tests.errors import error_about, invalid

ROOT = Path(__file__).parents[2]

# What GRPO's graph has no stages for: other models, pairs, and what reads no advantage.
NEED_COLUMNS = {
    "importance_weights": ["corrected(reinforce, batch_weights)"],
    "reference_logprobs": [text for text in LOSSES if "with_kl" in text],
    "teacher_logprobs": [text for text in LOSSES if text.startswith("distill")],
    "teacher_top_k": [text for text in WIDE_LOSSES if "top_k_distill" in text],
}
PAIRS = [text for text in LOSSES if re.match("dpo|ipo|slic|simpo|orpo", text)]
REFUSED = {text for texts in NEED_COLUMNS.values() for text in texts} | {"cross_entropy", *PAIRS}


def graph(**settings: Any) -> Dataflow:
    cfg = QuickstartConfig(**settings)
    flow = grpo(cfg, [correct], rows=problems(cfg))
    flow.check()
    return flow


def refusal(**settings: Any) -> ValueError:
    with error_about(ValueError) as caught:
        graph(**settings)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_defaults_are_the_papers() -> None:
    flow = graph()
    (advantage,), (train,) = flow.all(PerGroupStage), flow.all(TrainStage)
    assert advantage.function is REGISTRY["grpo_advantage"].target
    assert train.loss == parse("clipped_surrogate(clip_low=0.2, clip_high=0.28)", "loss")
    assert train.aggregation is REGISTRY["token_mean"].target
    assert not flow.stage(GenerateStage).greedy_baseline


@pytest.mark.parametrize("text", [*LOSSES, *WIDE_LOSSES])
def test_each_loss_trains_or_is_refused(text: str) -> None:
    if text in REFUSED:
        refusal(loss=text)
    else:
        assert graph(loss=text).trained("policy").loss == parse(text, "loss")


@pytest.mark.parametrize(
    ("column", "text"), [(c, text) for c, texts in NEED_COLUMNS.items() for text in texts]
)
def test_a_loss_of_a_column_that_nobody_writes_is_refused_by_the_graph(
    column: str, text: str
) -> None:
    with invalid("flow.train('policy'): columns", ["advantages"]) as refused:
        graph(loss=text)
    assert f"['{column}']" in refused.value.rule


def test_losses_of_pairs_and_of_demonstrations_are_refused_by_the_graph() -> None:
    with invalid("flow.train: aggregation", "token_mean"):
        graph(loss="dpo")
    with invalid("flow.train: group_size"):
        graph(loss="dpo", aggregation="sequence_mean")
    with invalid("flow.train('policy'): columns", ["advantages"]) as refused:
        graph(loss="simpo", aggregation="sequence_mean", group_size=2)
    assert "['preference']" in refused.value.rule
    with invalid("flow.train('policy'): columns", ["advantages"]):
        graph(loss="cross_entropy")


@pytest.mark.parametrize("text", OTHERS["group_advantage"])
def test_each_advantage_of_a_group_is_computed_over_groups(text: str) -> None:
    flow = graph(advantage=text)
    (stage,) = flow.all(PerGroupStage)
    others = {"opo_advantage": ["num_tokens"], "remax_advantage": ["is_greedy"]}.get(text, [])
    others = others or (["reward"] if "by_last_column" in text else [])
    assert [column.name for column in stage.reads] == ["reward", *others]
    assert flow.stage(GenerateStage).greedy_baseline == (text == "remax_advantage")


@pytest.mark.parametrize("text", OTHERS["batch_advantage"])
def test_each_advantage_of_a_batch_is_computed_over_the_step(text: str) -> None:
    (stage,) = graph(advantage=text).all(PerBatchStage)
    assert [column.name for column in stage.reads] == ["reward"]


@pytest.mark.parametrize("text", OTHERS["token_advantage"])
def test_advantages_of_tokens_are_refused_with_what_they_read(text: str) -> None:
    refused = refusal(advantage=text)
    assert isinstance(refused, InvalidValue)
    assert refused.field.startswith("arguments of ")
    assert refused.value
    assert "row_offsets" not in refused.value


@pytest.mark.parametrize("text", OTHERS["aggregation"])
def test_each_aggregation_is_taken(text: str) -> None:
    assert graph(aggregation=text).trained("policy").aggregation == parse(text, "aggregation")


def test_advantages_in_advantages_have_their_columns() -> None:
    text = "dynamic_sampling(opo_advantage, by_last_column=True)"
    (stage,) = graph(advantage=text).all(PerGroupStage)
    assert [column.name for column in stage.reads] == ["reward", "num_tokens", "reward"]
    assert graph(advantage="dynamic_sampling(remax_advantage)").stage(GenerateStage).greedy_baseline


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"loss": "gmpoo()"}, ("'gmpoo()'", "'gmpo'")),
        ({"advantage": "grop_advantage"}, ("'grop_advantage'", "'grpo_advantage'")),
        ({"advantage": "scale_rl"}, ("'scale_rl'", "'scale_rl_advantage'")),
        ({"aggregation": "gspo"}, ("'gspo'",)),
        ({"loss": "token_mean"}, ("'token_mean'",)),
        ({"aggregation": "constant_length"}, ("constant_length(length)",)),
        ({"loss": ""}, ("''",)),
    ],
)
def test_a_configuration_refuses_what_no_graph_could_use(
    settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    with error_about(ValueError, *names) as found:
        QuickstartConfig(**settings)
    assert str(found.value).startswith(next(iter(settings)))


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "pass_at_k_advantage(8)"},  # needs 9
        {"advantage": "remax_advantage", "group_size": 1},
    ],
)
def test_a_run_refuses_groups_that_are_too_small_for_an_advantage(settings: dict[str, Any]) -> None:
    config = QuickstartConfig(**settings)
    with error_about(InvalidValue, f"group_size={config.group_size}"):
        complete_graph(grpo(config, [correct], rows=[]), config)


def test_one_completion_a_prompt_goes_with_an_advantage_over_the_batch() -> None:
    graph(advantage="reinforce_plus_plus_advantage", group_size=1)


def test_the_documented_command_names_all_three() -> None:
    """The command of recipes/grpo.py and docs/algorithms.md."""
    command = ["--loss", "gmpo()", "--advantage", "pass_at_k_advantage(4)"]
    command += ["--aggregation", "sequence_mean"]
    cfg = parse_command_line(QuickstartConfig, command).config
    flow = grpo(cfg, [correct], rows=problems(cfg))
    assert flow.trained("policy").loss == parse("gmpo", "loss")
    assert flow.trained("policy").aggregation is REGISTRY["sequence_mean"].target
    assert flow.stage(PerGroupStage).function == parse("pass_at_k_advantage(4)", *ADVANTAGES)
    for page in ("recipes/grpo.py", "docs/algorithms.md"):
        shown = " ".join((ROOT / page).read_text().replace("\\", " ").split())
        assert 'quickstart.py --loss "gmpo()" --advantage "pass_at_k_advantage(4)"' in shown


@pytest.mark.parametrize("epsilon", ["-1", "-0.5", "1e999", "inf"])
def test_an_advantage_is_not_turned_round(epsilon: str) -> None:
    for name in ("grpo_advantage", "reinforce_plus_plus_advantage", "scale_rl_advantage"):
        message = str(refusal(advantage=f"{name}(epsilon={epsilon})"))
        assert message.startswith("advantage: ")
        assert "epsilon" in message

"""Predicted effects of options of generation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlsys.planner.decode_time import decode_parts, decode_step_time
from rlsys.planner.hardware import parse_cluster
from rlsys.planner.model_config import named_model
from rlsys.planner.profiles import fitted_constants
from rlsys.planner.rollout_options import main, precision_speedup, speculation
from rlsys.planner.run_plan import PLAIN_GENERATION

MODEL, CLUSTER, PLAN = named_model("Qwen/Qwen3-8B"), parse_cluster("1xH100"), PLAIN_GENERATION


def test_a_draft_pays_from_the_share_at_which_tokens_per_second_are_equal() -> None:
    found = speculation(MODEL, CLUSTER, PLAN, 64, 2000)
    assert found.cost > 1
    assert found.speedup(found.pays_from) == pytest.approx(1)
    assert found.speedup(1) == pytest.approx(5 / found.cost)


def test_checks_are_almost_free_for_few_requests_and_dear_for_many() -> None:
    few, many = (speculation(MODEL, CLUSTER, PLAN, batch, 200) for batch in (1, 512))
    assert few.cost < 1.1
    assert many.cost > 1.5


def test_a_step_with_drafts_costs_no_more_than_as_many_requests() -> None:
    """Since the KV cache of a request is read once for its drafts."""
    seconds = [decode_step_time(MODEL, CLUSTER, PLAN, batch, 4000).seconds for batch in (16, 80)]
    assert 1 < speculation(MODEL, CLUSTER, PLAN, 16, 4000).cost < seconds[1] / seconds[0]


def test_a_head_of_one_layer_costs_more_than_n_grams_and_less_than_the_policy() -> None:
    ngrams = speculation(MODEL, CLUSTER, PLAN, 8, 2000)
    head = speculation(MODEL, CLUSTER, PLAN, 8, 2000, has_head=True)
    assert ngrams.cost < head.cost < ngrams.cost + 4 * 0.2


def test_eight_bits_save_at_most_half_of_what_is_read() -> None:
    long = precision_speedup(MODEL, CLUSTER, PLAN, 64, 8000, kv="fp8")
    short = precision_speedup(MODEL, CLUSTER, PLAN, 64, 200, kv="fp8")
    assert 1 < short < long < 2
    assert 1 < precision_speedup(MODEL, CLUSTER, PLAN, 1, 200, weights="fp8_block") < 2


def test_drafts_never_shorten_a_step() -> None:
    """Although measured all-reduces of larger messages may take less time."""
    plan = replace(PLAN, tp=8)
    for batch in (16, 32, 64):
        cluster, model = parse_cluster("8xB200"), named_model("Llama-3.1-70B")
        assert speculation(model, cluster, plan, batch, 2000, drafted=1).cost >= 1


def test_latent_attention_computes_each_drafted_token() -> None:
    model, cluster = named_model("DeepSeek-V3"), parse_cluster("8xH20")
    parts = [
        decode_parts(model, cluster, replace(PLAN, tp=8), 64, 2000, fitted_constants(), drafted)
        for drafted in (0, 4)
    ]
    assert parts[1]["kv_cache"] > 1.5 * parts[0]["kv_cache"]


@pytest.mark.parametrize(
    ("model", "cluster", "missing"),
    [("Qwen/Qwen3-30B-A3B", "2xH100", {3}), ("Qwen/Qwen3-8B", "2xV100", {2, 3})],
)
def test_options_that_are_not_available_have_no_number(
    model: str, cluster: str, missing: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, "--cluster", cluster, "--tp", "2", "--requests", "8"]) == 0
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].strip("|").split("|")]
    assert {place for place, cell in enumerate(row) if cell == "-"} == missing


def test_the_table_has_a_row_for_each_number_of_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["Qwen/Qwen3-8B", "--requests", "1", "8", "4096", "--context", "2000"]) == 0
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [row[0] for row in rows] == ["1", "8", "4096"]
    assert {len(row) for row in rows} == {len(header)}
    assert set(rows[2][1:]) == {"-"}  # the cache holds fewer


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-model"],
        ["Qwen/Qwen3-8B", "--cluster", "1xABC"],
        ["Qwen/Qwen3-8B", "--context", "0"],
        ["Qwen/Qwen3-8B", "--context", "10000000"],
        ["Qwen/Qwen3-8B", "--requests", "0"],
        ["Qwen/Qwen3-8B", "--num-tokens", "33"],
        ["Qwen/Qwen3-8B", "--accepted", "1.5"],
        ["Qwen/Qwen3-8B", "--tp", "2"],
        ["Qwen/Qwen3-8B", "--cluster", "8xH100", "--tp", "5"],
        ["Qwen/Qwen3-8B", "--cluster", "2x8xH100", "--tp", "16"],
    ],
)
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2

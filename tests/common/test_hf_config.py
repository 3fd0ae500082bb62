"""Numbers in configurations of models, including models whose layers differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from rlsys.common.hf_config import largest, numbers
from rlsys.config.layout_fits_model import check_fits, check_replica_fits
from rlsys.config.parallel_layout import ParallelLayout
from tests.errors import invalid


def test_numbers_of_layers_that_differ() -> None:
    config = AutoConfig.for_model("gemma4_text")
    widths = set(numbers(config, "head_dim"))
    assert len(widths) > 1
    assert largest(config, "head_dim", default=1) == max(widths)


def test_lists_and_what_is_missing() -> None:
    config = SimpleNamespace(top_k=[2, 4], heads=8, scale=True, none=None)
    assert numbers(config, "top_k") == [2, 4]
    assert numbers(config, "heads") == [8]
    assert numbers(config, "scale") == numbers(config, "none") == numbers(config, "other") == []
    assert largest(config, "other", "top_k", default=1) == 4
    assert largest(config, "other", default=1) == 1


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("tp3", ["tp = 3", "num_attention_heads=4"]),
        ("tp4", ["tp = 4", "num_key_value_heads=2"]),
        ("pp2", ["pp = 2", "num_hidden_layers=3"]),
        ("pp3v2", ["pp x 2", "6", "num_hidden_layers=3"]),
        ("ep2", ["experts"]),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout: str, parts: list[str]) -> None:
    config = AutoConfig.for_model(
        "qwen3", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    )
    check_fits(ParallelLayout.parse("dp3tp2cp4"), config)
    with invalid("trainer.layout", layout) as refused:
        check_fits(ParallelLayout.parse(layout), config)
    assert all(part in refused.value.rule for part in parts)


def test_experts_are_divided() -> None:
    config = AutoConfig.for_model("qwen3_moe", num_experts=6)
    check_fits(ParallelLayout(ep=3), config)
    with invalid("policy.trainer.layout", "ep4") as refused:
        check_fits(ParallelLayout(ep=4), config, setting="policy.trainer.layout")
    assert "num_experts=6" in refused.value.rule


def test_a_replica_is_sharded_by_heads() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2
    )
    for tensor_parallel in (1, 2, 3, 6):  # keys and values are copied
        check_replica_fits(tensor_parallel, config)
    with invalid("rollout.tensor_parallel", 4):
        check_replica_fits(4, config)

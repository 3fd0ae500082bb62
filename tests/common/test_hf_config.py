"""Numbers of configurations, also of models whose layers differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from rlsys.common.hf_config import largest, numbers
from rlsys.config.layout_fits_model import check_fits, check_replica_fits


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
    ("layout", "message"),
    [
        ("tp3", "tp = 3 does not divide this model's num_attention_heads=4"),
        ("tp4", "tp = 4 does not divide this model's num_key_value_heads=2"),
        ("pp2", "pp = 2 does not divide this model's num_hidden_layers=3"),
        ("pp3v2", "pp x 2 pieces = 6 does not divide this model's num_hidden_layers=3"),
        ("ep2", "this model has no experts; leave ep out"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout: str, message: str) -> None:
    config = AutoConfig.for_model(
        "qwen3", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    )
    check_fits("dp3tp2cp4", config)
    with pytest.raises(ValueError, match=message):
        check_fits(layout, config)


def test_experts_are_divided() -> None:
    config = AutoConfig.for_model("qwen3_moe", num_experts=6)
    check_fits("ep3", config)
    with pytest.raises(ValueError, match="ep x tp = 4 does not divide this model's num_experts=6"):
        check_fits("ep4", config)


def test_a_replica_is_cut_by_heads() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2
    )
    for tensor_parallel in (1, 2, 3, 6):  # keys and values are copied
        check_replica_fits(tensor_parallel, config)
    with pytest.raises(ValueError, match=r"tensor_parallel=4 .*num_attention_heads=6; use a"):
        check_replica_fits(4, config)

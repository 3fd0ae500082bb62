"""Parallel layouts: their strings and the coordinates of ranks."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import TrainerConfig
from rlsys.config.fields import from_dict, to_dict
from rlsys.config.parallel_layout import DATA_DIMENSIONS, DIMENSIONS, ParallelLayout, parse_layouts
from tests.errors import invalid

layouts = st.builds(
    lambda num_pieces, **sizes: ParallelLayout(
        **sizes, num_pieces=num_pieces if sizes["pp"] > 1 else 1
    ),
    **{name: st.integers(1, 3) for name in (*DIMENSIONS, "num_pieces")},
)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp1", {}),
        ("dp4", {"dp_shard": 4}),
        ("dp2x4", {"dp_replicate": 2, "dp_shard": 4}),
        ("dp2tp2pp2", {"dp_shard": 2, "tp": 2, "pp": 2}),
        ("dp1tp2", {"tp": 2}),
        ("pp2v3cp2", {"pp": 2, "num_pieces": 3, "cp": 2}),
        ("cp2ep4", {"cp": 2, "ep": 4}),
    ],
)
def test_a_string_gives_the_sizes(text: str, sizes: dict[str, int]) -> None:
    assert ParallelLayout.parse(text) == ParallelLayout(**sizes)


@given(layouts)
def test_every_layout_has_a_string(layout: ParallelLayout) -> None:
    assert ParallelLayout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "value", "culprit"),
    [
        ("", "", "''"),
        ("tp", "tp", "'tp'"),
        ("dp2zz3", "dp2zz3", "'zz3'"),
        ("tp2x2", "tp2x2", "'tp2x2'"),
        ("pp2x2", "pp2x2", "'pp2x2'"),
        ("dp2v2", "dp2v2", "'dp2v2'"),
        ("pp2v", "pp2v", "'v'"),
        ("pp1v2", "pp1v2", ""),
        ("tp2tp2", "tp2tp2", "tp"),
        ("dp2dp2x2", "dp2dp2x2", "dp"),
        ("tp0", "tp=0", ""),
    ],
)
def test_other_texts_are_refused(text: str, value: str, culprit: str) -> None:
    with invalid("layout", value) as refused:
        ParallelLayout.parse(text)
    assert culprit in refused.value.rule


@given(layouts)
def test_coordinates_number_the_ranks(layout: ParallelLayout) -> None:
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.num_ranks)]
    assert len(set(places)) == layout.num_ranks
    sizes = [layout.size(name) for name in reversed(DIMENSIONS)]
    assert all(0 <= at < size for place in places for at, size in zip(place, sizes, strict=True))


@given(layouts)
def test_one_of_the_ranks_with_the_same_rows_reports(layout: ParallelLayout) -> None:
    reporters: dict[int, list[int]] = {index: [] for index in range(layout.num_data)}
    for rank in range(layout.num_ranks):
        if layout.counts(rank):
            reporters[layout.data_index(rank)].append(rank)
    assert all(len(ranks) == 1 for ranks in reporters.values())
    for one, other in itertools.combinations(range(min(layout.num_ranks, 12)), 2):
        there, here = layout.coordinates(one), layout.coordinates(other)
        same = all(there[name] == here[name] for name in DATA_DIMENSIONS)
        assert same == (layout.data_index(one) == layout.data_index(other))


def test_a_trainer_refuses_an_unreadable_layout() -> None:
    assert TrainerConfig(layout="dp2tp2").parallel == ParallelLayout(dp_shard=2, tp=2)
    with invalid("trainer.layout", "dp2yy2"):
        TrainerConfig(layout="dp2yy2")


def test_a_list_of_layouts() -> None:
    expected = (ParallelLayout(dp_replicate=2, dp_shard=2), ParallelLayout(tp=2), ParallelLayout())
    assert parse_layouts("dp2x2, dp1tp2 ,dp1") == expected
    assert parse_layouts("dp2") == (ParallelLayout(dp_shard=2),)
    trainer = TrainerConfig(layout="dp2x2,dp1tp2,dp1", learning_rate=1e-3)
    assert trainer.layouts == expected
    assert trainer.parallel == expected[0]
    assert trainer.with_layout(expected[1]) == TrainerConfig(layout="tp2", learning_rate=1e-3)
    alone = [TrainerConfig(layout=one, learning_rate=1e-3) for one in ("dp2x2", "dp1tp2", "dp1")]
    assert [trainer.with_layout(one) for one in trainer.layouts] == alone


def test_a_configuration_keeps_the_text_of_its_layouts() -> None:
    trainer = TrainerConfig(layout="dp2x2, dp1tp2")
    assert from_dict(TrainerConfig, to_dict(trainer)) == trainer
    assert to_dict(trainer)["layout"] == "dp2x2, dp1tp2"
    assert replace(trainer, layout="dp4").layouts == (ParallelLayout(dp_shard=4),)
    assert pickle.loads(pickle.dumps(trainer)).layouts == trainer.layouts


@pytest.mark.parametrize(
    ("text", "culprits"),
    [
        ("dp2,dp2", ["dp2 (2 ranks)"]),
        ("dp4,tp2,dp2", ["dp2 (2 ranks)", "tp2 (2 ranks)"]),
        ("dp1,dp2", ["dp2 (2 ranks)", "dp1 (1 ranks)"]),
        ("dp4,zz2,dp1", ["'zz2'"]),
        ("dp2,", []),
        (",dp2", []),
    ],
)
def test_a_list_that_does_not_decrease_is_refused(text: str, culprits: list[str]) -> None:
    with invalid("trainer.layout", text) as refused:
        TrainerConfig(layout=text)
    assert all(culprit in refused.value.rule for culprit in culprits)

"""Layouts: what a string says, and where a rank stands."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import TrainerConfig
from rlsys.config.parallel_layout import DATA_DIMENSIONS, DIMENSIONS, ParallelLayout, split_layouts

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
def test_a_string_says_the_sizes(text: str, sizes: dict[str, int]) -> None:
    assert ParallelLayout.parse(text) == ParallelLayout(**sizes)


@given(layouts)
def test_every_layout_has_a_string(layout: ParallelLayout) -> None:
    assert ParallelLayout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read from '' on"),
        ("tp", "cannot be read from 'tp' on"),
        ("dp2zz3", "cannot be read from 'zz3' on"),
        ("tp2x2", "cannot be read from 'tp2x2' on"),
        ("pp2x2", "cannot be read from 'pp2x2' on"),
        ("dp2v2", "cannot be read from 'dp2v2' on"),
        ("pp2v", "cannot be read from 'v' on"),
        ("pp1v2", "pp1v2 has all pieces on one rank"),
        ("tp2tp2", "says tp twice"),
        ("dp2dp2x2", "says dp twice"),
        ("tp0", "tp=0 has no rank"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout.parse(text)


@given(layouts)
def test_coordinates_number_the_ranks(layout: ParallelLayout) -> None:
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.num_ranks)]
    assert len(set(places)) == layout.num_ranks
    sizes = [layout.size(name) for name in reversed(DIMENSIONS)]
    assert all(0 <= at < size for place in places for at, size in zip(place, sizes, strict=True))


@given(layouts)
def test_of_ranks_with_the_same_rows_one_counts(layout: ParallelLayout) -> None:
    speakers: dict[int, list[int]] = {index: [] for index in range(layout.num_data)}
    for rank in range(layout.num_ranks):
        if layout.counts(rank):
            speakers[layout.data_index(rank)].append(rank)
    assert all(len(ranks) == 1 for ranks in speakers.values())
    for one, other in itertools.combinations(range(min(layout.num_ranks, 12)), 2):
        there, here = layout.coordinates(one), layout.coordinates(other)
        same = all(there[name] == here[name] for name in DATA_DIMENSIONS)
        assert same == (layout.data_index(one) == layout.data_index(other))


def test_a_trainer_says_which_layout_cannot_be_read() -> None:
    assert TrainerConfig(layout="dp2tp2").parallel == ParallelLayout(dp_shard=2, tp=2)
    with pytest.raises(ValueError, match=r"trainer.layout: layout 'dp2yy2' cannot be read from"):
        TrainerConfig(layout="dp2yy2")


def test_a_list_falls() -> None:
    assert split_layouts("dp2x2, dp1tp2 ,dp1") == ["dp2x2", "dp1tp2", "dp1"]
    assert split_layouts("dp2") == ["dp2"]
    trainer = TrainerConfig(layout="dp2x2,dp1tp2,dp1", learning_rate=1e-3)
    assert trainer.parallel == ParallelLayout(dp_replicate=2, dp_shard=2)
    alone = [TrainerConfig(layout=one, learning_rate=1e-3) for one in ("dp2x2", "dp1tp2", "dp1")]
    assert list(trainer.in_each_layout) == alone
    assert alone[0].in_each_layout == (alone[0],)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dp2,dp2", r"has dp2 \(2 ranks\) behind dp2 \(2 ranks\)"),
        ("dp4,tp2,dp2", r"has dp2 \(2 ranks\) behind tp2 \(2 ranks\)"),
        ("dp1,dp2", r"has dp2 \(2 ranks\) behind dp1 \(1 rank\).*strictly fewer ranks"),
        ("dp4,zz2,dp1", r"layout 'zz2' cannot be read from 'zz2' on"),
        ("dp2,", r"the list 'dp2,' has no layout before or behind a comma"),
        (",dp2", r"the list ',dp2' has no layout before or behind a comma"),
    ],
)
def test_a_list_that_does_not_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.layout: .*{told}"):
        TrainerConfig(layout=text)

"""Mixtures: each source's share of the prompts, in an order that needs no state."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import DataConfig
from rlsys.data.mixture import mixed
from rlsys.data.prompts import PromptSource, TaskSource
from rlsys.launcher.tiny_models import build_tokenizer
from tests.errors import invalid


def numbered(*sizes: int) -> list[np.ndarray]:
    """Return the row numbers of sources of these sizes, one after another."""
    ends = np.cumsum(sizes)
    return [
        np.arange(end - size, end, dtype=np.int32) for size, end in zip(sizes, ends, strict=True)
    ]


def test_the_sources_of_an_epoch_by_hand() -> None:
    # 3 rows at 0.3 need an epoch of 10; the other source gives 7 of them.
    found = mixed(numbered(3, 3), [0.7, 0.3], "data").tolist()
    assert len(found) == 10
    assert Counter(found) == {0: 3, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    # Evenly: at (j + 1/2) / 7 and (j + 1/2) / 3.
    assert [row >= 3 for row in found] == [
        False,
        True,
        *[False] * 3,
        True,
        *[False] * 2,
        True,
        False,
    ]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=2, max_size=5))
def test_every_row_occurs_and_every_source_has_its_share(sources: list[tuple[int, int]]) -> None:
    sizes, weights = zip(*sources, strict=True)
    rows = numbered(*sizes)
    found = mixed(rows, weights, "data")
    assert set(found) == set(range(sum(sizes)))
    for own, weight in zip(rows, weights, strict=True):
        exact = len(found) * weight / sum(weights)
        assert abs(np.isin(found, own).sum() - exact) <= len(sources)


def test_repeated_rows_are_spread_over_their_source() -> None:
    # 10 rows at 0.75 beside 5 at 0.25: an epoch of 20 has 15 of the first source.
    counts = Counter(mixed(numbered(10, 5), [0.75, 0.25], "data").tolist())
    assert [row for row in range(10) if counts[row] == 2] == [0, 2, 4, 6, 8]


def test_other_weights_give_another_order(tmp_path: Path) -> None:
    orders = []
    for weights in ("0.7 0.3", "0.3 0.7"):
        sources = []
        for name, weight in zip("ab", weights.split(), strict=True):
            file = tmp_path / f"{name}.jsonl"
            rows = ({"prompt": f"{name}{n}"} for n in range(10))
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            sources.append(f"{file}*{weight}")
        orders.append(TaskSource(DataConfig(source=",".join(sources)), seed=0).order)
    assert orders[0]["num_prompts"] == orders[1]["num_prompts"]
    assert orders[0]["checksum"] != orders[1]["checksum"]


def test_weights_need_no_sum_of_one() -> None:
    parts = numbered(4, 2)
    assert mixed(parts, [2, 6], "x").tolist() == mixed(parts, [0.25, 0.75], "x").tolist()


def test_a_mixture_without_rows_or_too_long_is_refused() -> None:
    with invalid("data") as found:
        mixed(numbered(1, 0), [1, 1], "data")
    assert "source 2" in found.value.rule
    with invalid("data") as found:
        mixed(numbered(3, 3), [1, 1e-9], "data")
    assert "300000000" in found.value.rule


def write(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    return path


def mixture(tmp_path: Path, *, shuffle: bool = True) -> PromptSource:
    many = write(tmp_path / "many.jsonl", [f"m{n}" for n in range(30)])
    few = write(tmp_path / "few.jsonl", [f"f{n}" for n in range(4)])
    return PromptSource(
        DataConfig(source=f"{many}*0.75,{few}*0.25", shuffle=shuffle),
        build_tokenizer(),
        seed=3,
        max_tokens=4,
        max_context=64,
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_prompts_of_a_mixture(tmp_path: Path, *, shuffle: bool) -> None:
    prompts = mixture(tmp_path, shuffle=shuffle)
    assert (len(prompts), prompts.num_rows) == (40, 34)
    for epoch in range(2):
        texts = Counter(prompts.at(40 * epoch + n).text for n in range(40))
        assert sum(count for text, count in texts.items() if text[0] == "m") == 30
        assert set(texts) == {*(f"m{n}" for n in range(30)), *(f"f{n}" for n in range(4))}


def test_a_prompt_of_a_mixture_does_not_depend_on_the_ones_before(tmp_path: Path) -> None:
    earlier, later = mixture(tmp_path), mixture(tmp_path)
    texts = [earlier.at(index).text for index in range(100)]
    assert later.at(83).text == texts[83]
    later.check_order(earlier.order)


def test_evaluation_takes_each_row_once(tmp_path: Path) -> None:
    rows = [write(tmp_path / f"{name}.jsonl", [name]) for name in "ab"]
    config = DataConfig(source=f"{rows[0]}*0.9,{rows[1]}*0.1", shuffle=False)
    assert len(TaskSource(config, seed=0)) == 10
    assert len(TaskSource(config, seed=0, evaluated=True)) == 2

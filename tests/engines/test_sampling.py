"""Random streams and inverse-CDF sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.generation.sampling import (
    Allowed,
    Cut,
    cut_tail,
    sample,
    stream_key,
    uniforms,
)


def draw(
    logits: list[list[float]],
    u: list[float],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[list[int], list[float]]:
    rows = len(logits)
    tokens, logprobs = sample(
        torch.tensor(logits),
        torch.tensor(u, dtype=torch.float32),
        temperature=torch.full((rows,), temperature),
        cut=Cut(torch.arange(rows), torch.full((rows,), top_k), torch.full((rows,), top_p)),
    )
    return tokens.tolist(), logprobs.tolist()


HALF_QUARTERS = [math.log(0.5), math.log(0.25), math.log(0.25)]


def test_inverse_cdf_by_hand() -> None:
    tokens, logprobs = draw([HALF_QUARTERS] * 5, [0.0, 0.49, 0.51, 0.74, 0.99])
    assert tokens == [0, 0, 1, 1, 2]
    assert logprobs == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.25)])


def test_temperature_sharpens_both_draw_and_logprob() -> None:
    # At temperature 1/2 the probabilities are squared: 4/6, 1/6, 1/6.
    tokens, logprobs = draw([HALF_QUARTERS] * 2, [0.6, 0.7], temperature=0.5)
    assert tokens == [0, 1]
    assert logprobs == pytest.approx([math.log(4 / 6), math.log(1 / 6)])


def test_tiny_temperature_takes_the_most_likely_and_does_not_overflow() -> None:
    tokens, logprobs = draw([[1e4, 1e4 - 1, -1e4]], [0.999], temperature=1e-30)
    assert tokens == [0]
    assert logprobs == [0.0]


def test_logprobs_are_those_before_truncation() -> None:
    tokens, logprobs = draw([HALF_QUARTERS], [0.99], top_k=1)
    assert tokens == [0]
    assert logprobs == pytest.approx([math.log(0.5)])


def test_top_k_then_top_p_by_hand() -> None:
    weights = torch.tensor([[0.1, 0.4, 0.2, 0.3]])

    def kept(top_k: int, top_p: float) -> list[int]:
        left = cut_tail(weights, top_k=torch.tensor([top_k]), top_p=torch.tensor([top_p]))
        return left[0].nonzero().flatten().tolist()

    assert kept(2, 1.0) == [1, 3]
    assert kept(0, 0.5) == [1, 3]  # 0.4 is less than 0.5, 0.7 is not
    assert kept(0, 0.4) == [1]
    assert kept(3, 0.7) == [1, 3]  # of the remaining 0.9, 0.63 is needed: 0.7 suffices
    assert kept(9, 1.0) == [0, 1, 2, 3]


def test_equally_likely_tokens_are_kept_together() -> None:
    weights = torch.tensor([[0.25, 0.5, 0.25]])
    left = cut_tail(weights, top_k=torch.tensor([2]), top_p=torch.tensor([1.0]))
    assert left.tolist() == weights.tolist()


def test_each_row_has_its_own_top_k_and_top_p() -> None:
    logits = torch.tensor([HALF_QUARTERS, HALF_QUARTERS, HALF_QUARTERS])
    tokens, _ = sample(
        logits,
        torch.full((3,), 0.99),
        temperature=torch.ones(3),
        cut=Cut(torch.tensor([1, 2]), torch.tensor([1, 0]), torch.tensor([1.0, 0.5])),
    )
    assert tokens.tolist() == [2, 0, 0]


@given(
    st.lists(st.floats(-40, 40, width=32), min_size=1, max_size=40),
    st.integers(0, 2**24 - 1),
    st.integers(0, 5),
    st.floats(0.01, 1),
)
def test_a_truncated_token_is_never_drawn(
    logits: list[float], u: int, top_k: int, top_p: float
) -> None:
    tokens, logprobs = draw([logits], [u * 2.0**-24], top_k=top_k, top_p=top_p)
    logprob = torch.tensor(logits).log_softmax(-1)
    left = cut_tail(logprob.exp()[None], top_k=torch.tensor([top_k]), top_p=torch.tensor([top_p]))
    assert left[0, tokens[0]] > 0
    assert logprobs[0] == pytest.approx(float(logprob[tokens[0]]), abs=1e-6)


def test_frequencies_follow_the_probabilities() -> None:
    keys = np.array([stream_key(seed) for seed in range(20_000)], np.uint64)
    u = torch.from_numpy(uniforms(keys, np.zeros(len(keys), np.int64)))
    tokens, _ = sample(
        torch.tensor([HALF_QUARTERS]).expand(len(keys), -1),
        u,
        temperature=torch.ones(len(keys)),
    )
    frequencies = torch.bincount(tokens, minlength=3) / len(keys)
    assert frequencies.tolist() == pytest.approx([0.5, 0.25, 0.25], abs=0.015)  # 4 sigma


def test_a_stream_is_uniform_and_neighbours_are_unrelated() -> None:
    keys = np.full(50_000, stream_key(7), np.uint64)
    u = uniforms(keys, np.arange(50_000))
    neighbour = uniforms(np.full(50_000, stream_key(8), np.uint64), np.arange(50_000))
    assert u.min() >= 0
    assert u.max() < 1
    assert np.histogram(u, bins=10, range=(0, 1))[0] == pytest.approx(5000, abs=300)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(u, neighbour)[0, 1]) < 0.02


@given(st.integers(), st.integers(0, 2**40))
def test_numbers_depend_on_seed_and_index_only(seed: int, index: int) -> None:
    key = np.uint64(stream_key(seed))
    alone = uniforms(np.array([key]), np.array([index]))
    among = uniforms(np.array([key ^ np.uint64(1), key]), np.array([3, index]))
    assert alone[0] == among[1]


@pytest.mark.parametrize("bad", [[math.nan] * 3, [-math.inf] * 3, [0.0, math.inf, 0.0]])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_a_row_that_is_not_finite_changes_no_other_row(
    bad: list[float], top_k: int, u: float
) -> None:
    rows = [[0.3, 0.2, 0.1], bad, [0.1, 0.2, 0.3]]
    tokens, logprobs = draw(rows, [0.4, u, 0.9], top_k=top_k)
    assert 0 <= tokens[1] < 3
    assert not math.isfinite(logprobs[1])
    alone = draw([rows[0], rows[2]], [0.4, 0.9], top_k=top_k)
    assert (tokens[::2], logprobs[::2]) == alone


@pytest.mark.parametrize("bad", [[math.nan] * 3, [-math.inf] * 3, [math.inf, 0.0, math.inf]])
def test_a_masked_row_that_is_not_finite_gets_an_allowed_token(bad: list[float]) -> None:
    tokens, logprobs = sample(
        torch.tensor([bad]),
        torch.tensor([0.5]),
        temperature=torch.ones(1),
        allowed=Allowed(torch.tensor([0]), torch.tensor([[False, True, False]])),
    )
    assert tokens.tolist() == [1]
    assert not logprobs.isfinite().any()

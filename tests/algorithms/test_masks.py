import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.corrections import Correction, batch_weights, sequence_icepop
from rlsys.algorithms.loss_inputs import LossInputs, needs_of
from rlsys.algorithms.masks import (
    clip_cov,
    high_entropy,
    opsm,
    reject,
    second_moment,
    token_covariance,
)
from tests.algorithms.loss_inputs import three_policies
from tests.errors import invalid

INF = math.inf


def make_inputs(
    ratios: list[float],
    rows: list[int],
    *,
    advantages: list[float] | None = None,
    entropy: list[float] | None = None,
) -> LossInputs:
    """π_θ = π_prox = ratio · μ, and μ gives each token 1/4."""
    num_tokens = len(ratios)
    sampler = torch.full((num_tokens,), 0.25).log()
    trainer = (sampler + torch.tensor(ratios).log()).requires_grad_()
    return LossInputs(
        trainer_logprobs=trainer,
        proximal_logprobs=trainer.detach(),
        sampler_logprobs=sampler,
        advantages=torch.tensor(advantages or [1.0] * num_tokens),
        entropy=torch.tensor(entropy or [1.0] * num_tokens, requires_grad=True),
        staleness=torch.zeros(num_tokens, dtype=torch.int64),
        row_index=torch.tensor(rows, dtype=torch.int64),
        columns={"importance_weights": torch.arange(num_tokens) / 2},
    )


ROWS = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("correction", "ratios", "weights"),
    [
        (sequence_icepop(0.5, 5.0), [4.0, 1.0, 9.0, 9.0], [2.0, 2.0, 0.0, 0.0]),
        (sequence_icepop(0.5, 5.0, False), [4.0, 1.0, 3.0, 3.0], [4.0, 4.0, 0.0, 0.0]),
        (batch_weights(), [1.0] * 4, [0.0, 0.5, 1.0, 1.5]),
        (reject("ratio", 0.5, 2.0), [0.4, 0.6, 1.9, 2.1], [0, 1, 1, 0]),
        (reject("ratio", high=2.0), [0.0, 0.6, 1.9, 1e30], [1, 1, 1, 0]),
        (reject("ratio", 0.5, 2.0, "mean"), [4.0, 0.25, 4.0, 2.0], [1, 1, 0, 0]),
        (reject("ratio", 0.5, 2.0, "sum"), [1.9, 1.0, 1.9, 1.9], [1, 1, 0, 0]),
        (reject("ratio", 1e-4, over="every"), [1.0, 9.0, 1.0, 0.0], [1, 1, 0, 0]),
        (reject("k1", -1.0, 1.0), [0.3, 0.4, 2.7, 2.8], [0, 1, 1, 0]),
        (reject("k1", -1.0, 1.0, "sum"), [0.3, 3.0, 2.0, 2.0], [1, 1, 0, 0]),
        (reject("k2", high=0.5, over="mean"), [2.7, 2.7, 2.8, 2.8], [1, 1, 0, 0]),
        # w − 1 − log w = 1 − log 2 = 0.307 at 2 and log 2 − ½ = 0.193 at ½.
        (reject("k3", high=0.3), [2.0, 0.5, 1.0, 0.0], [0, 1, 1, 0]),
        (reject("k3", high=0.2, over="mean"), [2.0, 1.0, 2.0, 0.5], [1, 1, 0, 0]),
        # (log ρ)² = 0.48, 0.48 and 1.92, 0.16: means 0.48; and 0.16, then 1.04.
        (second_moment(0.5), [2.0, 0.5, 4.0, math.exp(0.4)], [1, 1, 0, 1]),
        (second_moment(0.4), [2.0, 0.5, 4.0, math.exp(0.4)], [0, 0, 0, 1]),
    ],
)
def test_weights_by_hand(correction: Correction, ratios: list[float], weights: list[float]) -> None:
    found, metrics = correction(make_inputs(ratios, ROWS))
    assert found.tolist() == pytest.approx(weights)
    assert not found.requires_grad
    assert metrics
    assert not any(metric.requires_grad for metric in metrics.values())
    assert pickle.loads(pickle.dumps(correction)) == correction
    empty, _ = correction(make_inputs([], []))
    assert empty.shape == (0,)
    alone, _ = correction(make_inputs(ratios[:1], [0]))
    assert alone.isfinite().all()


W, RHO = [1.0, 3.0, 5.0, 0.3], [5.0, 5.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("correction", "w", "rho", "weights"),
    [
        # log(μ/π_θ) = log 2 of every token, then −log 2; that of other pairs differs by rollout.
        (opsm(0.5), [4.0, 4.0, 0.25, 0.25], [0.5] * 4, [0, 0, 0, 0]),
        (opsm(0.5), [0.25, 0.25, 4.0, 4.0], [2.0] * 4, [1, 1, 1, 1]),
        (reject("ratio", 0.5, 4.0), W, RHO, [1, 1, 0, 0]),
        (reject("ratio", 0.5, 4.0, "mean"), W, RHO, [1, 1, 1, 1]),  # √3 and √1.5
        (reject("ratio", 0.5, 2.0, "sum"), W, RHO, [0, 0, 1, 1]),  # 3 and 1.5
        (reject("ratio", 0.5, 4.0, "every"), W, RHO, [1, 1, 0, 0]),
        (reject("k1", -1.0, 1.3), W, RHO, [1, 1, 0, 0]),  # 0, 1.1, 1.6, −1.2
        (reject("k2", high=0.7), W, RHO, [1, 1, 0, 0]),  # 0, 0.60, 1.30, 0.72
        (reject("k3", high=0.7), W, RHO, [1, 0, 0, 1]),  # 0, 0.90, 2.39, 0.50
        # (log ρ)² = 0.48, 0.48 and 1.92, 0.16; of u 1.92 for the first token, of w 4.3.
        (second_moment(0.5), [8.0, 1.0, 1.0, 1.0], [2.0, 0.5, 4.0, math.exp(0.4)], [1, 1, 0, 1]),
    ],
)
def test_a_mask_compares_the_two_policies_that_it_names(
    correction: Correction, w: list[float], rho: list[float], weights: list[float]
) -> None:
    assert correction(three_policies(w, rho, ROWS))[0].tolist() == weights


def test_covariance_is_of_the_policy_that_is_trained() -> None:
    # log π_θ + H = log 0.1 + 3 = 0.70, log 0.2 + 3 = 1.39; by π_prox 1.39 and 0.70.
    inputs = three_policies(
        [2.0, 1.0], [1.0, 2.0], [0, 0], advantages=torch.ones(2), entropy=torch.full((2,), 3.0)
    )
    assert token_covariance(inputs).tolist() == pytest.approx([0.697, 1.391], abs=1e-3)
    assert clip_cov(1.0, 5.0)(inputs)[0].tolist() == [1.0, 0.0]


def test_only_uncertain_tokens_are_trained() -> None:
    found, _ = high_entropy(0.672)(make_inputs([1.0] * 3, [0] * 3, entropy=[0.6, 0.7, 0.0]))
    assert found.tolist() == [0.0, 1.0, 0.0]
    assert not found.requires_grad


def test_tokens_of_high_covariance_are_dropped() -> None:
    # log π + H = log ¼ + 2 = 0.614, times A.
    inputs = make_inputs([1.0] * 4, ROWS, advantages=[1.0, 2.0, -2.0, 9.0], entropy=[2.0] * 4)
    assert token_covariance(inputs).tolist() == pytest.approx([0.614, 1.227, -1.227, 5.523], 1e-3)
    found, _ = clip_cov(1.0, 5.0)(inputs)
    assert found.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_the_covariance_of_a_state_is_that_of_its_definition() -> None:
    """Σ π(a) (log π(a) + H) A(a) = Cov(log π, A) over the actions."""
    logprobs = torch.tensor([0.5, 0.3, 0.2]).log()
    inputs = make_inputs([1.0] * 3, [0] * 3, advantages=[1.0, -2.0, 0.5])
    entropy = -(logprobs.exp() * logprobs).sum()
    state = LossInputs(
        **{**vars(inputs), "trainer_logprobs": logprobs, "entropy": entropy.expand(3)}
    )
    found = (logprobs.exp() * token_covariance(state)).sum()
    mean = (logprobs.exp() * inputs.advantages).sum()
    exact = (logprobs.exp() * (logprobs + entropy) * (inputs.advantages - mean)).sum()
    torch.testing.assert_close(found, exact)


@given(
    moments=st.lists(st.floats(0, 4), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    bound=st.floats(0.01, 3),
)
def test_the_second_moment_of_what_stays_is_bounded(
    moments: list[float], cut: int, bound: float
) -> None:
    """Of each rollout, and by the paper's rule where tokens differ: the largest go, and no more of
    them than must."""
    rows = [int(i >= max(cut, 1)) for i in range(len(moments))]
    inputs = make_inputs([math.exp(math.sqrt(m)) for m in moments], rows)
    kept = second_moment(bound)(inputs)[0].bool()
    gap = inputs.trainer_logprobs.detach() - inputs.sampler_logprobs
    moment = gap.double().square()
    for row in set(rows):
        own = inputs.row_index == row
        inside, outside = moment[own & kept], moment[own & ~kept]
        if len(inside):
            assert float(inside.mean()) <= bound * (1 + 1e-9)
        if len(outside):
            assert not len(inside) or inside.max() < outside.min()
            one_more = torch.cat([inside, outside[outside == outside.min()]])
            assert float(one_more.mean()) > bound


def test_batch_weights_need_their_column() -> None:
    assert needs_of(batch_weights()) == ("importance_weights",)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda: reject("k4", high=1.0), "reject: by", "k4"),  # type: ignore[arg-type]
        (lambda: reject("k1", high=1.0, over="turn"), "reject: over", "turn"),  # type: ignore[arg-type]
        (lambda: reject("ratio", 1.5, 2.0), "reject: (low, high)", (1.5, 2.0)),
        (lambda: reject("k3", 0.5, 1.0), "reject: (low, high)", (0.5, 1.0)),
        (lambda: sequence_icepop(5.0, 0.5), "sequence_icepop: (low, high)", (5.0, 0.5)),
        (lambda: second_moment(0.0), "second_moment: max_mean", 0.0),
        (lambda: clip_cov(5.0, 1.0), "clip_cov: (low, high)", (5.0, 1.0)),
    ],
)
def test_impossible_bounds_are_refused(
    make: Callable[[], Correction], field: str, value: Any
) -> None:
    with invalid(field, value):
        make()

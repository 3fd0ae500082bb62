import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlsys.algorithms.loss_inputs import LossFn, LossInputs, ScoreInputs, needs_of, whole_groups
from rlsys.algorithms.preferences import bradley_terry, dpo, ipo, orpo, simpo, slic
from rlsys.algorithms.registry import parse
from tests.algorithms.examples import OTHERS, PAIR_LOSSES
from tests.algorithms.loss_inputs import chosen, in_float32, leaf
from tests.errors import invalid

INF = math.inf
# Of two tokens the chosen one, of one token the rejected one, and another pair.
ROWS = [0, 0, 1, 2, 3]
REFERENCE = [-1.0, -1.0, -1.0, -1.0, -1.0]


def make_inputs(logprobs: list[float], *, rows: list[int] = ROWS, **changes: Any) -> LossInputs:
    trainer = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    row = torch.tensor(rows)
    nothing = torch.full_like(trainer, math.nan).detach()
    return LossInputs(
        trainer_logprobs=trainer,
        proximal_logprobs=nothing,
        sampler_logprobs=nothing,
        advantages=nothing,
        entropy=nothing,
        staleness=torch.zeros_like(row),
        row_index=row,
        group_index=changes.get("groups", 70 + row // 2),
        columns={
            "preference": changes.get("preference", 1.0 - 2 * (row % 2)),
            "reference_logprobs": torch.tensor(REFERENCE[: len(rows)], dtype=torch.float64),
        },
    )


def loss_and_gradient(
    loss: LossFn, inputs: LossInputs
) -> tuple[list[float], list[float], dict[str, Any]]:
    values, metrics = loss(inputs)
    (gradient,) = torch.autograd.grad(values.sum(), leaf(inputs))
    return values.tolist(), gradient.tolist(), metrics


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# h of the first pair: (−0.5 − 0.25 + 2) − (−2 + 1) = 2.25; of the second −0.5.
LOGPROBS = [-0.5, -0.25, -2.0, -1.5, -1.0]


@pytest.mark.parametrize(
    ("loss", "of_margin"),
    [
        (dpo(0.5), lambda h: -math.log(sigmoid(0.5 * h))),
        (
            dpo(0.5, label_smoothing=0.25),
            lambda h: -0.75 * math.log(sigmoid(0.5 * h)) - 0.25 * math.log(sigmoid(-0.5 * h)),
        ),
        (
            dpo(0.5, label_smoothing=0.25, robust=True),
            lambda h: (
                (-0.75 * math.log(sigmoid(0.5 * h)) + 0.25 * math.log(sigmoid(-0.5 * h))) / 0.5
            ),
        ),
        (ipo(0.5), lambda h: (h - 1) ** 2),
        (slic(0.5), lambda h: max(0.0, 1 - 0.5 * h)),
    ],
)
def test_losses_of_the_margin_from_the_reference(loss: LossFn, of_margin: Any) -> None:
    values, _, metrics = loss_and_gradient(loss, make_inputs(LOGPROBS))
    first, second = of_margin(2.25), of_margin(-0.5)
    assert values == pytest.approx([first, first, first, second, second])
    assert metrics["preference/accuracy"].values.tolist() == [1.0, 0.0]
    assert metrics["preference/margin"].values.tolist() == pytest.approx([1.125, -0.25])


def test_the_gradient_of_dpo() -> None:
    _, gradient, _ = loss_and_gradient(dpo(0.5), make_inputs(LOGPROBS))
    # Three tokens carry the first pair's loss: ∓ β σ(−βh) from each.
    first, second = 0.5 * sigmoid(-0.5 * 2.25), 0.5 * sigmoid(0.5 * 0.5)
    assert gradient == pytest.approx([-3 * first, -3 * first, 3 * first, -2 * second, 2 * second])


def test_simpo_and_orpo_compare_means_without_a_reference() -> None:
    inputs = make_inputs(LOGPROBS)
    inputs = replace(inputs, columns={"preference": inputs.column("preference")})
    values, _, _ = loss_and_gradient(simpo(2.0, 1.0), inputs)
    # Means −0.375 and −2, and −1.5 and −1.
    first, second = (-math.log(sigmoid(2 * gap - 1)) for gap in (1.625, -0.5))
    assert values == pytest.approx([first] * 3 + [second] * 2)
    values, _, _ = loss_and_gradient(orpo(0.5), inputs)

    def log_odds(mean: float) -> float:
        return mean - math.log(1 - math.exp(mean))

    first, second = (
        -good - 0.5 * math.log(sigmoid(log_odds(good) - log_odds(bad)))
        for good, bad in ((-0.375, -2.0), (-1.5, -1.0))
    )
    assert values == pytest.approx([first] * 3 + [second] * 2)


def test_robust_dpo_is_unbiased_under_its_noise() -> None:
    """Labels that are wrong one time in four give, in the mean, the loss without noise."""
    inputs = make_inputs(LOGPROBS)
    flipped = replace(
        inputs,
        columns={**inputs.columns, "preference": -inputs.column("preference")},
    )
    loss = dpo(0.5, label_smoothing=0.25, robust=True)
    mean = 0.75 * loss(inputs)[0] + 0.25 * loss(flipped)[0]
    torch.testing.assert_close(mean, dpo(0.5)(inputs)[0])


@pytest.mark.parametrize("text", PAIR_LOSSES)
@pytest.mark.parametrize(
    "lows", [(-INF,) * 5, (0.0,) * 5, (-INF, 0.0, 0.0, 0.0, -INF), (-1e30,) * 5]
)
def test_pairs_of_impossible_or_certain_tokens_are_finite(
    text: str, lows: tuple[float, ...]
) -> None:
    inputs = in_float32(make_inputs(list(lows)))
    values, gradient, metrics = loss_and_gradient(parse(text, "loss"), inputs)
    assert all(map(math.isfinite, values + gradient))
    assert all(metric.values.isfinite().all() for metric in metrics.values())


@pytest.mark.parametrize("text", PAIR_LOSSES)
def test_a_pair_whose_other_completion_is_empty_has_no_loss(text: str) -> None:
    inputs = chosen(make_inputs(LOGPROBS), torch.tensor([0, 1, 3, 4]))
    values, gradient, metrics = loss_and_gradient(parse(text, "loss"), inputs)
    assert values[:2] == gradient[:2] == [0.0, 0.0]
    assert values[2] > 0
    assert metrics["preference/incomplete_frac"].values.tolist() == [1.0, 0.0]
    assert metrics["preference/accuracy"].values.shape == (1,)


@pytest.mark.parametrize("text", PAIR_LOSSES)
def test_losses_of_pairs_say_what_they_need(text: str) -> None:
    loss = parse(text, "loss")
    assert whole_groups(loss)
    assert "preference" in needs_of(loss)


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": torch.tensor([4, 4, 4, 4, 5])},  # three rows in a group
        {"groups": torch.tensor([4, 4, 5, 4, 5])},  # two of them chosen
        {"preference": torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])},
        {"preference": torch.tensor([1.0, 1.0, 0.0, 1.0, -1.0])},
    ],
)
def test_groups_that_are_no_pairs_are_refused(changes: dict[str, Any]) -> None:
    with invalid("group_index"):
        dpo()(make_inputs(LOGPROBS, **changes))


def test_rows_without_groups_are_refused() -> None:
    with invalid("group_index", None):
        dpo()(replace(make_inputs(LOGPROBS), group_index=None))


def make_scores(scores: list[float]) -> ScoreInputs:
    rows = torch.arange(len(scores))
    return ScoreInputs(
        scores=torch.tensor(scores, dtype=torch.float64, requires_grad=True),
        group_index=9 - rows // 2,
        columns={"preference": 1.0 - 2 * (rows % 2)},
    )


def test_bradley_terry_by_hand() -> None:
    inputs = make_scores([3.0, 1.0, -1.0, 0.5])
    losses, metrics = bradley_terry()(inputs)
    first, second = -math.log(sigmoid(2.0)), -math.log(sigmoid(-1.5))
    assert losses.tolist() == pytest.approx([first, first, second, second])
    assert metrics["preference/accuracy"].values.tolist() == [0.0, 1.0]  # of groups 8 and 9
    (gradient,) = torch.autograd.grad(losses.sum() / 4, inputs.scores)  # the mean over two pairs
    expected = [-sigmoid(-2.0), sigmoid(-2.0), -sigmoid(1.5), sigmoid(1.5)]
    assert gradient.tolist() == pytest.approx([x / 2 for x in expected])
    centred, _ = bradley_terry(0.1)(inputs)
    assert centred.tolist() == pytest.approx(
        [first + 1.6, first + 1.6, second + 0.025, second + 0.025]
    )


@pytest.mark.parametrize("text", OTHERS["score_loss"])
def test_score_losses_are_sums_over_pairs_and_finite(text: str) -> None:
    loss = parse(text, "score_loss")
    assert pickle.loads(pickle.dumps(loss)) == loss
    inputs = make_scores([3.0, 1.0, -1.0, 0.5, 1e4, -1e4, -1e4, 1e4])
    losses, metrics = loss(inputs)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.scores)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    assert not any(metric.values.requires_grad for metric in metrics.values())
    for rows in (torch.tensor([1, 0, 6, 7]), torch.tensor([2, 3]), torch.tensor([4, 5])):
        part = chosen(inputs, rows)
        found = loss(part)[0]
        torch.testing.assert_close(found, losses[rows])
        (of_part,) = torch.autograd.grad(found.sum(), part.scores)
        torch.testing.assert_close(of_part, gradient[rows])
    assert loss(chosen(inputs, slice(0)))[0].shape == (0,)
    alone, _ = loss(chosen(inputs, slice(1)))
    assert alone.tolist() == [0.0]


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda: dpo(0.0), "dpo: beta", 0.0),
        (lambda: dpo(0.1, 0.5), "dpo: label_smoothing", 0.5),
        (lambda: ipo(-1.0), "ipo: beta", -1.0),
        (lambda: slic(math.inf), "slic: beta", math.inf),
        (lambda: simpo(0.0), "simpo: beta", 0.0),
        (lambda: orpo(0.0), "orpo: weight", 0.0),
        (lambda: bradley_terry(-1.0), "bradley_terry: centre", -1.0),
    ],
)
def test_impossible_constants_are_refused(make: Any, field: str, value: Any) -> None:
    with invalid(field, value):
        make()

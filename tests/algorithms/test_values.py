import math
import pickle
from dataclasses import replace

import pytest
import torch

from rlsys.algorithms.derived_metrics import derived_metrics
from rlsys.algorithms.loss_inputs import ValueInputs, ValueLossFn, needs_of
from rlsys.algorithms.values import clipped_value_loss, value_loss
from tests.algorithms.loss_inputs import chosen, in_float32, leaf
from tests.errors import invalid

LOSSES: list[ValueLossFn] = [value_loss(), clipped_value_loss(0.5)]


def make_inputs(values: list[float], old: list[float], returns: list[float]) -> ValueInputs:
    return ValueInputs(
        values=torch.tensor(values, dtype=torch.float64, requires_grad=True),
        row_index=torch.zeros(len(values), dtype=torch.int64),
        columns={
            "values": torch.tensor(old, dtype=torch.float64),
            "returns": torch.tensor(returns, dtype=torch.float64),
        },
    )


def loss_and_gradient(
    loss: ValueLossFn, inputs: ValueInputs
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    values, metrics = loss(inputs)
    (gradient,) = torch.autograd.grad(values.sum(), leaf(inputs))
    return values.tolist(), gradient.tolist(), metrics


def test_squared_error_by_hand() -> None:
    losses, gradient, _ = loss_and_gradient(value_loss(), make_inputs([2.0, 0.0], [0, 0], [1, 3]))
    assert losses == [0.5, 4.5]
    assert gradient == [1.0, -3.0]


def test_the_clipped_loss_takes_the_worse_of_clipped_and_free() -> None:
    inputs = make_inputs([2.0, 0.1, 2.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.0])
    losses, gradient, metrics = loss_and_gradient(clipped_value_loss(0.5), inputs)
    assert losses == pytest.approx([1.5**2 / 2, 0.9**2 / 2, 2.0])
    # Far enough towards its target: no gradient. Too far in the wrong direction: all of it.
    assert gradient == pytest.approx([0.0, -0.9, 2.0])
    assert metrics["value/clipped_frac"].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("loss", LOSSES)
def test_value_losses_need_returns_and_can_be_pickled(loss: ValueLossFn) -> None:
    assert "returns" in needs_of(loss)
    assert pickle.loads(pickle.dumps(loss)) == loss
    inputs = make_inputs([1.0], [1.0], [1.0])
    with invalid("columns", ["values"]):
        loss(replace(inputs, columns={"values": inputs.values}))


@pytest.mark.parametrize("loss", LOSSES)
def test_value_losses_handle_no_tokens_and_huge_values(loss: ValueLossFn) -> None:
    inputs = make_inputs([0.0, 1e15], [1e15, -1e15], [-1e15, 1e15])
    losses, gradient, metrics = loss_and_gradient(loss, in_float32(inputs))
    assert all(map(math.isfinite, losses + gradient))
    assert not any(metric.requires_grad for metric in metrics.values())
    empty, metrics = loss(chosen(inputs, slice(0)))
    assert empty.shape == (0,)
    assert all(metric.shape == (0,) for metric in metrics.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_value_losses_are_sums_over_tokens_in_either_precision(loss: ValueLossFn) -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 8, generator=generator).tolist()
    inputs = make_inputs(values, old, returns)
    losses, gradient, _ = loss_and_gradient(loss, inputs)
    parts = [loss_and_gradient(loss, chosen(inputs, torch.arange(i, 8, 3))) for i in range(3)]
    assert sorted(losses) == pytest.approx(sorted(x for part in parts for x in part[0]))
    assert sorted(gradient) == pytest.approx(sorted(x for part in parts for x in part[1]))
    single, single_gradient, _ = loss_and_gradient(loss, in_float32(inputs))
    assert single == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert single_gradient == pytest.approx(gradient, rel=1e-4, abs=1e-5)


def test_explained_variance_adds_up_over_micro_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    returns = torch.randn(100, generator=generator, dtype=torch.float64) + 3
    values = returns + 0.5 * torch.randn(100, generator=generator, dtype=torch.float64) + 7
    inputs = make_inputs(values.tolist(), [0.0] * 100, returns.tolist())
    totals: dict[str, float] = {}
    for part in torch.arange(100).split([1, 60, 39]):
        for name, metric in value_loss()(chosen(inputs, part))[1].items():
            totals[name] = totals.get(name, 0.0) + float(metric.sum())
    means = {name: total / 100 for name, total in totals.items()}
    exact = 1 - float((returns - values).var() / returns.var())
    assert derived_metrics(means) == {"value/explained_variance": pytest.approx(exact)}
    for name in means:  # a loss of one's own may tell some of them
        assert derived_metrics({name: means[name]}) == {}


def test_equal_returns_have_no_explained_variance() -> None:
    _, metrics = value_loss()(make_inputs([0.0, 1.0], [0, 0], [0.1, 0.1]))
    assert derived_metrics({name: float(m.mean()) for name, m in metrics.items()}) == {}
    assert derived_metrics({}) == {}


def test_an_impossible_clip_is_refused() -> None:
    with invalid("clipped_value_loss: clip", -0.1):
        clipped_value_loss(-0.1)

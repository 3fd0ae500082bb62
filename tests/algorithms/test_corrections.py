import math
import pickle

import pytest
import torch

from rlsys.algorithms.corrections import Correction, corrected, icepop, opsm, sequence_tis, tis
from rlsys.algorithms.losses import reinforce
from rlsys.engines.training.protocol import LossInputs


def make_inputs(ratios: list[float]) -> LossInputs:
    """Two rollouts of two tokens, a good one and a bad one; π_θ = π_prox = ratio · μ."""
    sampler = torch.full((4,), math.log(0.1))
    trainer = (sampler + torch.tensor(ratios).log()).requires_grad_()
    return LossInputs(
        trainer_logprobs=trainer,
        proximal_logprobs=trainer.detach(),
        sampler_logprobs=sampler,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        entropy=torch.zeros(4),
        staleness=torch.zeros(4, dtype=torch.int64),
        row_index=torch.tensor([0, 0, 1, 1]),
    )


@pytest.mark.parametrize(
    ("correction", "ratios", "weights"),
    [
        (tis(2.0), [0.5, 1.0, 2.0, 8.0], [0.5, 1.0, 2.0, 2.0]),
        (sequence_tis(5.0, geometric_mean=False), [2.0, 2.0, 4.0, 2.0], [4.0, 4.0, 5.0, 5.0]),
        (sequence_tis(5.0, geometric_mean=True), [4.0, 1.0, 0.25, 1.0], [2.0, 2.0, 0.5, 0.5]),
        (icepop(0.5, 5.0), [0.4, 0.6, 4.8, 6.0], [0.0, 0.6, 4.8, 0.0]),
        # mean log(μ/π) = ½ log 4 = 0.69 in both rollouts; only the bad one is dropped.
        (opsm(0.5), [0.25, 1.0, 0.25, 1.0], [1.0, 1.0, 0.0, 0.0]),
        (opsm(0.7), [0.25, 1.0, 0.25, 1.0], [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_weights_by_hand(correction: Correction, ratios: list[float], weights: list[float]) -> None:
    inputs = make_inputs(ratios)
    found, metrics = correction(inputs)
    assert found.tolist() == pytest.approx(weights, rel=1e-5)
    assert not found.requires_grad
    assert metrics
    assert all(metric.shape == (4,) for metric in metrics.values())
    assert pickle.loads(pickle.dumps(correction)) == correction


def test_a_corrected_loss_is_weighted_and_reports_both() -> None:
    inputs = make_inputs([0.4, 1.0, 2.0, 6.0])
    loss, metrics = corrected(corrected(reinforce(), icepop(0.5, 5.0)), opsm(9.0))(inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.trainer_logprobs)
    assert gradient.tolist() == pytest.approx([0.0, -1.0, 2.0, 0.0])
    assert metrics.keys() == {
        "correction/weight",
        "correction/masked_frac",
        "correction/opsm_masked_frac",
    }


def test_a_hopeless_token_is_zeroed_and_not_infinite() -> None:
    weights, _ = icepop(0.5, 5.0)(make_inputs([1e38, 1.0, 1.0, 1.0]))
    assert weights.tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0])

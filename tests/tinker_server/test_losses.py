"""The API's losses, on four tokens of two rows, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlsys.algorithms.loss_inputs import LossInputs
from rlsys.tinker_server.api_losses import loss_of
from tests.tinker_server.refusals import refused

# Ratios of 2, 1/2, 1 and 1.1 in front of log-probabilities of the sampler.
SAMPLER = [-1.0, -2.0, -1.0, -0.5]
MOVED = [math.log(2), -math.log(2), 0.0, math.log(1.1)]
ADVANTAGES = [1.0, 1.0, -2.0, -1.0]
LOGPROBS = [base + moved for base, moved in zip(SAMPLER, MOVED, strict=True)]


def computed(
    name: str, config: dict[str, float | str] | None = None
) -> tuple[list[float], list[float]]:
    """Loss of each token, and its gradient by the token's log-probability."""
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    columns = {
        "weights": ADVANTAGES,
        "sequence_ratio_mask": [1.0, 1.0, 1.0, 0.0],
        "sampled": [1.0, 1.0, 1.0, 1.0],
    }
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        proximal_logprobs=logprobs.detach(),
        sampler_logprobs=torch.tensor(SAMPLER, dtype=torch.float64),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        entropy=torch.zeros(4),
        staleness=torch.zeros(4, dtype=torch.int64),
        row_index=torch.tensor([0, 0, 1, 1]),
        columns={key: torch.tensor(value, dtype=torch.float64) for key, value in columns.items()},
    )
    losses, _ = loss_of(name, config or {})(inputs)
    losses.sum().backward()
    assert logprobs.grad is not None
    return losses.tolist(), logprobs.grad.tolist()


def test_cross_entropy_is_weighted() -> None:
    losses, gradient = computed("cross_entropy")
    expected = [-w * p for w, p in zip(ADVANTAGES, LOGPROBS, strict=True)]
    assert losses == pytest.approx(expected)
    assert gradient == pytest.approx([-1.0, -1.0, 2.0, 1.0])


def test_importance_sampling() -> None:
    losses, gradient = computed("importance_sampling")
    assert losses == pytest.approx([-2.0, -0.5, 2.0, 1.1])
    assert gradient == pytest.approx(losses)


def test_ppo_clips_where_the_advantage_goes_too_far() -> None:
    losses, gradient = computed("ppo")
    # min(2, 1.2); min(0.5, 0.8); min(-2, -2); min(-1.1, -1.1)
    assert losses == pytest.approx([-1.2, -0.5, 2.0, 1.1])
    assert gradient == pytest.approx([0.0, -0.5, 2.0, 1.1])
    losses, _ = computed("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05})
    assert losses == pytest.approx([-1.05, -0.5, 2.0, 1.1])


def test_cispo_weights_each_token_by_its_bounded_ratio() -> None:
    losses, gradient = computed("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    weights = [1.2, 0.8, 1.0, 1.1]
    products = [-w * a for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert gradient == pytest.approx(products)
    assert losses == pytest.approx([x * p for x, p in zip(products, LOGPROBS, strict=True)])
    assert computed("cispo")[1] == pytest.approx([-2.0, -0.5, 2.0, 1.1])  # bounds 0 and 4


def test_dro_pulls_back_to_the_sampler() -> None:
    losses, gradient = computed("dro", {"beta": 0.5})
    expected = [
        -(a * p - 0.25 * moved**2) for a, p, moved in zip(ADVANTAGES, LOGPROBS, MOVED, strict=True)
    ]
    assert losses == pytest.approx(expected)
    slopes = [-(a - 0.5 * moved) for a, moved in zip(ADVANTAGES, MOVED, strict=True)]
    assert gradient == pytest.approx(slopes)


def test_gspo_gives_every_token_the_ratio_of_its_row() -> None:
    losses, gradient = computed("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})
    # Row 0: log 2 and -log 2 make 1. Row 1: the mask leaves its first token, 0, alone: 1 too.
    assert losses == pytest.approx([-1.0, -1.0, 2.0, 1.0])
    assert gradient == pytest.approx([-1.0, -1.0, 2.0, 1.0])


def test_stable_reinforce_tapers_discouraged_tokens_and_pulls_back_to_the_sampler() -> None:
    losses, gradient = computed("stable_reinforce", {"kl_coeff": 0.5})
    weights = [1.0, 1.0, 1.0, 1.0]  # advantages 1, 1, -2, -1 with ratios 2, 1/2, 1, 1.1
    expected = [
        -w * a * p + 0.25 * m**2
        for w, a, p, m in zip(weights, ADVANTAGES, LOGPROBS, MOVED, strict=True)
    ]
    assert losses == pytest.approx(expected)
    slopes = [-w * a + 0.5 * m for w, a, m in zip(weights, ADVANTAGES, MOVED, strict=True)]
    assert gradient == pytest.approx(slopes)


@pytest.mark.parametrize(
    ("advantage", "moved", "expected"),
    [
        (1.0, 0.0, -1.0),  # on-policy: REINFORCE
        (-1.0, 0.0, 1.0),
        (-1.0, math.log(0.25), 0.25 - 0.01 * math.log(4)),  # min(r, 1) = 1/4; penalty 0.01 log r
        (-1.0, math.log(4), 1.0 + 0.01 * math.log(4)),
        (1.0, math.log(0.25), -1.0 - 0.01 * math.log(4)),
        (1.0, math.log(4), -1.0 + 0.01 * math.log(4)),
    ],
)
def test_stable_reinforce_by_one_token(advantage: float, moved: float, expected: float) -> None:
    logprobs = torch.tensor([-2.0 + moved], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        proximal_logprobs=logprobs.detach(),
        sampler_logprobs=torch.tensor([-2.0], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        entropy=torch.zeros(1),
        staleness=torch.zeros(1, dtype=torch.int64),
        row_index=torch.zeros(1, dtype=torch.int64),
        columns={"sampled": torch.ones(1, dtype=torch.float64)},
    )
    losses, _ = loss_of("stable_reinforce", {})(inputs)
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "config", "field"),
    [
        ("custom", {}, "loss_fn"),
        ("ppo_loss", {}, "loss_fn"),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config.beta"),
        ("dro", {"clip_low_threshold": 0.8}, "loss_fn_config.clip_low_threshold"),
        ("dro", {"beta": "much"}, "loss_fn_config.beta"),
        ("ppo", {"clip_high_threshold": math.inf}, "loss_fn_config.clip_high_threshold"),
        ("ppo", {"clip_low_threshold": 1.1}, "loss_fn_config"),
        ("cispo", {"clip_low_threshold": 5.0}, "loss_fn_config"),
        ("stable_reinforce", {"kl_coeff": -1.0}, "loss_fn_config"),
        ("dro", {"beta": -0.1}, "loss_fn_config"),
    ],
)
def test_losses_and_settings_that_do_not_exist_are_refused(
    name: str, config: dict[str, float | str], field: str
) -> None:
    with refused(field):
        loss_of(name, config)

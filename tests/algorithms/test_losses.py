import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms import kl
from rlsys.algorithms.composed import (
    corrected,
    decoupled_clipped_surrogate,
    distill,
    entropy_bonus,
    interpolate_proximal,
    kl_cov,
    m2po,
    observed,
    with_kl,
)
from rlsys.algorithms.derived_metrics import derived_metrics
from rlsys.algorithms.loss_inputs import (
    LossFn,
    LossInputs,
    MeanOver,
    needs_of,
    uses_advantages,
    whole_groups,
)
from rlsys.algorithms.losses import (
    aipo,
    cispo,
    clipped_surrogate,
    cross_entropy,
    dppo_mask,
    gmpo,
    gspo,
    reinforce,
    sapo_soft,
)
from rlsys.algorithms.masks import opsm
from rlsys.algorithms.registry import parse
from tests.algorithms.examples import LOSSES, POLICY_LOSSES
from tests.algorithms.loss_inputs import chosen, in_float32, metric_values, three_policies
from tests.errors import invalid
from tests.tiers import rest_slow


def made(texts: tuple[str, ...]) -> pytest.MarkDecorator:
    """Parametrised over losses as a command line names them."""
    return pytest.mark.parametrize("loss", [pytest.param(parse(t, "loss"), id=t) for t in texts])


def make_inputs(
    ratios: list[float],
    advantages: list[float],
    *,
    probability: float = 0.25,
    proximal_ratios: list[float] | None = None,
    rows: list[int] | None = None,
    staleness: list[int] | None = None,
) -> LossInputs:
    """Tokens that the sampler gave `probability`, and the trainer `ratios` times that."""
    num_tokens = len(ratios)
    sampler = torch.full((num_tokens,), probability).log()
    trainer = (sampler + torch.tensor(ratios).log()).requires_grad_()
    proximal = sampler + torch.tensor(proximal_ratios or ratios).log()
    return LossInputs(
        trainer_logprobs=trainer,
        proximal_logprobs=proximal,
        sampler_logprobs=sampler,
        advantages=torch.tensor(advantages),
        entropy=torch.ones(num_tokens),
        staleness=torch.tensor(staleness or [0] * num_tokens),
        row_index=torch.tensor(rows or [0] * num_tokens),
        **columns_of(rows or [0] * num_tokens, trainer.detach(), trainer.detach()),
    )


def columns_of(rows: list[int], reference: torch.Tensor, teacher: torch.Tensor) -> dict[str, Any]:
    """Rows 0 and 1 are a pair, the first chosen; so are 2 and 3."""
    row = torch.tensor(rows)
    return {
        "group_index": row // 2,
        "columns": {
            "reference_logprobs": reference,
            "teacher_logprobs": teacher,
            "importance_weights": torch.ones_like(reference),
            "preference": 1.0 - 2 * (row % 2).to(reference.dtype),
        },
    }


def loss_and_gradient(loss: LossFn, inputs: LossInputs) -> tuple[list[float], list[float]]:
    """Per-token losses, and the gradient of their sum with respect to log π_θ."""
    values, _ = loss(inputs)
    (gradient,) = torch.autograd.grad(values.sum(), inputs.trainer_logprobs)
    return values.tolist(), gradient.tolist()


# Two rollouts of two tokens: the first good, the second bad.
RATIOS, ADVANTAGES, ROWS = [1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1]


def test_cross_entropy_asks_for_no_advantage() -> None:
    inputs = make_inputs([2.0, 1.0, 0.0], [-7.0, 0.0, 1.0])
    values, gradient = loss_and_gradient(cross_entropy(), inputs)
    assert values[:2] == pytest.approx([math.log(2), math.log(4)])
    assert gradient[:2] == pytest.approx([-1.0, -1.0])
    assert math.isfinite(values[2])
    assert not uses_advantages(cross_entropy())


def test_clipped_surrogate_by_hand() -> None:
    inputs = make_inputs(RATIOS, ADVANTAGES)
    values, gradient = loss_and_gradient(clipped_surrogate(0.2, 0.28), inputs)
    assert values == pytest.approx([-1.28, -0.5, 1.5, 0.8])
    assert gradient == pytest.approx([0.0, -0.5, 1.5, 0.0])  # clipped where it moved far enough
    _, metrics = clipped_surrogate(0.2, 0.28)(inputs)
    assert metrics["ratio/clipped_frac"].tolist() == [1.0, 0.0, 0.0, 1.0]


def soft_gate(r: float) -> float:
    gate = 1 / (1 + math.exp(1 - r))
    return 4 * gate * (1 - gate) * r


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("reinforce", 1.0),
        ("clipped_surrogate(0.2, 0.6)", 1.5),
        ("clipped_surrogate(0.2, 0.4)", 0.0),
        ("clipped_surrogate(0.2, 2.5, denominator='proximal')", 3.0),
        ("clipped_surrogate(0.2, 1.5, denominator='proximal')", 0.0),
        ("gspo(0.2, 0.6)", 1.5),
        ("gspo(0.2, 2.5, 'proximal')", 3.0),
        ("gmpo(2.0)", 1.5),
        ("gmpo(2.0, 'proximal')", 3.0),
        ("sapo_soft", soft_gate(1.5)),
        ("sapo_soft(denominator='proximal')", soft_gate(3.0)),
        ("cispo", 1.5),
        ("aipo(5.0)", 1.5),
        ("m2po(0.5)", 1.5),  # (log 1.5)² = 0.16, (log 3)² = 1.2
        ("m2po(0.1)", 0.0),
        ("dppo_mask(0.06, 0.06)", 1.5),  # π_θ − μ = 0.05, π_θ − π_prox = 0.1
        ("dppo_mask(0.04, 0.04)", 0.0),
        ("decoupled_clipped_surrogate(0.2, 2.5, 2.0)", 0.5 * 3),
        ("decoupled_clipped_surrogate(0.2, 2.5, 0.4)", 0.4 * 3),
        # log π_prox halfway from log μ to log π_θ, at a staleness of 2.
        ("interpolate_proximal(clipped_surrogate(0.2, 2.5, denominator='proximal'))", 1.5**0.5),
        ("corrected(reinforce, tis)", 0.5),
        ("kl_cov(reinforce, 0.5, 0.25)", 1 - 0.25 * (3 - 1)),  # KL's gradient is u − 1
        ("distill(cispo)", 1.5 * math.log(2)),
    ],
)
def test_the_ratio_is_of_the_two_policies_that_a_loss_names(text: str, weight: float) -> None:
    """π_prox = ½μ and π_θ = 1½μ, so u = 3: the gradient is −weight · A."""
    inputs = three_policies(
        [0.5],
        [1.5],
        [0],
        advantages=torch.ones(1),
        entropy=torch.full((1,), 3.0),
        staleness=torch.tensor([2]),
        columns={"teacher_logprobs": torch.tensor([math.log(0.3)])},
    )
    _, gradient = loss_and_gradient(parse(text, "loss"), inputs)
    assert gradient == pytest.approx([-weight], rel=1e-5)


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone() -> None:
    inputs = make_inputs([4.0, 4.0, 2.0, 1.0], [1.0, -1.0, -1.0, -1.0])
    values, gradient = loss_and_gradient(clipped_surrogate(0.2, 0.2, dual_clip=3.0), inputs)
    assert values == pytest.approx([-1.2, 3.0, 2.0, 1.0])
    assert gradient == pytest.approx([0.0, 0.0, 2.0, 1.0])


def test_decoupled_surrogate_clips_around_the_proximal_policy_and_truncates_its_weight() -> None:
    inputs = make_inputs([3.0, 3.0, 0.9, 1.0], ADVANTAGES, proximal_ratios=[1.5, 3.0, 1.5, 1.0])
    # u = 2, 1, 0.6, 1; w = 1.5, 3 → 2, 1.5, 1.
    loss = decoupled_clipped_surrogate(0.2, 0.2, max_weight=2.0)
    values, gradient = loss_and_gradient(loss, inputs)
    assert values == pytest.approx([-1.5 * 1.2, -2.0, 1.5 * 0.8, 1.0])
    assert gradient == pytest.approx([0.0, -2.0, 0.0, 1.0])


def test_interpolated_proximal_policy_moves_to_the_trainer_with_age() -> None:
    seen: list[torch.Tensor] = []

    def spy(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(inputs.proximal_logprobs)
        return inputs.trainer_logprobs, {}

    inputs = make_inputs([4.0] * 4, ADVANTAGES, staleness=[0, 1, 2, 4])
    interpolate_proximal(spy)(inputs)
    # log π_prox = log μ + (1 − α) log 4 with α = 0, 1, 1/2, 1/4.
    expected = inputs.sampler_logprobs + math.log(4) * torch.tensor([1.0, 0.0, 0.5, 0.75])
    torch.testing.assert_close(seen[0], expected)
    assert not seen[0].requires_grad


def test_gspo_gives_every_token_the_ratio_of_its_rollout() -> None:
    inputs = make_inputs([2.0, 0.5, 4.0, 1.0], ADVANTAGES, rows=ROWS)
    values, gradient = loss_and_gradient(gspo(0.2, 0.2), inputs)
    # s = √(2·½) = 1 and √(4·1) = 2; a bad rollout that became likelier is never clipped.
    assert values == pytest.approx([-1.0, -1.0, 2.0, 2.0])
    # Each token of a rollout gets the mean gradient of the rollout's two equal terms.
    assert gradient == pytest.approx([-1.0, -1.0, 2.0, 2.0])
    clipped, no_gradient = loss_and_gradient(gspo(3e-4, 4e-4), make_inputs([2.0, 2.0], [1.0, 1.0]))
    assert clipped == pytest.approx([-1.0004, -1.0004])
    assert no_gradient == [0.0, 0.0]


@pytest.mark.parametrize("loss", [cispo(1.2), aipo(1.2)])
def test_truncated_importance_keeps_every_gradient(loss: LossFn) -> None:
    values, gradient = loss_and_gradient(loss, make_inputs(RATIOS, ADVANTAGES))
    assert gradient == pytest.approx([-1.2, -0.5, 1.2, 0.5])
    assert values[0] == pytest.approx(-1.2 * math.log(1.5 * 0.25))


def test_cispo_may_have_a_lower_bound() -> None:
    inputs = make_inputs([0.1, 0.5, 3.0, 9.0], ADVANTAGES)
    _, gradient = loss_and_gradient(cispo(4.0, 0.25), inputs)
    assert gradient == pytest.approx([-0.25, -0.5, 3.0, 4.0])
    assert cispo(4.0, 0.25)(inputs)[1]["ratio/clipped_frac"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_gmpo_takes_the_geometric_mean_of_ratios_clipped_one_by_one() -> None:
    inputs = make_inputs([4.0, 1.0, 4.0, 0.25], ADVANTAGES, rows=ROWS)
    values, gradient = loss_and_gradient(gmpo(math.log(2)), inputs)
    # Good: 4 is cut to 2, so s = √2. Bad: 1/4 is cut to 1/2, 4 is not, so s = √2 too.
    assert values == pytest.approx([-(2**0.5), -(2**0.5), 2**0.5, 2**0.5])
    assert gradient == pytest.approx([0.0, -(2**0.5), 2**0.5, 0.0])


def test_m2po_leaves_the_outliers_out_and_does_not_clip_the_rest() -> None:
    inputs = make_inputs([math.exp(0.19), math.exp(0.3), 1.0, 9.0], ADVANTAGES, rows=ROWS)
    # (log ρ)² = 0.036, 0.09 with means 0.036, 0.063; and 0, 4.8.
    _, gradient = loss_and_gradient(m2po(0.04), inputs)
    assert gradient == pytest.approx([-math.exp(0.19), 0.0, 1.0, 0.0])


def test_distillation_takes_its_advantage_from_the_teacher() -> None:
    inputs = make_inputs([1.0, 2.0], [7.0, 7.0])
    teacher = inputs.trainer_logprobs.detach() + torch.tensor([0.5, -1.0])
    inputs = replace(inputs, columns={"teacher_logprobs": teacher})
    _, gradient = loss_and_gradient(distill(cispo()), inputs)
    assert gradient == pytest.approx([-0.5, 2.0])
    assert distill(cispo())(inputs)[1]["kl/teacher"].tolist() == pytest.approx([-0.5, 1.0])
    assert not uses_advantages(distill(cispo()))
    assert needs_of(distill(cispo())) == ("teacher_logprobs",)


def test_kl_cov_holds_the_tokens_that_lower_the_entropy() -> None:
    # log π + H = log(0.5) + 1 = 0.31, times A: 3.1 and 0.31.
    inputs = make_inputs([1.0, 1.0], [10.0, 1.0], probability=0.5, proximal_ratios=[2.0, 2.0])
    values, gradient = loss_and_gradient(kl_cov(reinforce(), 1.0, coefficient=0.5), inputs)
    free, free_gradient = loss_and_gradient(reinforce(), inputs)
    # KL(π_prox ‖ π_θ) with log π_prox − log π_θ = log 2: ½ − 1 + log 2; its gradient ½ − 1.
    assert values == pytest.approx([free[0] + 0.5 * (math.log(2) - 0.5), free[1]])
    assert gradient == pytest.approx([free_gradient[0] - 0.25, free_gradient[1]])


def test_what_is_off_policy_is_told() -> None:
    inputs = make_inputs(
        [1.0, 4.0, 1.0], [1.0] * 3, proximal_ratios=[0.5, 2.0, 2.0], rows=[0, 0, 1]
    )
    metrics = observed(cispo())(inputs)[1]
    log2 = math.log(2)
    assert metrics["offpolicy/kl"].tolist() == pytest.approx([log2, -log2, -log2])
    assert metrics["offpolicy/k3"].tolist() == pytest.approx([log2 - 0.5, 1 - log2, 1 - log2])
    assert metrics["offpolicy/chi_squared"].tolist() == pytest.approx([-0.75, 3.0, 3.0])
    assert metrics["offpolicy/perplexity_ratio"].tolist() == pytest.approx([1.0, 1.0, 0.5])
    means = {name: float(metric.mean()) for name, metric in metrics.items()}
    found = derived_metrics(means)["offpolicy/effective_sample_frac"]
    assert found == pytest.approx(4.5**2 / 3 / (0.25 + 4 + 4))


def test_soft_gate_by_hand() -> None:
    inputs = make_inputs([1.0, 3.0, 1.0, 3.0], ADVANTAGES)
    values, gradient = loss_and_gradient(sapo_soft(1.0, 2.0), inputs)
    gate = 1 / (1 + math.exp(-2))
    steep = 1 / (1 + math.exp(-4))
    assert values == pytest.approx([-4 * 0.5, -4 * gate, 2 * 0.5, 2 * steep])
    # d/dlog π = ρ · 4σ(1 − σ) · A: as policy gradient at ρ = 1, faded at ρ = 3.
    expected = [-1.0, -3 * 4 * gate * (1 - gate), 1.0, 3 * 4 * steep * (1 - steep)]
    assert gradient == pytest.approx(expected, rel=1e-5)


def test_dppo_drops_by_difference_of_probabilities() -> None:
    frequent = make_inputs(RATIOS, ADVANTAGES, probability=0.5)
    values, gradient = loss_and_gradient(dppo_mask(0.2, 0.2), frequent)
    assert gradient == pytest.approx([0.0, -0.5, 1.5, 0.0])
    assert values == pytest.approx([0, -0.5 * math.log(0.25), 1.5 * math.log(0.75), 0])
    rare = make_inputs([9.0, 0.1], [1.0, -1.0], probability=0.01)
    assert loss_and_gradient(dppo_mask(0.2, 0.2), rare)[1] == pytest.approx([-9.0, 0.1])


def test_dppo_truncates_the_ratio_of_a_rare_token() -> None:
    rare = make_inputs([1e5, 1e5], [1.0, -1.0], probability=1e-6)  # moved by 0.1 alone: not masked
    assert loss_and_gradient(dppo_mask(0.2, 0.2), rare)[1] == pytest.approx([-20.0, 20.0])
    capped = dppo_mask(0.2, 0.2, max_ratio=3.0)
    assert loss_and_gradient(capped, rare)[1] == pytest.approx([-3.0, 3.0])


def test_entropy_bonus_lowers_the_loss() -> None:
    inputs = make_inputs([1.0], [0.0])
    assert loss_and_gradient(entropy_bonus(reinforce(), 0.5), inputs)[0] == pytest.approx([-0.5])


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [2.0, 0.0], [1.0, 1.0]),
        ("k2", [2.0, 0.0], [2.0, 0.0]),
        ("k3", [math.exp(-2) + 1, 0.0], [1 - math.exp(-2), 0.0]),
        # ρ = 1/2, 1, and its own gradient besides.
        ("unbiased_k3", [0.5 * (math.exp(-2) + 1), 0.0], [1.0, 0.0]),
    ],
)
def test_divergence_from_the_reference_is_added(
    estimator: kl.Estimator, values: list[float], gradients: list[float]
) -> None:
    inputs = make_inputs([0.5, 1.0], [0.0, 0.0])
    reference = inputs.trainer_logprobs.detach() - torch.tensor([2.0, 0.0])
    inputs = replace(inputs, columns={"reference_logprobs": reference})
    loss = with_kl(reinforce(), estimator, 0.5)
    found, gradient = loss_and_gradient(loss, inputs)
    assert found == pytest.approx([0.5 * value for value in values])
    assert gradient == pytest.approx([0.5 * value for value in gradients])
    assert loss(inputs)[1]["kl/reference"].tolist() == pytest.approx(values)


def test_a_loss_needs_what_its_parts_need() -> None:
    loss = entropy_bonus(corrected(with_kl(with_kl(cispo(5.0), "k2", 0.1), "k3", 0.1), opsm(1)), 0)
    assert needs_of(loss) == ("reference_logprobs",)
    assert needs_of(cispo(5.0)) == ()
    assert uses_advantages(loss)
    assert not whole_groups(loss)
    assert loss.denominator == "sampler"
    with invalid("columns", []):
        loss(replace(make_inputs([1.0], [1.0]), columns={}))


@made(POLICY_LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(loss: LossFn) -> None:
    inputs = make_inputs([1.0] * 4, [2.0, 2.0, -0.5, -0.5], rows=ROWS)
    assert loss_and_gradient(loss, inputs)[1] == pytest.approx([-2.0, -2.0, 0.5, 0.5])


@made(POLICY_LOSSES)
def test_no_advantage_no_gradient(loss: LossFn) -> None:
    inputs = make_inputs(RATIOS, [0.0] * 4, rows=ROWS)
    assert loss_and_gradient(loss, inputs)[1] == pytest.approx([0.0] * 4)


@made(LOSSES)
@given(log_ratios=st.lists(st.floats(-90, 90), min_size=2, max_size=6))
def test_losses_and_gradients_stay_finite(loss: LossFn, log_ratios: list[float]) -> None:
    num_tokens = len(log_ratios)
    inputs = make_inputs(
        [1.0] * num_tokens, [1.0, -1.0] * (num_tokens // 2) + [1.0] * (num_tokens % 2)
    )
    moved = (inputs.sampler_logprobs + torch.tensor(log_ratios)).requires_grad_()
    inputs = replace(inputs, trainer_logprobs=moved, proximal_logprobs=moved.detach())
    values, gradient = loss_and_gradient(loss, inputs)
    assert all(map(math.isfinite, values + gradient))


INF = math.inf


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "triple",  # log-probabilities of one token by μ, π_prox and π_θ
    rest_slow(
        map(
            pytest.param,
            [
                (-1.0, -INF, -INF),
                (-INF, -1.0, -1.0),
                (-INF, -INF, -INF),
                (-1.0, -1.0, -INF),
                (-1.0, -INF, -1.0),
                (-70.0, -1.0, -1.0),  # ratio 1e30
                (-1.0, -70.0, -70.0),
                (0.0, 0.0, 0.0),
            ],
        ),
        first=3,
    ),
)
@made(LOSSES)
def test_excluded_tokens_leave_everything_finite(
    loss: LossFn, triple: tuple[float, float, float], advantage: float
) -> None:
    """As the only token of its rollout, and beside an ordinary one that keeps its gradient."""
    for rows in ([0, 1], [0, 0]):
        inputs = make_inputs([1.0, 1.0], [advantage, 1.0], rows=rows, staleness=[2, 0])
        sampler, proximal, trainer = (torch.tensor([x, -0.5]) for x in triple)
        inputs = replace(
            inputs,
            sampler_logprobs=sampler,
            proximal_logprobs=proximal,
            trainer_logprobs=trainer.requires_grad_(),
            **columns_of(rows, sampler, proximal),
        )
        values, gradient = loss_and_gradient(loss, inputs)
        assert all(map(math.isfinite, values + gradient))
        found = map(metric_values, loss(inputs)[1].values())
        assert all(values.isfinite().all() for values in found)
        if triple[2] == -INF:
            assert gradient[0] == 0
        if rows == [0, 1] and uses_advantages(loss):
            assert gradient[1] == pytest.approx(-1.0)
    values, gradient = loss_and_gradient(loss, chosen(inputs, slice(1)))
    assert all(map(math.isfinite, values + gradient))


def random_inputs(seed: int) -> LossInputs:
    """Six rollouts, three pairs, of 3, 1, 2, 2, 4 and 1 tokens; three policies and a reference."""
    generator = torch.Generator().manual_seed(seed)
    rows = [0, 0, 0, 1, 2, 2, 3, 3, 4, 4, 4, 4, 5]

    def around(mean: float, spread: float) -> torch.Tensor:
        return mean + spread * torch.randn(13, generator=generator, dtype=torch.float64)

    sampler = around(-2.0, 0.1)
    proximal = sampler + around(0.0, 0.3)
    columns = columns_of(rows, sampler + around(0.0, 0.3), sampler + around(0.0, 0.3))
    columns["columns"]["importance_weights"] = around(1.0, 0.2)
    return LossInputs(
        trainer_logprobs=(proximal + around(0.0, 0.3)).requires_grad_(),
        proximal_logprobs=proximal,
        sampler_logprobs=sampler,
        advantages=around(0.0, 1.0),
        entropy=around(1.0, 0.5),
        staleness=torch.arange(13) % 4,
        row_index=torch.tensor(rows),
        **columns,
    )


@made(LOSSES)
@pytest.mark.parametrize("seed", rest_slow(range(3)))
def test_gradients_are_those_of_float64(loss: LossFn, seed: int) -> None:
    double = random_inputs(seed)
    for found, exact in zip(
        loss_and_gradient(loss, in_float32(double)), loss_and_gradient(loss, double), strict=True
    ):
        assert found == pytest.approx(exact, rel=1e-4, abs=1e-5)


@made(LOSSES)
@pytest.mark.parametrize("parts", [[[4, 5], [0, 1, 2, 3]], [[2, 3], [1, 0], [5, 4]]])
def test_micro_batches_and_their_order_change_nothing(loss: LossFn, parts: list[list[int]]) -> None:
    """Whole groups, as a loss of pairs asks for; rows are numbered anew in every pass."""
    inputs = random_inputs(7)
    values, gradient = loss_and_gradient(loss, inputs)
    metrics = loss(inputs)[1]
    of_parts: dict[str, list[float]] = {name: [] for name in metrics}
    for rows in parts:
        tokens = torch.cat([(inputs.row_index == row).nonzero()[:, 0] for row in rows])
        part = chosen(inputs, tokens)
        numbers = torch.tensor([rows.index(int(row)) for row in part.row_index])
        part = replace(part, row_index=numbers)
        found, part_gradient = loss_and_gradient(loss, part)
        assert found == pytest.approx([values[i] for i in tokens])
        assert part_gradient == pytest.approx([gradient[i] for i in tokens])
        for name, metric in loss(part)[1].items():
            of_parts[name] += metric_values(metric).tolist()
            if not isinstance(metric, MeanOver):
                assert metric.tolist() == pytest.approx(metrics[name][tokens].tolist())
    for name, metric in metrics.items():
        assert sorted(of_parts[name]) == pytest.approx(sorted(metric_values(metric).tolist()))


@made(LOSSES)
def test_losses_take_no_tokens_and_travel(loss: LossFn) -> None:
    inputs = make_inputs(RATIOS, ADVANTAGES, rows=ROWS)
    values, metrics = loss(chosen(inputs, slice(0)))
    assert values.shape == (0,)
    assert all(metric_values(metric).shape == (0,) for metric in metrics.values())
    assert pickle.loads(pickle.dumps(loss)) == loss


@made(LOSSES)
def test_metrics_carry_no_gradient(loss: LossFn) -> None:
    _, metrics = loss(make_inputs(RATIOS, ADVANTAGES, rows=ROWS))
    assert all(not metric_values(metric).requires_grad for metric in metrics.values())


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda: clipped_surrogate(0.0, 0.2), "clipped_surrogate: clip_low", 0.0),
        (lambda: clipped_surrogate(0.2, -0.2), "clipped_surrogate: clip_high", -0.2),
        (lambda: clipped_surrogate(0.2, 0.2, dual_clip=0.5), "clipped_surrogate: dual_clip", 0.5),
        (lambda: decoupled_clipped_surrogate(0.2, 0.2, 0), "tis: cap", 0),
        (lambda: gspo(2.0, 0.2), "gspo: clip_low", 2.0),
        (lambda: cispo(0.0), "cispo: max_ratio", 0.0),
        (lambda: cispo(1.0, 2.0), "cispo: min_ratio", 2.0),
        (lambda: gmpo(0.0), "gmpo: log_clip", 0.0),
        (lambda: m2po(0.0), "second_moment: max_mean", 0.0),
        (lambda: kl_cov(reinforce(), 1.0, -1.0), "kl_cov: coefficient", -1.0),
        (lambda: aipo(-1.0), "aipo: max_ratio", -1.0),
        (lambda: sapo_soft(0.0, 1.0), "sapo_soft: temperature_positive", 0.0),
        (lambda: dppo_mask(0.2, 1.5), "dppo_mask: max_fall", 1.5),
        (lambda: dppo_mask(0.2, 0.2, 0.0), "dppo_mask: max_ratio", 0.0),
        (lambda: with_kl(reinforce(), "k4", 0.1), "with_kl: estimator", "k4"),  # type: ignore[arg-type]
        (lambda: with_kl(reinforce(), "k3", -0.1), "with_kl: coefficient", -0.1),
        (lambda: entropy_bonus(reinforce(), math.inf), "entropy_bonus: coefficient", math.inf),
        (
            lambda: clipped_surrogate(0.2, 0.2, denominator="ref"),  # type: ignore[arg-type]
            "clipped_surrogate: denominator",
            "ref",
        ),
    ],
)
def test_impossible_constants_are_refused(
    make: Callable[[], LossFn], field: str, value: Any
) -> None:
    with invalid(field, value):
        make()

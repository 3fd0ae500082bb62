from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from rlsys.config import TrainerConfig
from rlsys.engines.training import optimizer as optimizer_module
from rlsys.engines.training.optimizer import (
    MOMENTS,
    AdamW,
    _rounded,
    build_adamw,
    learning_rate,
    scale_gradients,
    squared_norm,
)
from rlsys.reallocation.shards import Box


def rates(config: TrainerConfig, num_steps: int) -> list[float]:
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_schedules_by_hand() -> None:
    def config(**options: object) -> TrainerConfig:
        return TrainerConfig(learning_rate=1.0, warmup_steps=1, final_lr_frac=0.2, **options)  # type: ignore[arg-type]

    assert rates(config(), 4) == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert rates(config(schedule="linear"), 6) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(config(schedule="cosine"), 4) == pytest.approx([0.5, 1.0, 0.6, 0.2])
    stable_then_down = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates(config(schedule="wsd", decay_frac=0.4), 10) == pytest.approx(stable_then_down)
    assert rates(config(schedule="wsd", decay_frac=1.0), 6) == pytest.approx(
        rates(config(schedule="linear"), 6)
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_rate_depends_on_the_step_alone(schedule: Any) -> None:
    """A resumed run continues its schedule exactly, and no rate is above the peak."""
    config = TrainerConfig(learning_rate=1.0, warmup_steps=3, schedule=schedule)
    every = rates(config, 20)
    assert [learning_rate(config, step, 20) for step in range(7, 20)] == every[7:]
    assert max(every) == 1.0
    assert min(every) > 0


def test_a_run_of_only_warm_up_or_beyond_its_end_has_a_rate() -> None:
    config = TrainerConfig(learning_rate=1.0, warmup_steps=9, schedule="cosine")
    assert rates(config, 3) == pytest.approx([0.1, 0.2, 0.3])
    assert learning_rate(config, 50, 20) == pytest.approx(0.1)


def test_weight_decay_applies_to_matrices_only() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = build_adamw(
        {"matrix": matrix, "vector": vector}, TrainerConfig(learning_rate=0.5, weight_decay=0.2)
    )
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert matrix.tolist() == [[pytest.approx(0.9)] * 2] * 2
    assert vector.tolist() == [1.0, 1.0]


def test_gradients_are_measured_and_scaled_together() -> None:
    parameters = [
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(1)),
        nn.Parameter(torch.zeros(1)),
    ]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(squared_norm(parameters)) == 25
    scale_gradients(parameters, 0.5)
    assert float(squared_norm(parameters)) == 6.25
    assert parameters[2].grad is None
    assert float(squared_norm([])) == 0


def rounded(value: float, count: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    return _rounded(torch.full((count,), value), chance).double()


@pytest.mark.parametrize("sign", [1, -1])
def test_stochastic_rounding_is_right_on_average(sign: int) -> None:
    """Round a number a quarter of the way between 1 and 1 + 1/128, its neighbours in bfloat16."""
    found = rounded(sign * (1 + 1 / 512), 100_000)
    assert set(found.tolist()) == {sign * 1.0, sign * (1 + 1 / 128)}
    assert float(found.mean()) == pytest.approx(sign * (1 + 1 / 512), abs=1e-4)
    for exact in (0.0, sign * 1.5, sign * 2.0**-130):
        assert rounded(exact, 1000).tolist() == [exact] * 1000


def test_small_changes_of_a_16_bit_moment_add_up() -> None:
    """Expect the mean of squares of a constant gradient, 1 − 0.999^n.

    Rounding to nearest would stop below 0.3, where a step adds less than half of the distance
    between two numbers.
    """
    vector = nn.Parameter(torch.zeros(2000))
    options = {"optimizer_state": "bfloat16", "adam_betas": (0.9, 0.999)}
    optimizer = build_adamw({"vector": vector}, TrainerConfig(learning_rate=1e-6, **options))  # type: ignore[arg-type]
    vector.grad = torch.ones(2000)
    for _ in range(1000):
        optimizer.step()
    moments = optimizer.moments(vector)
    assert moments["exp_avg_sq"].dtype == torch.bfloat16
    assert float(moments["exp_avg_sq"].float().mean()) == pytest.approx(1 - 0.999**1000, rel=0.01)
    assert float(moments["exp_avg"].float().mean()) == pytest.approx(1, rel=0.01)


SIDE = 256  # 2^16 elements
NUM_STEPS, BETAS = 4, TrainerConfig().adam_betas


def moments_after(
    names: Sequence[str],
    *,
    device: str = "cpu",
    shape: Sequence[int] = (SIDE, SIDE),
) -> dict[str, torch.Tensor]:
    """Return both moments of parameters with equal gradients, by name of the parameter."""
    parameters = {name: nn.Parameter(torch.zeros(*shape, device=device)) for name in names}
    optimizer = build_adamw(parameters, TrainerConfig(optimizer_state="bfloat16"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        gradient = torch.randn(*shape, generator=generator)
        for parameter in parameters.values():
            parameter.grad = gradient.to(device)
        optimizer.step()
    return {
        name: torch.stack([optimizer.moments(one)[key].float() for key in MOMENTS]).cpu()
        for name, one in parameters.items()
    }


def exact_moments() -> torch.Tensor:
    """Return what `moments_after` would return with float32 moments, [2, SIDE, SIDE]."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.zeros(2, SIDE, SIDE)
    for _ in range(NUM_STEPS):
        gradient = torch.randn(SIDE, SIDE, generator=generator)
        exact[0].lerp_(gradient, 1 - BETAS[0])
        exact[1].lerp_(gradient**2, 1 - BETAS[1])
    return exact


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the correlation of two tensors, over all elements."""
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


def assert_rounded_independently(device: str) -> None:
    """Compare the errors of two parameters of one shape with those of float32 moments."""
    rounded = moments_after(["a", "b"], device=device)
    errors = [rounded[name] - exact_moments() for name in ("a", "b")]
    for moment in range(2):
        assert errors[0][moment].abs().max() > 0
        assert abs(correlation(errors[0][moment], errors[1][moment])) < 0.05
    assert abs(correlation(errors[0][0], errors[0][1])) < 0.05


def test_parameters_of_one_shape_are_rounded_independently() -> None:
    assert_rounded_independently("cpu")


def test_the_kernel_of_gpus_rounds_parameters_of_one_shape_independently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdamW, "_update_on_cpu", AdamW._update_on_gpu)
    assert_rounded_independently("cpu")


@pytest.mark.gpu
def test_parameters_of_one_shape_are_rounded_independently_on_a_gpu() -> None:
    assert_rounded_independently("cuda")


def test_copies_of_the_same_weights_stay_the_same() -> None:
    """Another rank has the same parameter among others."""
    names = ["norm", "first", "second"]
    ours, theirs = moments_after(names, shape=(9,)), moments_after(["norm", "third"], shape=(9,))
    assert torch.equal(ours["norm"], theirs["norm"])
    assert ours["norm"].abs().sum() > 0
    assert not torch.equal(ours["norm"], ours["first"])


def test_copies_of_a_shard_are_rounded_alike_and_other_shards_independently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use dp2x2: two copies of two shards, with equal gradients, so that only rounding differs."""
    moments = []
    for start in (0, SIDE, 0, SIDE):  # ranks 0 .. 3
        box = Box(((start, start + SIDE), (0, SIDE)))
        monkeypatch.setattr(optimizer_module, "local_box", lambda _, box=box: box)
        moments.append(moments_after(["weight"])["weight"])
    assert torch.equal(moments[0], moments[2])
    assert torch.equal(moments[1], moments[3])
    exact = exact_moments()
    assert abs(correlation(moments[0] - exact, moments[1] - exact)) < 0.05


def fitted(**options: object) -> tuple[torch.Tensor, float]:
    """Return weights and loss of a noisy linear regression after 300 steps of 32 examples."""
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(16, 4, generator=generator)
    weight, bias = nn.Parameter(torch.zeros(16, 4)), nn.Parameter(torch.zeros(4))
    config = TrainerConfig(learning_rate=0.02, weight_decay=0.01, **options)  # type: ignore[arg-type]
    optimizer = build_adamw({"weight": weight, "bias": bias}, config)
    losses = []
    for _ in range(300):
        x = torch.randn(32, 16, generator=generator)
        noise = 0.1 * torch.randn(32, 4, generator=generator)
        loss = (x @ weight + bias - x @ true - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return weight.detach(), sum(losses[-50:]) / 50


def test_16_bit_moments_converge_as_32_bit_ones_do() -> None:
    (weight, loss), (other, other_loss) = fitted(), fitted(optimizer_state="bfloat16")
    assert loss < 0.02  # of which noise is 0.01
    assert other_loss == pytest.approx(loss, rel=0.05)
    assert float((weight - other).norm() / weight.norm()) < 0.01
    assert not torch.equal(weight, other)
    assert torch.equal(other, fitted(optimizer_state="bfloat16")[0])


def test_an_update_piece_by_piece_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for the last bit of what a vector instruction does not reach."""
    expected = fitted()
    build = optimizer_module.AdamW.__init__

    def by_pieces(self: AdamW, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        self._by_pieces = True  # as for offloaded moments

    monkeypatch.setattr(optimizer_module, "PIECE", 20)  # five rows of the matrix
    monkeypatch.setattr(optimizer_module.AdamW, "__init__", by_pieces)
    torch.testing.assert_close(fitted()[0], expected[0], rtol=1e-4, atol=1e-5)


def test_on_the_cpu_offloading_changes_nothing() -> None:
    assert torch.equal(fitted(optimizer_state="cpu_float32")[0], fitted()[0])

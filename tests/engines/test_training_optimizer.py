import pytest
import torch
from torch import nn

from rlsys.config import TrainerConfig
from rlsys.engines.training.optimizer import (
    build_adamw,
    learning_rate,
    scale_gradients,
    squared_norm,
)


def rates(config: TrainerConfig, num_steps: int) -> list[float]:
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_schedules_by_hand() -> None:
    def config(**options: object) -> TrainerConfig:
        return TrainerConfig(learning_rate=1.0, warmup_steps=1, final_lr_frac=0.2, **options)  # type: ignore[arg-type]

    assert rates(config(), 4) == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert rates(config(schedule="linear"), 6) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(config(schedule="cosine"), 4) == pytest.approx([0.5, 1.0, 0.6, 0.2])


def test_a_run_that_is_all_warm_up_or_goes_on_longer_keeps_a_rate() -> None:
    config = TrainerConfig(learning_rate=1.0, warmup_steps=9, schedule="cosine")
    assert rates(config, 3) == pytest.approx([0.1, 0.2, 0.3])
    assert learning_rate(config, 50, 20) == pytest.approx(0.1)


def test_weight_decay_pulls_at_matrices_alone() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = build_adamw([matrix, vector], TrainerConfig(learning_rate=0.5, weight_decay=0.2))
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

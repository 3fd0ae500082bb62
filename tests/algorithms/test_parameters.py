"""Constants of losses, corrections and advantages are checked when these are created."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlsys import algorithms as alg
from rlsys.algorithms.registry import REGISTRY, RegistryEntry
from tests.errors import invalid


async def later(inputs: Any) -> Any:
    return inputs


def without_inputs() -> Any:
    return None


CASES: list[tuple[Callable[..., Any], tuple[Any, ...], str, Any]] = [
    (alg.clipped_surrogate, ("a", 0.2), "clip_low", "a"),
    (alg.clipped_surrogate, (True, 0.2), "clip_low", True),
    (alg.tis, ("a",), "cap", "a"),
    (alg.cispo, (None,), "max_ratio", None),
    (alg.sapo_soft, (math.inf,), "temperature_positive", math.inf),
    (alg.pass_at_k_advantage, (1.5,), "k", 1.5),
    (alg.pass_at_k_advantage, ("a",), "k", "a"),
    (alg.constant_length, (2.5,), "length", 2.5),
    (alg.adaptive_kl, (0.1, "6"), "target", "6"),
    (alg.entropy_bonus, (3, 0.1), "loss", 3),
    (alg.with_kl, ("cispo", "k3", 0.1), "loss", "cispo"),
    (alg.with_kl, (alg.cispo(), 0.1, "k3"), "coefficient", "k3"),
    (alg.observed, (None,), "loss", None),
    (alg.corrected, (alg.cispo(), alg.cispo()), "correction", alg.cispo()),
    (alg.corrected, (alg.reinforce, alg.tis()), "loss", alg.reinforce),
    (alg.with_kl, (later, "k3", 0.1), "loss", later),
    (alg.dynamic_sampling, (later,), "advantage", later),
    (alg.with_kl, (without_inputs, "k3", 0.1), "loss", without_inputs),
    (alg.dynamic_sampling, (3,), "advantage", 3),
    (alg.icepop, (2, 5), "(low, high)", (2, 5)),
    (alg.sequence_icepop, (0.1, 0.5), "(low, high)", (0.1, 0.5)),
    (alg.distill, (alg.cross_entropy(),), "loss", alg.cross_entropy()),
    (alg.distill, (alg.dpo(),), "loss", alg.dpo()),
]


@pytest.mark.parametrize(("make", "arguments", "name", "value"), CASES)
def test_a_wrong_parameter_is_refused_by_name(
    make: Callable[..., Any], arguments: tuple[Any, ...], name: str, value: Any
) -> None:
    with invalid(f"{make.__name__}: {name}", value):
        make(*arguments)


MADE = [entry for entry in REGISTRY.values() if isinstance(entry.target, type)]
GOOD: dict[str, Any] = {
    "LossFn": alg.clipped_surrogate(denominator="proximal"),
    "Correction": alg.opsm(0.5),
    "GroupAdvantage": alg.grpo_advantage,
    "float": 1.0,
    "int": 4,
    "Estimator": "k3",
    "By": "k1",
}


@pytest.mark.parametrize("entry", MADE, ids=lambda entry: entry.name)
def test_every_class_refuses_nan_and_can_be_pickled(entry: RegistryEntry) -> None:
    required = {
        name: GOOD[parameter.annotation]
        for name, parameter in entry.constants.items()
        if parameter.default is parameter.empty
    }
    assert pickle.loads(pickle.dumps(entry.target(**required))) == entry.target(**required)
    for name, parameter in entry.constants.items():
        if parameter.annotation in ("float", "int", "float | None"):
            with invalid(f"{entry.name}: {name}"):
                entry.target(**required | {name: math.nan})


def test_numpy_numbers_and_infinite_bounds_are_accepted() -> None:
    float32: Any = np.float32(2.0)
    int64: Any = np.int64(2)
    assert alg.cispo(math.inf).max_ratio == math.inf
    assert alg.tis(float32).cap == 2
    assert alg.pass_at_k_advantage(int64).min_group_size == 3

"""What losses, corrections and advantages are made of is checked when they are made."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlsys import algorithms as alg
from rlsys.algorithms.registry import REGISTRY, RegistryEntry


async def later(given: Any) -> Any:
    return given


CASES: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (alg.clipped_surrogate, ("a", 0.2), r"clipped_surrogate: clip_low='a' is no number; give one"),
    (alg.clipped_surrogate, (True, 0.2), "clip_low=True is no number"),
    (alg.clipped_surrogate, (0.2, 0.2, math.nan), "dual_clip=nan is no number"),
    (alg.tis, ("a",), "tis: cap='a' is no number"),
    (alg.cispo, (None,), "cispo: max_ratio=None is no number"),
    (alg.sapo_soft, (math.nan,), "temperature_positive=nan is no number"),
    (alg.sapo_soft, (math.inf,), "temperature_positive=inf is no temperature"),
    (alg.opsm, (math.nan,), "threshold=nan is no number"),
    (alg.high_entropy, (math.nan,), "min_entropy=nan is no number"),
    (alg.kl_cov, (alg.cispo(), math.nan), "min_covariance=nan is no number"),
    (alg.pass_at_k_advantage, (1.5,), r"pass_at_k_advantage: k=1.5 is no whole number"),
    (alg.pass_at_k_advantage, ("a",), "k='a' is no whole number"),
    (alg.constant_length, (2.5,), "length=2.5 is no whole number"),
    (alg.adaptive_kl, (0.1, "6"), "target='6' is no number"),
    (alg.entropy_bonus, (3, 0.1), "entropy_bonus: loss=3 is no loss; give one that stands under"),
    (alg.with_kl, ("cispo", "k3", 0.1), "with_kl: loss=cispo is no loss"),
    (alg.with_kl, (alg.cispo(), 0.1, "k3"), "coefficient='k3' is no number"),
    (alg.observed, (None,), "observed: loss=None is no loss"),
    (alg.corrected, (alg.cispo(), alg.cispo()), r"correction=cispo\(.*\) is no correction"),
    (alg.corrected, (alg.reinforce, alg.tis()), "is the class reinforce; make one of it: reinf"),
    (alg.with_kl, (later, "k3", 0.1), "with_kl: loss=later is an async function or a generator"),
    (alg.dynamic_sampling, (later,), "advantage=later is an async function or a generator"),
    (alg.with_kl, (lambda: 1, "k3", 0.1), r"loss=<lambda> does not take one argument \(too many"),
    (alg.dynamic_sampling, (3,), "dynamic_sampling: advantage=3 is no advantage"),
    (alg.icepop, (2, 5), r"icepop\(2, 5\) drops tokens on which the policies agree; use bounds ar"),
    (alg.sequence_icepop, (0.1, 0.5), "drops tokens on which the policies agree"),
    (alg.distill, (alg.cross_entropy(),), r"distill\(cross_entropy\(\)\) would distil nothing"),
    (
        alg.distill,
        (alg.dpo(),),
        r"distill\(dpo\(.*\)\) would distil nothing: the loss reads no adv",
    ),
]


@pytest.mark.parametrize(("make", "arguments", "message"), CASES)
def test_what_is_no_parameter_is_refused_by_its_name(
    make: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
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
def test_every_one_refuses_nan_and_travels_when_it_is_right(entry: RegistryEntry) -> None:
    required = {
        name: GOOD[parameter.annotation]
        for name, parameter in entry.constants.items()
        if parameter.default is parameter.empty
    }
    assert pickle.loads(pickle.dumps(entry.target(**required))) == entry.target(**required)
    for name, parameter in entry.constants.items():
        if parameter.annotation in ("float", "int", "float | None"):
            with pytest.raises(ValueError, match=f"{entry.name}: {name}=nan is no"):
                entry.target(**required | {name: math.nan})


def test_numbers_of_numpy_and_bounds_without_an_end_are_numbers() -> None:
    float32: Any = np.float32(2.0)
    int64: Any = np.int64(2)
    assert alg.cispo(math.inf).max_ratio == math.inf
    assert alg.tis(float32).cap == 2
    assert alg.pass_at_k_advantage(int64).min_group_size == 3

"""Fit the planner's constants to published rows, and write rlsys/planner/data/constants.json.

    python scripts/plan/fit.py

    rows of half of the groups (by hash) ─► log(measured / predicted) ─┐
    priors of rlsys/planner/profiles.py ───────────────────────────────┴► least squares ─► constants

Each kind of prediction is fitted by itself. The loss is robust (Huber), rows of a large group count
less, and each constant pays for the distance of its logarithm from the prior's. The result is
deterministic: numpy alone, no random numbers, rounded to four digits. The other half of the groups
is reported by validate.py and never enters.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlsys.common.safe_json import dump_json
from rlsys.planner.model_config import DATA
from rlsys.planner.profiles import (
    PRIORS,
    Z80,
    Constants,
    SoftwareProfile,
    prior_constants,
)
from scripts.plan.decode_rows import decode_cases
from scripts.plan.memory_rows import memory_cases
from scripts.plan.published_rows import Case, Skip
from scripts.plan.rl_rows import rl_cases
from scripts.plan.training_rows import training_cases

NOISE = 0.12  # of a row, on top of what its group shares
HUBER = 1.5  # residuals beyond this many NOISE count linearly
ITERATIONS = 12
UNSEEN = 1.15  # spread of unseen groups over that of fitted ones
UNSEEN_OF_A_STACK = 1.5  # the same where each stack has a factor of its own in the fit
PROFILE_SPREAD = 0.25
RELEASE_SPREAD = 0.1  # of a release, relative to its stack
MOE_SPREAD = 0.25  # of the factor of models with experts, relative to dense ones
PROFILE_GROUPS = 4.0  # groups of a profile that weigh as much as all others for its spread


@dataclass(frozen=True)
class Kind:
    """Constants and factors that are fitted together.

    Attributes:
        name: Name of the kind.
        cases: All its rows.
        constants: Names of PRIORS that it fits.
        factors: Whether it fits factors of profiles.
    """

    name: str
    cases: Callable[[], Iterable[Case | Skip]]
    constants: tuple[str, ...]
    factors: bool


NAMES = tuple(PRIORS)
_TRAINING = NAMES[: NAMES.index("context_gb")]
_MEMORY = NAMES[NAMES.index("context_gb") : NAMES.index("decode_gemm")]
_DECODE = NAMES[NAMES.index("decode_gemm") : NAMES.index("rl_fixed")]
_RL = NAMES[NAMES.index("rl_fixed") :]
KINDS = (
    Kind("training", training_cases, _TRAINING, True),
    Kind("memory", memory_cases, _MEMORY, False),
    Kind("decode", decode_cases, _DECODE, True),
    Kind("rl_step", rl_cases, _RL, False),
)


def stack_of(profile: str) -> str:
    """Return the stack of a profile, without its release."""
    return profile.split("-20")[0]


def factor_spread(profile: str, moe: bool) -> float:
    """Return the spread of the prior of a factor."""
    if stack_of(profile) != profile:
        return RELEASE_SPREAD
    return MOE_SPREAD if moe else PROFILE_SPREAD


class Problem:
    """Residuals of a kind as a function of the logarithms of its parameters."""

    def __init__(self, kind: Kind, base: Constants) -> None:
        self.kind, self.base = kind, base
        self.cases = [
            case
            for case in kind.cases()
            if isinstance(case, Case) and case.for_fitting and case.kind != "oom"
        ]
        groups = Counter(case.group for case in self.cases)
        self.weights = np.array([groups[case.group] ** -0.25 for case in self.cases])
        used = sorted({(case.profile, case.kind == "moe") for case in self.cases})
        if kind.name == "decode":
            # the second parameter of an engine is its mixing
            used = sorted(
                {(case.profile, second) for case in self.cases for second in (False, True)}
            )
        if kind.factors:
            # releases of one stack differ from its common factor
            stacks = {(stack_of(name), moe) for name, moe in used}
            used = sorted({*used, *stacks})
        self.factors = used if kind.factors else []
        self.priors = np.array(
            [math.log(PRIORS[name].value) for name in kind.constants] + [0.0] * len(self.factors)
        )
        self.spreads = np.array(
            [PRIORS[name].spread for name in kind.constants]
            + [factor_spread(name, moe) for name, moe in self.factors]
        )

    def constants(self, parameters: np.ndarray) -> Constants:
        """Return the constants for these parameters."""
        count = len(self.kind.constants)
        values = dict(zip(self.kind.constants, np.exp(parameters[:count]).tolist(), strict=True))
        result = self.base.with_values(**values)
        logs = dict(zip(self.factors, parameters[count:].tolist(), strict=True))
        for name in {case.profile for case in self.cases}:
            # a release starts from its stack, and models with experts from dense ones
            names = {name, stack_of(name)}
            dense = sum(logs.get((one, False), 0.0) for one in names)
            second = sum(logs.get((one, True), 0.0) for one in names)
            changes: dict[str, Any] = {
                "factor": math.exp(dense),
                "moe_factor": math.exp(dense + second),
                "large_experts": math.exp(-second),
            }
            if self.kind.name == "decode":
                changes = {"factor": math.exp(dense), "mixing": math.exp(second)}
                changes["moe_factor"] = changes["factor"]
            profile = replace(result.profile(name), **changes)
            result = result.with_profile(profile)
        return result

    def logs(self, parameters: np.ndarray) -> np.ndarray:
        """Return log(measured / predicted) of all rows."""
        constants = self.constants(parameters)
        return np.array([math.log(case.measured / case.predict(constants)) for case in self.cases])

    def residuals(self, parameters: np.ndarray) -> np.ndarray:
        """Return the weighted robust residuals of rows, and those of the priors."""
        scaled = self.logs(parameters) / NOISE
        size = np.abs(scaled)
        robust = np.where(size <= HUBER, size, np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0)))
        return np.concatenate(
            [np.sign(scaled) * robust * self.weights, (parameters - self.priors) / self.spreads]
        )

    def solve(self) -> np.ndarray:
        """Return the parameters with the least squares, by Levenberg and Marquardt."""
        at = self.priors.copy()
        current = self.residuals(at)
        damping = 1e-2
        for _ in range(ITERATIONS):
            jacobian = np.empty((len(current), len(at)))
            for column in range(len(at)):
                moved = at.copy()
                moved[column] += 0.01
                jacobian[:, column] = (self.residuals(moved) - current) / 0.01
            normal = jacobian.T @ jacobian
            gradient = jacobian.T @ current
            for _ in range(6):
                step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
                step = np.clip(step, -0.5, 0.5)
                tried = self.residuals(at + step)
                if tried @ tried < current @ current:
                    damping = max(damping / 4, 1e-5)
                    break
                damping *= 4
            else:
                return at
            gain = current @ current - tried @ tried
            at, current = at + step, tried
            if gain < 1e-3:
                break
        return at


def spread_of(logs: Sequence[float], unseen: float = UNSEEN) -> float:
    """Return the spread whose 80 % interval holds 80 % of the rows of unseen groups.

    Args:
        logs: Logarithms of measured over predicted of fitted rows.
        unseen: Spread of unseen groups over that of fitted ones.
    """
    return float(np.quantile(np.abs(logs), 0.8)) / Z80 * unseen


def profile_spreads(
    problem: Problem, logs: np.ndarray, moe: bool
) -> tuple[float, dict[str, float]]:
    """Return the spread of dense models or those with experts, and of each profile."""
    by_profile: dict[str, list[float]] = defaultdict(list)
    groups: dict[str, set[str]] = defaultdict(set)
    everything: list[float] = []
    for case, log in zip(problem.cases, logs.tolist(), strict=True):
        if (case.kind == "moe") == moe:
            by_profile[case.profile].append(log)
            groups[case.profile].add(case.group)
            everything.append(log)
    unseen = UNSEEN_OF_A_STACK if problem.kind.name == "training" else UNSEEN
    overall = spread_of(everything, unseen)
    spreads = {}
    for name, mine in by_profile.items():
        count = len(groups[name])
        own = spread_of(mine, unseen)
        spreads[name] = (count * own + PROFILE_GROUPS * overall) / (count + PROFILE_GROUPS)
    return overall, spreads


def fit(kind: Kind, base: Constants) -> tuple[Constants, dict[str, float], Problem]:
    """Return the constants after fitting a kind, and its spreads by kind of model."""
    problem = Problem(kind, base)
    parameters = problem.solve()
    constants = problem.constants(parameters)
    logs = problem.logs(parameters)
    spreads = {kind.name: spread_of(logs.tolist())}
    if not kind.factors:
        return constants, spreads, problem
    for moe in (False, True) if kind.name == "training" else (False,):
        overall, by_profile = profile_spreads(problem, logs, moe)
        if kind.name == "training":
            spreads["moe" if moe else "dense"] = overall
        for name in {case.profile for case in problem.cases}:
            spread = by_profile.get(name, overall)
            changes: dict[str, Any] = {"moe_spread" if moe else "spread": spread}
            if kind.name == "decode":
                changes["moe_spread"] = spread
            count = sum(case.profile == name for case in problem.cases)
            profile = replace(constants.profile(name), rows=count, **changes)
            constants = constants.with_profile(profile)
    return constants, spreads, problem


def rounded(value: float) -> float:
    """Return a value with four digits."""
    return float(f"{value:.4g}")


def stored_profile(profile: SoftwareProfile) -> dict[str, float]:
    """Return the fitted fields of a profile."""
    return {
        "factor": rounded(profile.factor),
        "moe_factor": rounded(profile.moe_factor),
        "large_experts": rounded(profile.large_experts),
        "mixing": rounded(profile.mixing),
        "spread": rounded(profile.spread),
        "moe_spread": rounded(profile.moe_spread),
        "rows": profile.rows,
    }


def constants_text(constants: Constants, spreads: Mapping[str, float]) -> str:
    """Return the file of constants."""
    fitted = {name: one for name, one in sorted(constants.profiles.items()) if one.rows}
    content = {
        "values": {name: rounded(constants[name]) for name in PRIORS},
        "profiles": {name: stored_profile(one) for name, one in fitted.items()},
        "spreads": {name: rounded(value) for name, value in spreads.items()},
    }
    return dump_json(content, indent=1) + "\n"


def fitted() -> tuple[Constants, dict[str, float]]:
    """Return constants fitted to the rows for fitting, kind by kind."""
    constants, spreads = prior_constants(), {}
    for kind in KINDS:
        constants, found, problem = fit(kind, constants)
        spreads.update(found)
        print(f"{kind.name}: {len(problem.cases)} rows, spread {found[kind.name]:.3f}", flush=True)
    return constants, spreads


def main() -> None:
    """Fit all kinds and write the constants."""
    constants, spreads = fitted()
    path = DATA / "constants.json"
    path.write_text(constants_text(constants, spreads))
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()

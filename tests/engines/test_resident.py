"""A trainer whose weights are published in place: readers keep their version unchanged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.engines.training.adapters import AdaptedWeight
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.zero_copy_publication import zero_copy_tensors
from rlsys.reallocation.transport import version_memory
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.reallocation.transport.weight_views import Weights
from tests.engines.published import read_all, writable
from tests.engines.training_harness import (
    hold,
    make_engine,
    make_rows,
    memory,
    save,
    tiny_model,
    train_step,
)

Copies = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def step(engine: FSDPEngine, seed: int) -> None:
    train_step(engine, make_rows(4, seed=seed))


def copies(engine: FSDPEngine) -> Copies:
    return {name: tensor.detach().clone() for name, tensor in engine.base.items()}


def assert_same(one: Copies, other: Copies) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def places(engine: FSDPEngine) -> set[int]:
    """Return the addresses of the weights."""
    return {tensor.untyped_storage().data_ptr() for tensor in engine.base.values()}


def test_nothing_is_copied_to_publish(model_path: Path) -> None:
    engine = make_engine(model_path)
    parameters = dict(engine.model.named_parameters())
    assert len(places(engine)) > 1
    engine.publish()
    (place,) = places(engine)
    for seed in range(3):
        step(engine, seed)
        manifest = engine.publish()
        assert manifest is not None
        assert places(engine) == {place}
        assert_same(read_all(manifest), copies(engine))
    assert all(one is parameters[name] for name, one in engine.model.named_parameters())
    engine.close()


def test_training_does_not_depend_on_readers(model_path: Path) -> None:
    alone, observed = make_engine(model_path), make_engine(model_path)
    kept: list[tuple[Weights, Copies]] = []
    for seed in range(5):
        manifest = observed.publish()
        assert manifest is not None
        kept.append((Weights(manifest), copies(observed)))
        if len(kept) == 3:  # at most two versions behind
            kept.pop(0)[0].close()
        step(alone, seed)
        step(observed, seed)
        assert_same(copies(alone), copies(observed))
        for weights, expected in kept:
            weights.verify()
            assert_same(read_all(weights.local), expected)
    for weights, _ in kept:
        weights.close()
    for engine in (alone, observed):
        engine.close()


def _load(engine: FSDPEngine, directory: Path) -> Callable[[], None]:
    save(engine, directory / "saved")
    return lambda: engine.load(directory / "saved")


def _restore(engine: FSDPEngine, directory: Path) -> Callable[[], None]:
    path = memory(directory / "snapshots", engine.snapshot_bytes(1))
    file = engine.open_snapshots(path, "snapshots")
    engine.snapshot(file)
    version = engine.policy_version
    return lambda: engine.restore(file, version)


@pytest.mark.parametrize("back", [_load, _restore])
def test_restoring_leaves_readers_their_version(
    back: Callable[[FSDPEngine, Path], Callable[[], None]], model_path: Path, tmp_path: Path
) -> None:
    engine = make_engine(model_path)
    first = copies(engine)
    go_back = back(engine, tmp_path)
    step(engine, 0)
    manifest, second = engine.publish(), copies(engine)
    assert manifest is not None
    with Weights(manifest) as weights:
        go_back()
        assert_same(copies(engine), first)
        assert_same(read_all(weights.local), second)
        again = engine.publish()
        assert again is not None
        assert_same(read_all(again), first)
    engine.close()


def test_a_version_can_be_published_again_while_it_is_read(model_path: Path) -> None:
    engine = make_engine(model_path)
    manifest = engine.publish()
    assert manifest is not None
    with Weights(manifest) as weights:
        again = engine.publish()
        assert again is not None
        assert_same(read_all(again), read_all(weights.local))
    engine.close()


def test_without_memory_for_a_copy_the_step_fails_and_weights_stay(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model_path)
    manifest, before = engine.publish(), copies(engine)
    assert manifest is not None

    error = OSError("no memory")

    def full(*_: Any, **__: Any) -> None:
        raise error

    with Weights(manifest) as weights:
        monkeypatch.setattr(version_memory, "SharedMemory", full)
        with pytest.raises(OSError) as found:  # noqa: PT011 - asserted below
            step(engine, 0)
        assert found.value is error
        weights.verify()
    assert_same(copies(engine), before)
    step(engine, 0)  # no reader is left
    engine.close()


def test_unannounced_changes_are_not_published(model_path: Path) -> None:
    engine = make_engine(model_path)
    engine.publish()
    with torch.no_grad():
        next(engine.model.parameters()).add_(1)
    with pytest.raises(AssertionError):
        engine.publish()
    engine.close()


def test_damage_of_published_weights_is_found_before_they_are_copied(
    model_path: Path, tmp_path: Path
) -> None:
    engine = make_engine(model_path)
    path = memory(tmp_path / "snapshots", engine.snapshot_bytes(1))
    file = engine.open_snapshots(path, "snapshots")
    manifest = engine.publish()
    assert manifest is not None
    engine.snapshot(file)
    writable(manifest.shares[0])[-8] ^= 1  # like a bug in another program
    passed_on: list[Callable[[], object]] = [
        *(lambda: step(engine, 0), engine.publish, lambda: engine.snapshot(file)),
        lambda: engine.export(tmp_path / "hf"),
    ]
    for pass_on in passed_on:
        with pytest.raises(DamagedWeightsError):
            pass_on()
    assert not (tmp_path / "hf").exists()
    before = make_engine(model_path)
    before.restore(before.open_snapshots(path, "snapshots"), 0)  # like a restarted trainer
    assert_same(copies(before), copies(make_engine(model_path)))
    engine.close()


def test_damage_that_makes_the_loss_nan_is_reported_as_damage(model_path: Path) -> None:
    engine = make_engine(model_path)
    manifest = engine.publish()
    assert manifest is not None
    writable(manifest.shares[0])[-1024:] = 0xFF  # NaN, in float32
    with pytest.raises(DamagedWeightsError):
        step(engine, 0)
    engine.close()


def test_at_most_two_versions_exist_besides_the_engines(model_path: Path) -> None:
    """Count one version as the trainer's own weights, like rlsys.launcher.memory_estimate."""
    engine, num, before = make_engine(model_path), [], memories()
    computes_with: Weights | None = None
    for seed in range(5):
        manifest = engine.publish()
        assert manifest is not None
        taken = Weights(manifest)  # the engine prepares it while training continues
        step(engine, seed)
        num.append(len(memories() - before) - (computes_with is not None))
        if computes_with is not None:
            computes_with.close()
        computes_with = taken
    assert max(num) == 2
    engine.close()
    taken.close()


def memories() -> set[int]:
    """Return the versions that this process keeps open, by inode."""
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            if "memfd:rlsys-weights" in os.readlink(one):
                found.add(one.stat().st_ino)
    return found


def test_a_held_state_does_not_change_with_the_next_step(model_path: Path, tmp_path: Path) -> None:
    engine = make_engine(model_path)
    engine.publish()
    held = hold(engine, tmp_path)
    before = {name: tensor.clone() for name, tensor in held.tensors.items()}
    step(engine, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.tensors.items())
    engine.close()


def test_tensors_that_need_a_copy() -> None:
    plain = torch.ones(2, 3)
    dtypes = {"w": torch.float32, "plain": torch.float32}
    assert zero_copy_tensors({"w": plain}, dtypes) == {"w": plain}
    parameter = torch.nn.Parameter(plain)
    assert zero_copy_tensors({"w": parameter}, dtypes) == {"w": parameter}
    for other in (
        plain.t(),
        plain.bfloat16(),
        plain.to("meta"),
        AdaptedWeight.__new__(AdaptedWeight),
    ):
        assert zero_copy_tensors({"w": other, "plain": plain}, dtypes) is None

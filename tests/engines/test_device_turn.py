"""Models that share a device are on it one at a time, and give the same numbers."""

from __future__ import annotations

import fcntl
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.engines.devices import device_lock
from rlsys.engines.devices.device_lock import DeviceLock
from rlsys.engines.inference.frozen_model import InferenceEngine
from tests.engines.training_harness import make_rows, tiny_model
from tests.tiers import rest_slow

CPU = torch.device("cpu")  # serves as the device; weights are copied to it
TIMEOUT_S = 300


def test_weights_are_on_the_device_only_while_the_lock_is_held(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    device_lock = DeviceLock(module, CPU, lock=tmp_path / "lock")
    on_host = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    for _ in range(2):
        with device_lock.hold():
            on_device = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
            assert not set(on_device.values()) & set(on_host.values())
        assert {n: t.data_ptr() for n, t in module.state_dict().items()} == on_host
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, values[name])


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    other.weight = one.weight
    with DeviceLock(torch.nn.ModuleList([one, other]), CPU, lock=tmp_path / "lock").hold():
        assert other.weight.data_ptr() == one.weight.data_ptr()
    assert other.weight.data_ptr() == one.weight.data_ptr()


def test_an_engine_that_shares_its_device_gives_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock, "lock_path", lambda device: tmp_path / "lock")
    path, rows = tiny_model(tmp_path / "model"), make_rows(5)
    alone = InferenceEngine(path, head="logits").infer(rows)
    shared = InferenceEngine(path, head="logits", shares_device=True)
    for _ in range(2):
        for one, other in zip(alone, shared.infer(rows), strict=True):
            assert np.array_equal(one, other)


def hold(lock: Path, connection: Any) -> None:
    """Hold the lock, report it, and keep it until a message arrives, or the process dies."""
    with DeviceLock(torch.nn.Linear(2, 2), CPU, lock=lock).hold():
        connection.send("held")
        connection.recv()
    connection.send("released")


@pytest.mark.slow
@pytest.mark.parametrize("ends", rest_slow(["well", "killed"], only=("killed",)))
def test_one_works_at_a_time_and_a_death_frees_the_device(ends: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    lock = tmp_path / "lock"
    process = context.Process(target=hold, args=(lock, theirs))
    process.start()
    try:
        assert ours.poll(TIMEOUT_S)
        assert ours.recv() == "held"
        with lock.open("ab") as other:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if ends == "well":
                ours.send("release")
                assert ours.poll(TIMEOUT_S)
                assert ours.recv() == "released"
            else:
                process.kill()
                process.join()
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        process.kill()
        process.join()


def test_a_device_that_takes_no_weights_is_free_for_others(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    device_lock = DeviceLock(torch.nn.Linear(2, 2), torch.device("xpu"), lock=lock)
    with pytest.raises((RuntimeError, AssertionError)), device_lock.hold():
        pytest.fail("there is no such device here")
    with lock.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

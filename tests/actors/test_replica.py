"""Failures of a replica, over a fake worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.cluster.calls import InputLost, Worker, WorkerDied, WorkerError
from actors.rollout.ray_replica import RayReplica
from actors.trainer.weight_imports import WeightImports
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.worker_protocols import ReplicaDied, RowsLost, WeightsGone
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.shared_device import DeviceSharingError
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.types import DeviceHandle, WeightManifest, WeightShare

MANIFEST = WeightManifest(version=7)


class FakeWorker(Worker):
    def __init__(self, answer: Callable[[str], Any]) -> None:
        super().__init__("rollout-0.1", None, timeout_s=600)
        self.answer = answer
        self.import_errors: list[Exception | None] = []
        self.ended = 0

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        assert not self.is_dead
        if method == "import_weights":
            if self.import_errors and (error := self.import_errors.pop(0)) is not None:
                raise error
            return args[0].shares
        answer = self.answer(method)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            assert answer <= limit_s, f"{method} takes {answer} s of {limit_s} s"
            await asyncio.sleep(answer)
        return answer

    def _end_process(self) -> None:
        self.ended += 1


class TrainerProxy:
    """Trainer with one rank on another node; `bases` are the base versions of its readers."""

    def __init__(self) -> None:
        self.imports = WeightImports(self, "objects")
        self.bases: list[int | None] = []
        self.num_sent_again = 0
        self.corrupt: list[int] = []

    def weight_deltas(
        self, manifest: WeightManifest, node_id: str, base: int | None, link: Link | None
    ) -> list[Any]:
        self.bases.append(base)
        return ["delta"]

    def send_again(self, manifest: WeightManifest) -> None:
        self.num_sent_again += 1

    def mark_corrupt(self, manifest: WeightManifest, reason: str) -> None:
        self.corrupt.append(manifest.version)


def replica(answer: Callable[[str], Any], trainer_proxy: Any = None) -> RayReplica:
    proxy: Any = trainer_proxy or TrainerProxy()
    shards: Any = None
    made = RayReplica(FakeWorker(answer), proxy, shards)
    made.node_id = "here"
    return made


def update(of: RayReplica, *, delayed: bool = False) -> float:
    return run_in_virtual_time(of.update_weights(MANIFEST, delayed=delayed))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerDied("rollout-0.1 died while generating: killed"), "generating: killed"),
        (
            WorkerError("rollout-0.1 failed while generating: KeyError: 3"),
            "generating: KeyError: 3",
        ),
        (
            EngineError("its loop broke"),
            "rollout-0.1 died while working on rollouts: its loop broke",
        ),
        (
            RowsLost("no shard is left"),
            "rollout-0.1 died while working on rollouts: no shard is left",
        ),
        (OSError("disk full"), "rollout-0.1 died while working on rollouts: disk full"),
    ],
)
def test_what_ends_a_replica(error: Exception, message: str) -> None:
    dying = replica(lambda method: error)
    with pytest.raises(ReplicaDied) as died:
        asyncio.run(dying.collect())
    assert message in str(died.value)
    assert isinstance(dying.worker, FakeWorker)
    assert dying.worker.ended == 1


def test_a_users_mistake_is_raised_unchanged() -> None:
    mistake = ValueError("the prompt is too long")
    living = replica(lambda method: mistake)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the same object
        asyncio.run(living.submit([], {}))
    assert error.value is mistake
    assert not living.worker.is_dead


def test_weights_with_a_wrong_checksum_end_a_replica() -> None:
    dying = replica(lambda method: ValueError("the checksum differs"))
    with pytest.raises(ReplicaDied) as died:
        update(dying)
    assert "died while loading new weights: the checksum differs" in str(died.value)
    assert dying.worker.is_dead


def damaged(*times: bool) -> tuple[RayReplica, Any]:
    """Return a replica whose updates find damage or not, in this order, and its trainer."""
    outcomes = iter(times)

    def answer(method: str) -> Any:
        return DamagedWeightsError("is damaged in 1 of its 9 buckets") if next(outcomes) else 0.25

    trainer_proxy = TrainerProxy()
    return replica(answer, trainer_proxy), trainer_proxy


def take(of: RayReplica, version: int) -> float:
    share = WeightShare(version=version, rank=0, node="a", path="", num_bytes=1, checksum=0)
    manifest = WeightManifest(version=version, shares=(share,))
    return run_in_virtual_time(of.update_weights(manifest, delayed=False))


def test_damaged_weights_are_sent_again_in_full() -> None:
    living, trainer_proxy = damaged(False, True, False, False)
    for version in (1, 2, 3):
        assert take(living, version) == 0.25
    assert trainer_proxy.num_sent_again == 1
    assert trainer_proxy.bases == [None, 1, None, 2]


def test_weights_that_are_damaged_twice_end_a_replica() -> None:
    dying, trainer_proxy = damaged(True, True)
    with pytest.raises(ReplicaDied) as died:
        take(dying, 1)
    assert "died while loading new weights: " in str(died.value)
    assert "in 1 of its 9" in str(died.value)
    assert trainer_proxy.num_sent_again == 2
    assert trainer_proxy.corrupt == [1]
    assert dying.worker.is_dead


def test_after_a_missing_version_the_next_one_is_sent_in_full() -> None:
    trainer_proxy = TrainerProxy()
    living = replica(lambda method: 0.25, trainer_proxy)
    assert isinstance(living.worker, FakeWorker)
    living.worker.import_errors = [None, FileNotFoundError("gone")]
    take(living, 1)
    with pytest.raises(WeightsGone):
        take(living, 2)
    take(living, 3)
    assert trainer_proxy.bases == [None, 1, None]


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), InputLost("trainer-0 died")])
def test_missing_weights_do_not_end_a_replica(error: Exception) -> None:
    living = replica(lambda method: error)
    with pytest.raises(WeightsGone) as gone:
        update(living)
    assert "rollout-0.1 " in str(gone.value)
    assert "version 7" in str(gone.value)
    assert not living.worker.is_dead


def test_a_delayed_update_waits_longer_than_the_limit_of_a_call() -> None:
    drains = iter([False] * 1000 + [True])
    calls = []

    def answer(method: str) -> Any:
        calls.append(method)
        return next(drains) if method == "drain" else 0.25

    assert update(replica(answer), delayed=True) == 0.25
    assert calls == ["drain"] * 1001 + ["update_weights"]


def test_the_limit_of_a_poll_includes_its_wait() -> None:
    waiting = replica(lambda method: 604.0)
    assert run_in_virtual_time(waiting.collect()) == 604.0  # type: ignore[comparison-overlap]


def test_a_replica_that_cannot_open_the_gpus_memory_loads_from_host_memory() -> None:
    seen: list[bool] = []

    def answer(method: str) -> Any:
        seen.append(trainer_proxy.imports.reads_devices)
        return DeviceSharingError("no peer access") if len(seen) == 1 else 0.25

    trainer_proxy = TrainerProxy()
    living = replica(answer, trainer_proxy)
    memory = DeviceHandle(handle=b"", num_bytes=1, owner=0)
    share = WeightShare(
        version=1, rank=0, node="here", path="", num_bytes=1, checksum=0, on_device=memory
    )
    manifest = WeightManifest(version=1, shares=(share,))
    assert run_in_virtual_time(living.update_weights(manifest, delayed=False)) == 0.25
    assert seen == [True, False]
    assert not living.worker.is_dead

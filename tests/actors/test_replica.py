"""What a replica's failures become, over a fake worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.cluster.calls import InputLost, Worker, WorkerDied, WorkerError
from actors.rollout.rollout_actor import RayReplica
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.worker_protocols import ReplicaDied, RowsLost, WeightsGone
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.types import WeightManifest, WeightShare

MANIFEST = WeightManifest(version=7)


class FakeWorker(Worker):
    def __init__(self, answer: Callable[[str], Any]) -> None:
        super().__init__("rollout-0.1", None, timeout_s=600)
        self.answer = answer
        self.ended = 0

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        assert not self.is_dead
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
    """Sends from one rank elsewhere; `asked` are the versions that its readers still had."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []
        self.num_sent_again = 0
        self.distrusted: list[int] = []

    def weight_deltas(self, manifest: WeightManifest, node_id: str, base: int | None) -> list[Any]:
        self.asked.append(base)
        return ["parcel"]

    def send_again(self, manifest: WeightManifest) -> None:
        self.num_sent_again += 1

    def mark_corrupt(self, manifest: WeightManifest, why: str) -> None:
        self.distrusted.append(manifest.version)


def replica(answer: Callable[[str], Any]) -> RayReplica:
    trainer_proxy: Any = TrainerProxy()
    shards: Any = None
    made = RayReplica(FakeWorker(answer), trainer_proxy, shards)
    made.node_id = "here"
    return made


def update(of: RayReplica, *, delayed: bool = False) -> float:
    return run_in_virtual_time(of.update_weights(MANIFEST, delayed=delayed))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerDied("rollout-0.1 died during collect: killed"), "collect: killed"),
        (WorkerError("rollout-0.1.collect failed: KeyError: 3"), "collect failed: KeyError: 3"),
        (EngineError("its loop broke"), "rollout-0.1 died during collect: its loop broke"),
        (RowsLost("no shard is left"), "rollout-0.1 died during collect: no shard is left"),
        (OSError("disk full"), "rollout-0.1 died during collect: disk full"),
    ],
)
def test_what_ends_a_replica(error: Exception, message: str) -> None:
    dying = replica(lambda method: error)
    with pytest.raises(ReplicaDied, match=message):
        asyncio.run(dying.collect())
    assert isinstance(dying.worker, FakeWorker)
    assert dying.worker.ended == 1


def test_a_mistake_of_the_user_is_told_as_it_is() -> None:
    living = replica(lambda method: ValueError("the prompt is too long"))
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(living.submit([], {}))
    assert not living.worker.is_dead


def test_weights_that_have_changed_on_their_way_end_a_replica() -> None:
    dying = replica(lambda method: ValueError("the checksum differs"))
    with pytest.raises(ReplicaDied, match="died during update_weights: the checksum differs"):
        update(dying)
    assert dying.worker.is_dead


def damaged(*times: bool) -> tuple[RayReplica, Any]:
    """A replica whose updates find damage, or not, one after the other; and its learner."""
    outcomes = iter(times)

    def answer(method: str) -> Any:
        return DamagedWeightsError("is damaged in 1 of its 9 buckets") if next(outcomes) else 0.25

    living = replica(answer)
    return living, living._learner


def take(of: RayReplica, version: int) -> float:
    share = WeightShare(version=version, rank=0, node="a", path="", num_bytes=1, checksum=0)
    manifest = WeightManifest(version=version, shares=(share,))
    return run_in_virtual_time(of.update_weights(manifest, delayed=False))


def test_damaged_weights_are_sent_once_more_and_whole() -> None:
    living, trainer_proxy = damaged(False, True, False, False)
    for version in (1, 2, 3):
        assert take(living, version) == 0.25
    assert trainer_proxy.num_sent_again == 1
    assert trainer_proxy.asked == [None, 1, None, 2]


def test_weights_that_are_damaged_twice_end_a_replica() -> None:
    dying, trainer_proxy = damaged(True, True)
    with pytest.raises(ReplicaDied, match="died during update_weights: is damaged in 1 of its 9"):
        take(dying, 1)
    assert trainer_proxy.num_sent_again == 1
    assert trainer_proxy.distrusted == [1]
    assert dying.worker.is_dead


def test_after_a_version_that_is_gone_the_next_one_comes_whole() -> None:
    outcomes: Iterator[Any] = iter([0.25, FileNotFoundError("gone"), 0.25])
    living = replica(lambda method: next(outcomes))
    take(living, 1)
    with pytest.raises(WeightsGone):
        take(living, 2)
    take(living, 3)
    trainer_proxy: Any = living._learner
    assert trainer_proxy.asked == [None, 1, None]


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), InputLost("trainer-0 died")])
def test_a_replica_outlives_weights_that_are_gone(error: Exception) -> None:
    living = replica(lambda method: error)
    with pytest.raises(WeightsGone, match=r"rollout-0\.1 came too late to version 7: "):
        update(living)
    assert not living.worker.is_dead


def test_a_delayed_update_waits_longer_than_any_call_may_take() -> None:
    drains = iter([False] * 1000 + [True])
    calls = []

    def answer(method: str) -> Any:
        calls.append(method)
        return next(drains) if method == "drain" else 0.25

    assert update(replica(answer), delayed=True) == 0.25
    assert calls == ["drain"] * 1001 + ["update_weights"]


def test_a_poll_may_take_what_it_waits_beside_its_limit() -> None:
    waiting = replica(lambda method: 604.0)
    assert run_in_virtual_time(waiting.collect()) == 604.0  # type: ignore[comparison-overlap]

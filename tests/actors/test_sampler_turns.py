"""A sampler of several clients, over a worker without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.cluster.calls import WorkerDied
from actors.tinker_server.ray_sampler import KEPT, RaySampler
from rlsys.common.manifest import write_manifest
from rlsys.common.supervision import Policy, RestartPolicy
from rlsys.errors import InvalidValue
from rlsys.tinker_server.api_errors import ApiError, PartDied
from rlsys.tinker_server.server_backend import ScoreRequest, Scores
from rlsys.tinker_server.server_checkpoints import ADAPTER_DIRECTORY, SamplerWeights
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams


@dataclass
class FakeWorker:
    """A worker whose engine ends the requests that a test names."""

    name: str
    timeout_s: float = 10.0
    is_dead: bool = False
    cause: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    running: list[GenerationRequest] = field(default_factory=list)
    loaded: set[int] = field(default_factory=set)
    fails: dict[int, Exception] = field(default_factory=dict)  # by adapter
    scores: list[Scores] = field(default_factory=list)
    ended: list[Generation] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    died: asyncio.Event = field(default_factory=asyncio.Event)
    start_error: Exception | None = None
    may_load: asyncio.Event | None = None  # adapters wait for it

    async def watch(self) -> None:
        await self.died.wait()
        raise WorkerDied(f"{self.name} died: {self.cause}")

    async def start_call(self, method: str, *args: Any) -> Any:
        return await self.call(method, *args)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        if method == "collect":
            while not self.ended:
                self.changed.clear()
                await self.changed.wait()
                if self.is_dead:
                    raise WorkerDied(f"{self.name} died: {self.cause}")
            found, self.ended = self.ended, []
            return found
        self.calls.append((method, args))
        match method:
            case "start":
                if self.start_error is not None:
                    raise self.start_error
                return "node"
            case "submit":
                self.running += args[0]
            case "add_adapter":
                if args[0] in self.fails:
                    raise self.fails[args[0]]
                if self.may_load is not None:
                    await self.may_load.wait()
                self.loaded.add(args[0])
            case "score":
                return self.scores
            case "drop_adapter":
                self.loaded.remove(args[0])
            case "abort":
                self.finish(*args[0])
        return None

    def finish(self, *request_ids: str, failure: str = "") -> None:
        for one in [one for one in self.running if one.request_id in request_ids]:
            assert one.adapter == 0 or one.adapter in self.loaded
            self.running.remove(one)
            self.ended.append(
                Generation(
                    request_id=one.request_id,
                    token_ids=np.array([7], np.int32),
                    sampler_logprobs=np.array([-0.5], np.float32),
                    policy_versions=np.array([one.adapter], np.int32),
                    finish_reason=FinishReason.FAILED if failure else FinishReason.LENGTH,
                    failure=failure,
                )
            )
        self.changed.set()

    def end(self, cause: str) -> None:
        self.cause, self.is_dead = cause, True
        self.changed.set()
        self.died.set()

    def kill(self) -> None:
        self.end("killed")


class Sampler:
    """A RaySampler and its workers."""

    def __init__(
        self, *, max_running: int = 4, max_adapters: int = 2, is_renewed: bool = False
    ) -> None:
        self.workers: list[FakeWorker] = []
        self.start_errors: list[Exception] = []
        self.warnings: list[str] = []
        self.sampler = RaySampler(
            self._start,
            "sampler-0",
            base_key="tiny",
            max_running=max_running,
            max_adapters=max_adapters,
            is_renewed=is_renewed,
            start_timeout_s=10.0,
            published=lambda number, node: None,
            warn=self.warnings.append,
        )

    def _start(self, name: str) -> Any:
        self.workers.append(FakeWorker(name))
        self.worker.start_error = self.start_errors.pop(0) if self.start_errors else None
        return self.worker

    @property
    def worker(self) -> FakeWorker:
        return self.workers[-1]

    def asks(
        self, weights: SamplerWeights, name: str, owner: str, size: int = 1
    ) -> asyncio.Task[Sequence[Generation]]:
        requests = [
            GenerationRequest(
                request_id=f"{name}:{index}",
                prompt_token_ids=(1, 2),
                sampling=SamplingParams(max_tokens=1),
                seed=0,
            )
            for index in range(size)
        ]
        return asyncio.create_task(self.sampler.sample(weights, requests, owner))

    async def names(self) -> list[str]:
        """Return the running requests, once nothing changes any more."""
        for _ in range(50):
            await asyncio.sleep(0)
        return [one.request_id for one in self.worker.running]


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check saved weights on the event loop, so that `names` need not wait for a thread."""

    async def at_once(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)


def adapter(directory: Path, number: int) -> SamplerWeights:
    """Write sampler weights with an adapter."""
    place = directory / str(number)
    (place / ADAPTER_DIRECTORY).mkdir(parents=True)
    (place / ADAPTER_DIRECTORY / "adapter_config.json").write_text("{}")
    write_manifest(place)
    return SamplerWeights(
        base_model="tiny", number=number, path=f"tinker://m/{number}", directory=place, lora="r8"
    )


BASE = SamplerWeights(base_model="tiny")


def test_adapters_and_the_base_model_are_sampled_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler()
        weights = [BASE, adapter(tmp_path, 1), adapter(tmp_path, 2)]
        asked = [one.asks(each, f"r{n}", f"client-{n}") for n, each in enumerate(weights)]
        assert await one.names() == ["r0:0", "r1:0", "r2:0"]
        assert [each.adapter for each in one.worker.running] == [0, 1, 2]
        one.worker.finish("r0:0", "r1:0", "r2:0")
        answers = [(await each)[0].policy_versions.tolist() for each in asked]
        assert answers == [[0], [1], [2]]
        assert not [call for call in one.worker.calls if call[0] == "take_saved"]
        await one.sampler.close()

    asyncio.run(main())


def test_a_flood_of_one_client_waits_behind_one_request_of_another(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler()
        mine, other = adapter(tmp_path, 1), adapter(tmp_path, 2)
        flood = [one.asks(mine, f"flood-{n}", "flood") for n in range(50)]
        assert len(await one.names()) == 4
        asked = one.asks(other, "mine", "other")
        one.worker.finish("flood-0:0")
        assert "mine:0" in await one.names()
        (running,) = [each for each in one.worker.running if each.request_id == "mine:0"]
        assert all(running.priority >= each.priority for each in one.worker.running)
        one.worker.finish("mine:0")
        assert len(await asked) == 1
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await one.sampler.close()

    asyncio.run(main())


def test_a_large_request_takes_turns_with_others() -> None:
    async def main() -> None:
        one = Sampler(max_running=8)
        large = [one.asks(BASE, f"large-{n}", "large", size=100) for n in range(2)]
        assert len(await one.names()) == 8
        small = one.asks(BASE, "small", "small")
        one.worker.finish(*[f"large-0:{index}" for index in range(8)])
        assert "small:0" in await one.names()
        one.worker.finish("small:0")
        assert len(await small) == 1
        for each in large:
            each.cancel()
        await asyncio.gather(*large, return_exceptions=True)
        await one.sampler.close()

    asyncio.run(main())


def test_a_request_that_is_cancelled_while_its_adapter_loads_never_runs(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler(max_running=2)
        await one.sampler.start()
        one.worker.may_load = asyncio.Event()
        cancelled = one.asks(adapter(tmp_path, 1), "cancelled", "a", size=2)
        assert await one.names() == []
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        one.worker.may_load.set()
        assert await one.names() == []
        next_one = one.asks(BASE, "next", "b", size=2)  # the cancelled one leaves its room
        assert await one.names() == ["next:0", "next:1"]
        one.worker.finish("next:0", "next:1")
        assert len(await next_one) == 2
        await one.sampler.close()

    asyncio.run(main())


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_alone(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler()
        good, bad, gone = (adapter(tmp_path, number) for number in (1, 2, 3))
        assert gone.directory is not None
        (gone.directory / ADAPTER_DIRECTORY / "adapter_config.json").unlink()
        await one.sampler.start()
        one.worker.fails[2] = InvalidValue("adapter", rule="does not fit", fix="Use another.")
        asked = [one.asks(each, f"r{each.number}", "client") for each in (bad, gone, good)]
        assert await one.names() == ["r1:0"]
        for each, error in zip(asked, (InvalidValue, ApiError), strict=False):
            with pytest.raises(error):
                await each
        one.worker.finish("r1:0")
        assert len(await asked[2]) == 1
        await one.sampler.close()

    asyncio.run(main())


def test_adapters_that_nobody_uses_are_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler(max_adapters=1)
        for number in range(1, 8):
            asked = one.asks(adapter(tmp_path, number), f"r{number}", "client")
            assert await one.names() == [f"r{number}:0"]
            one.worker.finish(f"r{number}:0")
            await asked
        assert one.worker.loaded == set(range(8 - KEPT, 8))
        await one.sampler.close()

    asyncio.run(main())


def test_a_new_replica_loads_adapters_again(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler()
        weights = adapter(tmp_path, 1)
        asked = one.asks(weights, "first", "client")
        await one.names()
        one.worker.end("killed by the system")
        with pytest.raises(PartDied):
            await asked
        asked = one.asks(weights, "second", "client")
        assert await one.names() == ["second:0"]
        assert len(one.workers) == 2
        one.worker.finish("second:0")
        assert len(await asked) == 1
        await one.sampler.close()

    asyncio.run(main())


def test_a_completion_without_finite_probabilities_fails_its_request_alone(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler()
        weights = adapter(tmp_path, 1)
        bad, good = one.asks(weights, "bad", "a", size=2), one.asks(BASE, "good", "b")
        await one.names()
        one.worker.finish("bad:0", failure="token 0 has no finite probability")
        with pytest.raises(FloatingPointError) as found:
            await bad
        assert weights.path in str(found.value)
        assert await one.names() == ["good:0"]  # the rest of the request is aborted
        one.worker.finish("good:0")
        assert len(await good) == 1
        assert (len(one.workers), one.warnings) == (1, [])
        await one.sampler.close()

    asyncio.run(main())


def test_an_engine_with_failed_requests_is_renewed_before_other_weights(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler(max_adapters=0, is_renewed=True)
        diverged = one.asks(adapter(tmp_path, 1), "bad", "a")
        await one.names()
        one.worker.finish("bad:0", failure="token 0 has no finite probability")
        with pytest.raises(FloatingPointError):
            await diverged
        other, base = one.asks(adapter(tmp_path, 2), "other", "b"), one.asks(BASE, "base", "c")
        assert await one.names() == ["other:0"]
        assert [worker.is_dead for worker in one.workers] == [True, False]
        one.worker.finish("other:0")
        assert len(await other) == 1
        await one.names()
        one.worker.finish("base:0")
        assert len(await base) == 1
        assert (len(one.workers), one.warnings) == (2, [])
        await one.sampler.close()

    asyncio.run(main())


def test_scores_that_are_not_finite_fail_alone() -> None:
    async def main() -> None:
        one = Sampler()
        await one.sampler.start()
        request = ScoreRequest(weights=BASE, rows=[np.array([1, 2, 3], np.int32)])
        for bad in (np.nan, -np.inf):
            one.worker.scores = [Scores(logprobs=np.array([-1.0, bad], np.float32))]
            with pytest.raises(FloatingPointError):
                await one.sampler.score(request)
        one.worker.scores = [Scores(logprobs=np.array([-1.0, -2.0], np.float32))]
        assert await one.sampler.score(request) == one.worker.scores
        assert (len(one.workers), one.warnings) == (1, [])
        await one.sampler.close()

    asyncio.run(main())


def test_a_sampler_that_dies_is_replaced_and_reported_without_a_request() -> None:
    async def main() -> None:
        one = Sampler()
        await one.sampler.start()
        asked = one.asks(BASE, "r", "client")
        await one.names()
        one.worker.finish("r:0")
        await asked
        one.worker.end("killed")
        await one.names()
        assert [worker.calls[0][0] for worker in one.workers] == ["start", "start"]
        assert [worker.name for worker in one.workers] == ["sampler-0", "sampler-0.1"]
        (line,) = one.warnings
        assert line.startswith("sampler-0 died: killed; ")
        asked = one.asks(BASE, "again", "client")
        assert await one.names() == ["again:0"]
        one.worker.finish("again:0")
        assert len(await asked) == 1
        await one.sampler.close()
        await one.names()
        assert (len(one.workers), one.warnings) == (2, [line])  # a requested end is no death

    asyncio.run(main())


def test_samplers_that_keep_dying_are_started_by_requests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        policy = Policy(RestartPolicy(2))  # without pauses
        monkeypatch.setattr("actors.tinker_server.sampler_successor.SAMPLERS", policy)
        one = Sampler()
        await one.sampler.start()
        one.start_errors = [WorkerDied("it died during start: no memory")] * 3
        one.worker.end("killed")
        for _ in range(3):
            await one.names()
        assert len(one.workers) == 3  # two successors, whose starts failed
        assert len(one.warnings) == 3
        with pytest.raises(PartDied):
            await one.asks(BASE, "fails", "client")
        asked = one.asks(BASE, "r", "client")
        assert await one.names() == ["r:0"]
        assert len(one.workers) == 5
        one.worker.finish("r:0")
        assert len(await asked) == 1
        await one.sampler.close()

    asyncio.run(main())


def test_an_engine_without_adapters_loads_whole_weights(tmp_path: Path) -> None:
    async def main() -> None:
        one = Sampler(max_adapters=0)
        asked = [one.asks(adapter(tmp_path, n), f"r{n}", "client") for n in (1, 2)]
        assert await one.names() == ["r1:0"]
        one.worker.finish("r1:0")
        await asked[0]
        assert await one.names() == ["r2:0"]
        taken = [call[1][0] for call in one.worker.calls if call[0] == "take_saved"]
        assert taken == [1, 2]
        assert [each.adapter for each in one.worker.running] == [0]
        one.worker.finish("r2:0")
        await asked[1]
        await one.sampler.close()

    asyncio.run(main())

"""A policy that the engine of another one's replica serves: its calls, and its shared fate."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster.calls import Worker, WorkerDied
from actors.rollout.policy_worker import PolicyHandle, PolicyWorker
from actors.rollout.rollout_actor import RolloutActor
from actors.store import store_writer
from rlsys.engines.generation.shared_engine import PolicyEngines
from rlsys.environments.workers.generation_broker import Ask
from rlsys.runs.observe.trace import COUNTER, TraceBatch, Tracer
from rlsys.types import GenerationRequest, SamplingParams
from tests.actors.test_rollout_actor import VERSION, Engine, Store


async def answered(policy: str, method: str, *args: Any) -> tuple[Any, ...]:
    return policy, method, *args


REQUEST = GenerationRequest(
    request_id="0.0.0", prompt_token_ids=(5,), sampling=SamplingParams(max_tokens=8), seed=0
)
ACTOR = SimpleNamespace(for_policy=SimpleNamespace(remote=answered))


class Owner(Worker):
    """Worker without a process."""

    def __init__(self) -> None:
        super().__init__("rollout-0", ACTOR, timeout_s=60)
        self.num_ended = 0

    def _end_process(self) -> None:
        self.num_ended += 1


def test_calls_name_their_policy() -> None:
    worker = PolicyWorker("rival-rollout-0", Owner(), "rival")
    call = worker.call("import_weights", "manifest", None, "share")
    assert asyncio.run(call) == ("rival", "import_weights", "manifest", None, "share")
    sent: PolicyHandle = pickle.loads(pickle.dumps(PolicyHandle(answered, "rival")))
    assert not hasattr(sent, "_unknown")


@pytest.mark.parametrize("ends_owner", [False, True])
def test_both_workers_of_a_process_end_together(ends_owner: bool) -> None:
    owner = Owner()
    worker = PolicyWorker("rival-rollout-0", owner, "rival")
    assert [owner.is_dead, worker.is_dead] == [False, False]
    (owner if ends_owner else worker).end("it hangs")
    assert [owner.is_dead, worker.is_dead] == [True, True]
    assert owner.cause == "it hangs"
    worker.kill()
    owner.kill()
    assert owner.num_ended == 1
    with pytest.raises(WorkerDied):
        asyncio.run(owner.call("collect"))


class Named(Engine):
    """Engine that records how many requests it got."""

    num_requests = 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        super().submit(requests)
        self.num_requests += len(requests)

    async def collect(self) -> list[Any]:
        while not self.requests:  # noqa: ASYNC110 - the fake engine has no event for it
            await asyncio.sleep(0)
        return await super().collect()

    async def progress(self) -> list[Any]:
        return []


class Held(Named):
    """Engine whose requests end once `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def collect(self) -> list[Any]:
        await self.may_end.wait()
        return await super().collect()


def test_an_actor_samples_turns_with_the_engine_of_their_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_writer, "StoreClient", lambda address: Store())
    own: Any = Named()
    rival: Any = Named()
    engines = PolicyEngines(own=own, others={"rival": rival})
    actor_class: Any = RolloutActor.__ray_actor_class__  # type: ignore[attr-defined]
    gauges: Any = SimpleNamespace(set=lambda name, value: None)
    actor = actor_class(lambda: engines, None, gauges, None, Tracer("rollout-0"))
    ask = Ask(episode="0.0", turn=0, request=REQUEST)

    async def scenario() -> None:
        await actor.for_policy("rival", "ask", "environment-0", [ask], [])
        (turn,) = await actor.for_policy("rival", "answers", "environment-0")
        assert turn.policy_versions.tolist() == [VERSION] * 2
        assert (own.num_requests, rival.num_requests) == (0, 1)
        await actor.ask("environment-0", [ask], [])
        await actor.answers("environment-0")
        assert (own.num_requests, rival.num_requests) == (1, 1)
        batches = [await actor.drain_trace(), await actor.for_policy("rival", "drain_trace")]
        assert [batch.process for batch in batches] == ["rollout-0", "rival-rollout-0"]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_counters_of_a_shared_engine_are_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever policy collects, they are those of the actor."""
    monkeypatch.setattr(store_writer, "StoreClient", lambda address: Store())
    shown: list[str] = []
    gauges: Any = SimpleNamespace(set=lambda name, value: shown.append(name))
    own: Any = Named()
    rival: Any = Named()
    engines = PolicyEngines(own=own, others={"rival": rival})
    actor_class: Any = RolloutActor.__ray_actor_class__  # type: ignore[attr-defined]
    actor = actor_class(lambda: engines, None, gauges, None, Tracer("rollout-0"))

    async def scenario() -> None:
        await actor.for_policy("rival", "submit", [REQUEST], {})
        await actor.for_policy("rival", "collect")
        assert counters(await actor.drain_trace()) == {"running", "waiting"}
        assert counters(await actor.for_policy("rival", "drain_trace")) == set()
        assert shown.count("engine_running") == 1

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_turns_of_episodes_are_work_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has a request for 3 s, 1 s after the start, and 2 s pass after its end."""
    monkeypatch.setattr(store_writer, "StoreClient", lambda address: Store())
    now_ns = 0
    gauges: Any = SimpleNamespace(set=lambda name, value: None)
    own: Any = Held()
    rival: Any = Held()
    engines = PolicyEngines(own=own, others={"rival": rival})
    actor_class: Any = RolloutActor.__ray_actor_class__  # type: ignore[attr-defined]
    tracer = Tracer("rollout-0", clock=lambda: now_ns)
    actor = actor_class(lambda: engines, None, gauges, None, tracer)
    ask = Ask(episode="0.0", turn=0, request=REQUEST)

    async def times() -> list[tuple[float, float]]:
        batches = [await actor.drain_trace(), await actor.for_policy("rival", "drain_trace")]
        return [(batch.work_s, batch.wait_s) for batch in batches]

    async def turn(engine: Held, ask_of: Any, answers_of: Any) -> None:
        nonlocal now_ns
        now_ns += 1_000_000_000
        await ask_of("environment-0", [ask], [])
        now_ns += 3_000_000_000
        engine.may_end.set()
        await answers_of("environment-0")
        now_ns += 2_000_000_000

    async def scenario() -> None:
        await turn(own, actor.ask, actor.answers)
        assert await times() == [(3.0, 3.0), (0.0, 6.0)]
        rivals = (
            partial(actor.for_policy, "rival", "ask"),
            partial(actor.for_policy, "rival", "answers"),
        )
        await turn(rival, *rivals)
        assert await times() == [(3.0, 3.0), (3.0, 3.0)]  # they share the engine

    asyncio.run(asyncio.wait_for(scenario(), 60))


def counters(batch: TraceBatch) -> set[str]:
    """Return the names of the counters in a batch."""
    return {name for phase, name, *_ in batch.events if phase == COUNTER}

"""The API without HTTP, over a backend without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.tinker_server import trained_models
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.futures import Answer, Failure
from rlsys.tinker_server.protobuf_messages import DatumSpan, WireDatum, WirePass
from rlsys.tinker_server.server_checkpoints import ServerCheckpoints
from rlsys.tinker_server.tinker_service import ServerLimits, Service
from tests.tinker_server.clocks import Clock
from tests.tinker_server.fake_backend import FakeBackend, FakeTrainer
from tests.tinker_server.refusals import refused


@dataclass
class Server:
    service: Service
    backend: FakeBackend
    clock: Clock
    session: str = ""
    model: str = ""
    digest: bytes = b""

    @property
    def trainer(self) -> FakeTrainer:
        return self.backend.trainers[self.model]

    async def create(self) -> None:
        self.session = self.service.create_session({})["session_id"]
        self.model = f"{self.session}:train:0"
        body = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 8},
        }
        answer = await self.answer(self.service.training.create_model(body, b"create"))
        assert answer["model_id"] == self.model

    def sent(self, seq_id: int, **fields: Any) -> dict[str, Any]:
        return {"model_id": self.model, "seq_id": seq_id, **fields}

    def passes(self, seq_id: int, *, tokens: int = 3, forward_only: bool = False) -> str:
        ids = np.arange(1, tokens + 1, dtype=np.int32)
        datum = WireDatum(token_ids=ids, tensors={"target_tokens": ids.astype(np.int64) + 1})
        sent = WirePass(
            model_id=self.model,
            seq_id=seq_id,
            data=[datum],
            loss="cross_entropy",
            config={},
            forward_only=forward_only,
        )
        return self.service.training.forward_backward(sent, b"%d" % seq_id, 100)

    def step(self, seq_id: int) -> str:
        body = self.sent(seq_id, adam_params={})
        return self.service.training.optim_step(body, b"%d" % seq_id)

    def save_for_sampler(self, seq_id: int, **fields: Any) -> str:
        return self.service.training.save_weights_for_sampler(
            self.sent(seq_id, **fields), b"%d" % seq_id
        )

    async def outcome(self, future: str) -> Answer | Failure:
        found = await self.service.futures.wait(future, 5.0)
        assert found is not None, future
        return found

    async def answer(self, future: str) -> dict[str, Any]:
        found = await self.outcome(future)
        assert isinstance(found, Answer), found
        body: dict[str, Any] = json.loads(found.body)
        return body

    async def failure(self, future: str) -> Failure:
        found = await self.outcome(future)
        assert isinstance(found, Failure)
        return found

    def sample(self, sampling: str, seq_id: int = 0, **fields: Any) -> dict[str, Any]:
        return self.service.sampling.sample(
            {
                "sampling_session_id": sampling,
                "seq_id": seq_id,
                "num_samples": 2,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                "sampling_params": {"max_tokens": 2},
                **fields,
            }
        )


def run(
    tmp_path: Path,
    scenario: Callable[[Server], Awaitable[None]],
    limits: ServerLimits | None = None,
) -> None:
    @asynccontextmanager
    async def server() -> AsyncIterator[Server]:
        backend, clock = FakeBackend(), Clock()
        service = Service(
            backend, ServerCheckpoints(tmp_path), clock=clock, limits=limits or ServerLimits()
        )
        async with service.running():
            yield Server(service, backend, clock)

    async def whole() -> None:
        async with server() as one:
            await scenario(one)

    asyncio.run(asyncio.wait_for(whole(), 20))


def test_commands_run_in_order_in_whatever_order_they_arrive(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        step = server.step(3)
        second = server.passes(2)
        await asyncio.sleep(0.01)
        assert server.trainer.calls == []
        first = server.passes(1)
        for future in (first, second, step):
            assert isinstance(await server.outcome(future), Answer)
        assert server.trainer.calls == ["forward_backward", "forward_backward", "optim_step"]

    run(tmp_path, scenario)


def test_a_command_that_is_sent_again_trains_once(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        first = server.passes(1)
        assert server.passes(1) == first
        await server.outcome(first)
        assert server.passes(1) == first
        with refused("seq_id", 1):
            server.service.training.optim_step(server.sent(1, adam_params={}), b"other")
        await server.outcome(server.step(2))
        assert server.trainer.calls == ["forward_backward", "optim_step"]

    run(tmp_path, scenario)


def test_a_step_with_an_incomplete_gradient_is_not_taken(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.passes(1)
        wrong = server.passes(2, tokens=100)  # beyond the context
        step = server.step(3)
        failure = await server.failure(wrong)
        assert failure.category == "user"
        assert failure.message.startswith("data[0]: it has 100 tokens")
        lacking = await server.failure(step)
        assert lacking.message.startswith("optim_step: ")
        assert "seq_id=2 failed: data[0]: it has 100" in lacking.message
        assert server.trainer.calls == ["forward_backward", "discard"]
        # Later commands make another step.
        await server.outcome(server.passes(4))
        assert isinstance(await server.outcome(server.step(5)), Answer)

    run(tmp_path, scenario)


def test_a_failed_forward_pass_prevents_no_step(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.passes(1)
        await server.failure(server.passes(2, tokens=100, forward_only=True))
        assert isinstance(await server.outcome(server.step(3)), Answer)

    run(tmp_path, scenario)


def test_a_dead_trainer_fails_all_commands_with_its_name_and_reason(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.trainer.fails = [PartDied("trainer-0 died during forward_backward: killed.")]
        futures = [server.passes(1), server.passes(2), server.step(3)]
        for future in futures:
            failure = await server.failure(future)
            assert failure.category == "server"
            assert failure.message.startswith("trainer-0 died during forward_backward: killed.")
            assert server.model in failure.message
        later = await server.failure(server.step(4))  # later commands too
        assert later.message == failure.message
        await asyncio.sleep(0.01)
        assert server.trainer.is_closed

    run(tmp_path, scenario)


def test_a_model_that_cannot_start_fails_with_the_reason(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.backend.fails = [ValueError("no layer of that name.")]
        session = server.service.create_session({})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        failure = await server.failure(server.service.training.create_model(body, b"x"))
        assert failure == Failure(message="no layer of that name.", category="user")
        with refused("base_model", "other", status=404):
            server.service.training.create_model(
                {**body, "base_model": "other", "model_seq_id": 1}, b"y"
            )

    run(tmp_path, scenario)


def test_waiting_for_a_missing_command_has_a_time_limit(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        failure = await server.failure(server.passes(2))
        assert "0.05 s" in failure.message
        assert "seq_id=1," in failure.message
        assert server.trainer.calls == []

    run(tmp_path, scenario, ServerLimits(gap_timeout_s=0.05))


def test_the_ids_of_sequences_name_the_weights_that_sampled_them(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.passes(1)
        server.step(2)
        named = await server.answer(server.save_for_sampler(3, path="first"))
        assert named["path"] == f"tinker://{server.model}/sampler_weights/first"
        made = await server.answer(server.save_for_sampler(4, sampling_session_seq_id=0))
        sampling = made["sampling_session_id"]
        assert server.service.sampling.sampler(sampling) == {
            "sampler_id": sampling,
            "base_model": "tiny",
            "model_path": f"tinker://{server.model}/sampler_weights/step-000001-2",
        }
        sampled = server.sample(sampling)
        path = f"tinker://{server.model}/sampler_weights/step-000001-2"
        assert sampled["sample_sequence_ids"] == [
            f"{sampling}:0:0@{path}",
            f"{sampling}:0:1@{path}",
        ]
        assert isinstance(await server.outcome(sampled["request_id"]), Answer)
        weights, requests = server.backend.sampled[0]
        assert (weights.path, weights.number, len(requests)) == (path, 2, 2)
        base = server.service.sampling.create_session(
            {"session_id": server.session, "sampling_session_seq_id": 1, "base_model": "tiny"}
        )["sampling_session_id"]
        assert server.sample(base)["sample_sequence_ids"][0] == f"{base}:0:0@base"

    run(tmp_path, scenario)


def test_inflight_sampling_follows_the_newest_weights_and_snapshots_do_not(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        names = []
        for seq_id, kind in ((1, "inflight"), (2, "snapshot"), (3, "inflight")):
            made = await server.answer(
                server.save_for_sampler(seq_id, sampling_session_seq_id=seq_id, kind=kind)
            )
            names.append(made["sampling_session_id"])
        paths = [server.service.sampling.sampler(name)["model_path"][-1] for name in names]
        assert paths == ["3", "2", "3"]

    run(tmp_path, scenario)


def test_a_repeated_sample_request_is_sampled_once(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        body = {"session_id": server.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampling = server.service.sampling.create_session(body)["sampling_session_id"]
        assert server.service.sampling.create_session(body)["sampling_session_id"] == sampling
        first = server.sample(sampling)
        assert server.sample(sampling) == first
        await server.outcome(first["request_id"])
        assert server.sample(sampling) == first
        assert len(server.backend.sampled) == 1

    run(tmp_path, scenario)


def test_a_sample_can_be_cancelled_and_a_dead_sampler_is_reported(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        body = {"session_id": server.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampling = server.service.sampling.create_session(body)["sampling_session_id"]
        server.backend.is_free.clear()
        asked = server.sample(sampling)
        await asyncio.sleep(0.01)
        server.service.sampling.cancel({"request_id": asked["request_id"]})
        assert (await server.failure(asked["request_id"])).message == "the sample was cancelled."
        assert server.backend.num_cancelled == 1
        server.backend.is_free.set()
        server.backend.fails = [PartDied("sampler-0 died: out of memory.")]
        failure = await server.failure(server.sample(sampling, 1)["request_id"])
        assert failure.message.startswith("sampler-0 died: out of memory.")
        completions = server.service.sampling.completions(sampling, 0)
        _, (first,) = await completions.wait(behind=0, timeout_s=5)
        assert (first.request, first.size) == (f"{sampling}:0", None)
        _, found = await completions.wait(behind=1, timeout_s=5)
        assert [(one.request, one.size) for one in found] == [
            (f"{sampling}:1", None),
        ]

    run(tmp_path, scenario)


def test_a_sample_without_finite_probabilities_fails_alone(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        body = {"session_id": server.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampling = server.service.sampling.create_session(body)["sampling_session_id"]
        server.backend.fails = [FloatingPointError("the probabilities are not finite.")]
        failure = await server.failure(server.sample(sampling)["request_id"])
        assert failure.category == "user"  # the client would repeat it after "server"
        assert failure.message == "the probabilities are not finite."
        assert isinstance(await server.outcome(server.sample(sampling, 1)["request_id"]), Answer)

    run(tmp_path, scenario)


def test_without_heartbeats_a_session_ends_with_all_that_it_had(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        await server.answer(server.service.training.save_weights(server.sent(1, path="kept"), b"1"))
        server.clock.now += 599
        server.service.heartbeat({"session_id": server.session})
        server.clock.now += 599
        server.service.clean_up()
        server.service.heartbeat({"session_id": server.session})
        server.clock.now += 601
        server.service.clean_up()
        await asyncio.sleep(0.01)
        assert server.trainer.is_closed
        with refused("session_id", server.session, status=410):
            server.service.heartbeat({"session_id": server.session})
        with refused("model_id", server.model, status=404):
            server.step(2)
        # Another model can load the checkpoint.
        old = server.model
        other = server.service.create_session({})["session_id"]
        body = {
            "session_id": other,
            "model_seq_id": 0,
            "path": f"tinker://{old}/weights/kept",
            "optimizer": True,
        }
        made = await server.answer(server.service.training.load_weights(body, b"load"))
        assert made["model_id"] == f"{other}:train:0"
        assert server.backend.trainers[made["model_id"]].calls == ["load optimizer=True"]

    run(tmp_path, scenario)


def test_a_checkpoint_that_is_deleted_while_its_load_waits_is_reported(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        await server.answer(server.service.training.save_weights(server.sent(1, path="a"), b"1"))
        path = f"tinker://{server.model}/weights/a"
        body = {"session_id": server.session, "model_seq_id": 1, "path": path}
        loading = server.service.training.load_weights(body, b"load")
        await server.service.management.delete(path)
        failure = await server.failure(loading)
        assert failure.category == "user"
        assert failure.message.startswith(f"path={path!r}: ")
        assert "deleted" in failure.message
        assert "saved.json" not in failure.message

    run(tmp_path, scenario)


def test_the_number_of_models_is_limited(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        body = {"session_id": server.session, "model_seq_id": 1, "base_model": "tiny"}
        with refused("max_models", 1, status=403):
            server.service.training.create_model(body, b"x")
        await server.outcome(server.service.training.unload({"model_id": server.model}))
        await server.outcome(server.service.training.create_model(body, b"x"))
        await asyncio.sleep(0.01)
        assert server.trainer.is_closed

    run(tmp_path, scenario, ServerLimits(max_models=1))


async def other_model(server: Server) -> str:
    """Create a session and its model as a client does: room first. Return the session."""
    session: str = server.service.create_session({})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    await server.service.make_room(body)
    await server.answer(server.service.training.create_model(body, b"create"))
    return session


def test_silent_sessions_make_room_longest_first(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.clock.now += 5
        second = await other_model(server)
        server.clock.now += 40
        third = await other_model(server)  # the first was silent for 45 s, the second for 40 s
        names = {one.name for one in server.service.sessions.all()}
        assert names == {second, third}
        await asyncio.sleep(0.01)
        assert server.trainer.is_closed

    run(tmp_path, scenario, ServerLimits(max_models=2))


def test_a_session_keeps_its_models_while_there_is_room(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.clock.now += 500
        await other_model(server)
        assert len(server.service.models.living) == 2

    run(tmp_path, scenario, ServerLimits(max_models=2))


def test_a_model_is_refused_when_all_others_have_shown_that_they_live(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.clock.now += 9
        asked = asyncio.create_task(other_model(server))
        await asyncio.sleep(0.01)
        assert not asked.done()  # the first may have ended: its heartbeat is due in a second
        server.clock.now += 1
        server.service.heartbeat({"session_id": server.session})
        with refused("max_models", 1, status=403):
            await asked
        assert not server.trainer.is_closed

    run(tmp_path, scenario, ServerLimits(max_models=1))


def test_a_waiting_client_gets_the_room_of_a_model_that_ends(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.clock.now += 9
        asked = asyncio.create_task(other_model(server))
        await asyncio.sleep(0.01)
        server.service.finish_session(server.session)
        assert await asked in {one.name for one in server.service.sessions.all()}

    run(tmp_path, scenario, ServerLimits(max_models=1))


def test_running_commands_end_when_a_model_is_unloaded(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.trainer.is_slow = True
        running, waiting = server.passes(1), server.step(2)
        await asyncio.sleep(0.01)
        server.service.training.unload({"model_id": server.model})
        for future in (running, waiting):
            assert "was unloaded" in (await server.failure(future)).message

    run(tmp_path, scenario)


def test_the_newest_sampler_weights_without_a_name_are_kept(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        await server.answer(server.save_for_sampler(1, path="named"))
        for seq_id in range(2, 13):
            made = server.save_for_sampler(seq_id, sampling_session_seq_id=seq_id)
            await server.outcome(made)
        listed = server.service.management.checkpoints_of(server.model)["checkpoints"]
        kept = {one["checkpoint_id"] for one in listed}
        assert kept == {"sampler_weights/named"} | {
            f"sampler_weights/step-000000-{number}" for number in range(5, 13)
        }

    run(tmp_path, scenario)


def test_a_session_with_much_data_waiting_is_refused_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass has 100 bytes here. The client repeats a request that is refused with 429."""
    monkeypatch.setattr(trained_models, "MAX_WAITING_BYTES", 250)

    async def scenario(server: Server) -> None:
        await server.create()
        server.trainer.is_slow = True
        server.passes(1)
        await asyncio.sleep(0.01)  # it runs
        futures = [server.passes(3), server.passes(4)]
        with refused("max_waiting_bytes", 250, status=429):
            server.passes(5)
        assert server.passes(4) == futures[1]
        server.passes(2)  # the others wait for it
        with refused("max_waiting_bytes", 250, status=429):
            server.passes(5)
        server.step(5)
        other = Server(server.service, server.backend, server.clock)
        await other.create()
        assert isinstance(await other.outcome(other.passes(1)), Answer)

    run(tmp_path, scenario)


def test_recorded_sequences_are_trained_on_in_their_own_session(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        body = {"session_id": server.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampling = server.service.sampling.create_session(body)["sampling_session_id"]
        sequence_id = server.sample(sampling)["sample_sequence_ids"][0]
        recorded = server.sample(sampling, 1, record_stability_info=True)
        await server.outcome(recorded["request_id"])

        def sent(seq_id: int, sequence: str) -> str:
            # The fake backend samples the tokens 7 and 8 after the prompt 1 and 2.
            spans = [
                DatumSpan(is_sampled=False, sequence_id=sequence, offset=1, length=1),
                DatumSpan(is_sampled=True, sequence_id=sequence, offset=0, length=2),
            ]
            datum = WireDatum(
                token_ids=np.array([1, 2, 7], np.int32),
                tensors={
                    "target_tokens": np.array([2, 7, 8]),
                    "advantages": np.array([0.0, 1.0, 1.0], np.float32),
                },
                input_spans=[replace(spans[0], offset=0, length=2), replace(spans[1], length=1)],
                target_spans=spans,
            )
            asked = WirePass(
                model_id=server.model,
                seq_id=seq_id,
                data=[datum],
                loss="stable_reinforce",
                config={},
                forward_only=False,
            )
            return server.service.training.forward_backward(asked, b"%d" % seq_id, 100)

        failure = await server.failure(sent(1, sequence_id))
        assert (failure.category, sequence_id in failure.message) == ("user", True)
        assert isinstance(await server.outcome(sent(2, recorded["sample_sequence_ids"][0])), Answer)
        (row,) = server.trainer.rows
        assert row.columns["sampler_logprobs"].tolist() == [0.0, -0.5, -0.25]
        assert row.columns["sampled"].tolist() == [0.0, 1.0, 1.0]

    run(tmp_path, scenario)

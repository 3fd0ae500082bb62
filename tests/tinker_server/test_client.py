"""The unmodified client against the server, over a backend without a model."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from actors.tinker_server.http_server import HttpServer
from rlsys.tinker_server import checkpoint_lifetimes
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.http_app import Api
from rlsys.tinker_server.server_checkpoints import ServerCheckpoints
from rlsys.tinker_server.tinker_service import ServerLimits, Service
from tests.tinker_server.clocks import Clock
from tests.tinker_server.fake_backend import FakeBackend, FakeTrainer

KEY = "tml-a-key-for-tests"
LIMIT_S = 20.0


@dataclass
class Served:
    url: str
    backend: FakeBackend
    service: Service
    clock: Clock
    clients: list[tinker.ServiceClient] = field(default_factory=list)

    def client(self) -> tinker.ServiceClient:
        self.clients.append(tinker.ServiceClient(base_url=self.url, api_key=KEY))
        return self.clients[-1]

    def close(self) -> None:
        """Close all clients, which otherwise send heartbeats to the end of the process."""
        for client in self.clients:
            client.close("success").result(LIMIT_S)

    @property
    def trainer(self) -> FakeTrainer:
        return list(self.backend.trainers.values())[-1]


@contextmanager
def served(
    tmp_path: Path, *, max_models: int = 100, make: Callable[[], Any] = FakeBackend
) -> Iterator[Served]:
    started: list[tuple[HttpServer, Any, Service]] = []
    clock = Clock()

    async def main() -> None:
        backend = make()
        await backend.start()
        limits = ServerLimits(max_models=max_models)
        service = Service(backend, ServerCheckpoints(tmp_path), clock=clock, limits=limits)
        api = Api(service, key=KEY, max_body_bytes=1 << 20)
        started.append((HttpServer(api, grace_s=1, port=0), backend, service))
        await started[0][0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    is_up = threading.Event()
    while not (started and started[0][0].started):
        assert thread.is_alive()
        is_up.wait(0.01)
    server, backend, service = started[0]
    port = server.servers[0].sockets[0].getsockname()[1]
    made = Served(f"http://127.0.0.1:{port}", backend, service, clock)
    try:
        yield made
        made.close()
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("server")) as one:
        yield one


def datum(size: int = 3) -> types.Datum:
    tokens = list(range(1, size + 1))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": [token + 1 for token in tokens],
            "weights": np.ones(size, np.float32),
        },
    )


def training_client(server: Served) -> tinker.TrainingClient:
    client: tinker.TrainingClient = (
        server.client().create_lora_training_client(base_model="tiny", rank=8).result()
    )
    return client


@pytest.mark.slow
def test_a_script_that_ended_makes_room_for_the_next(tmp_path: Path) -> None:
    """The client sends nothing when its process exits."""
    script = (
        "import sys, tinker\n"
        "client = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])\n"
        "client.create_lora_training_client(base_model='tiny', rank=8).result()\n"
    )
    with served(tmp_path, max_models=1) as server:
        for _ in range(2):
            command = [sys.executable, "-c", script, server.url, KEY]
            subprocess.run(command, check=True, timeout=60)
            server.clock.now += 31
        assert [one.is_closed for one in server.backend.trainers.values()] == [True, False]
        training_client(server)
        assert len(server.service.models.living) == 1


def test_prompt_log_probabilities_follow_the_clients_documentation(server: Served) -> None:
    sampler = server.client().create_sampling_client(base_model="tiny").result()
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=1)

    def found(**options: Any) -> list[float | None] | None:
        answer = sampler.sample(prompt, 1, params, **options).result(LIMIT_S)
        logprobs: list[float | None] | None = answer.prompt_logprobs
        return logprobs

    assert found() is None
    assert found(include_prompt_logprobs=True) == [None, -1.0, -2.0]
    last = found(include_prompt_logprobs=True, prompt_logprobs_last_n=1)
    assert last == [None, None, -2.0]
    assert sampler.compute_logprobs(types.ModelInput.from_ints([1])).result(LIMIT_S) == [None]
    for wrong in (0, 3):
        with pytest.raises((ValueError, tinker.UnprocessableEntityError)) as raised:
            found(include_prompt_logprobs=True, prompt_logprobs_last_n=wrong)
        assert "prompt_logprobs_last_n" in str(raised.value)


def test_stable_reinforce_trains_on_recorded_sequences(server: Served) -> None:
    client = training_client(server)
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    params = types.SamplingParams(max_tokens=2)
    asked = sampler.sample(types.ModelInput.from_ints([1, 2]), 1, params).result(LIMIT_S)
    (sequence,) = asked.sequences
    name = sequence.sequence_id
    plain = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 7]),
        loss_fn_inputs={
            "target_tokens": [0, *sequence.tokens],
            "advantages": np.array([0, 1, 1], np.float32),
        },
    )
    known = plain.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=2),
            types.SampledProvenanceSpan(sequence_id=name, length=1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=1),
            types.SampledProvenanceSpan(sequence_id=name, length=2),
        ],
    )
    config = {"kl_coeff": 0.02}
    passed = client.forward_backward([known], "stable_reinforce", config).result(LIMIT_S)
    assert len(passed.loss_fn_outputs) == 1
    (row,) = server.trainer.rows
    assert row.columns["sampler_logprobs"].tolist() == [0.0, -0.5, -0.25]


def test_top_k_of_samples_is_at_their_temperature_and_of_prompts_at_1(server: Served) -> None:
    """The fake's numbers of a row are −1 / temperature, −2 / temperature, ..."""
    sampler = server.client().create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(temperature=0.5, stop=[])
    found = sampler.sample(
        types.ModelInput.from_ints([1, 2, 3]),
        1,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=1,
        topk_sample_logprobs=1,
    ).result(LIMIT_S)
    assert found.prompt_logprobs == [None, -1.0, -2.0]
    assert (found.topk_prompt_logprobs or [])[1:] == [[(2, -1.0)], [(3, -2.0)]]
    assert found.sequences[0].topk_logprobs == [[(7, -6.0)], [(8, -8.0)]]
    (_, (sampled,)) = server.backend.sampled[-1]
    assert (sampled.sampling.temperature, sampled.sampling.stop_at_eos) == (0.5, False)


def test_train_save_sample(server: Served) -> None:
    client = training_client(server)
    info = client.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == ("tiny", 8, True)
    passed = client.forward_backward([datum(), datum(2)], "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=0.25))
    found = passed.result(LIMIT_S)
    assert found.metrics == {"loss:sum": 2.0}
    assert [one["logprobs"].data for one in found.loss_fn_outputs] == [[-1.0] * 3, [-1.0] * 2]
    assert stepped.result(LIMIT_S).metrics == {"learning_rate": 0.25}
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=2, stop="x")
    asked = sampler.sample(types.ModelInput.from_ints([1, 2]), 2, params).result(LIMIT_S)
    first, second = asked.sequences
    assert (first.tokens, first.logprobs, first.stop_reason) == ([7, 8], [-0.5, -0.25], "length")
    path = f"tinker://{client.model_id}/sampler_weights/step-000001-1"
    assert [one.sequence_id.partition("@")[2] for one in (first, second)] == [path] * 2
    assert first.sequence_id != second.sequence_id
    (_, requests) = server.backend.sampled[-1]
    assert all(one.sampling.stop == ("x",) for one in requests)
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result(LIMIT_S)
    assert logprobs == [None, -1.0, -2.0]
    saved = client.save_state("here").result(LIMIT_S)
    assert saved.path == f"tinker://{client.model_id}/weights/here"
    other = server.client().create_training_client_from_state_with_optimizer(saved.path).result()
    assert other.model_id != client.model_id
    assert server.trainer.calls == ["load optimizer=True"]


def test_a_custom_loss_runs_in_the_client(server: Served) -> None:
    client = training_client(server)

    def squared(
        data: object, logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss = sum((one**2).sum() for one in logprobs)
        assert isinstance(loss, torch.Tensor)
        return loss, {"custom": 1.0}

    found = client.forward_backward_custom([datum()], squared).result(LIMIT_S)
    assert found.metrics["loss:sum"] == 3.0
    assert server.trainer.calls == ["forward", "forward_backward"]


def test_many_parts_of_a_batch_are_one_gradient(server: Served) -> None:
    client = training_client(server)
    client.holder._client_config = client.holder._client_config.model_copy(
        update={"fwdbwd_max_chunk_len": 2}
    )
    found = client.forward_backward([datum() for _ in range(7)], "cross_entropy").result(LIMIT_S)
    assert len(found.loss_fn_outputs) == 7
    assert found.metrics == {"loss:sum": 7.0}
    assert server.trainer.calls == ["forward_backward"] * 4


def test_failures_are_raised_where_their_results_are_awaited(server: Served) -> None:
    client = training_client(server)
    wrong = client.forward_backward([datum(100)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError) as raised:
        wrong.result(LIMIT_S)
    assert "data[0]: " in str(raised.value)
    assert "100 tokens" in str(raised.value)
    assert raised.value.category is types.RequestErrorCategory.User
    unknown = client.forward_backward([datum()], "custom")
    with pytest.raises(tinker.RequestFailedError) as raised:
        unknown.result(LIMIT_S)
    assert "loss_fn='custom'" in str(raised.value)
    with pytest.raises(tinker.RequestFailedError) as raised:
        client.optim_step(types.AdamParams()).result(LIMIT_S)
    assert "optim_step: " in str(raised.value)


def test_a_dead_trainer_is_named(server: Served) -> None:
    client = training_client(server)
    server.trainer.fails = [PartDied("trainer-0 died during optim_step: killed.")]
    stepped = client.optim_step(types.AdamParams())
    later = client.save_state("x")
    for future in (stepped, later):
        with pytest.raises(tinker.RequestFailedError) as raised:
            future.result(LIMIT_S)
        assert "trainer-0 died during optim_step" in str(raised.value)
        assert raised.value.category is types.RequestErrorCategory.Server


def test_a_sample_that_is_refused_is_raised(server: Served) -> None:
    sampler = server.client().create_sampling_client(base_model="tiny").result()
    with pytest.raises(tinker.UnprocessableEntityError) as refused:
        sampler.sample(
            types.ModelInput.from_ints([1] * 64), 1, types.SamplingParams(max_tokens=1)
        ).result(LIMIT_S)
    assert "prompt: " in str(refused.value)
    assert "64 tokens" in str(refused.value)
    missing = "tinker://nobody/sampler_weights/x"
    with pytest.raises(tinker.NotFoundError) as absent:
        server.client().create_sampling_client(model_path=missing).result()
    assert missing in str(absent.value)


def test_another_key_is_refused(server: Served) -> None:
    with pytest.raises(tinker.AuthenticationError) as found:
        tinker.ServiceClient(base_url=server.url, api_key="tml-another").create_sampling_client(
            base_model="tiny"
        ).result()
    assert "TINKER_API_KEY: " in str(found.value)
    bearer = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{server.url}/api/v1/healthz", headers=bearer).status_code == 200
    assert httpx.get(f"{server.url}/api/v1/healthz").status_code == 401


def test_bodies_have_a_size_also_when_they_are_unpacked(server: Served) -> None:
    import zstandard

    url, key = f"{server.url}/api/v1/forward_backward", {"x-api-key": KEY}
    kind = {"content-type": "application/x-protobuf"}
    large = httpx.post(url, headers={**key, **kind}, content=bytes(2 << 20))
    assert (large.status_code, "1048576 bytes" in large.json()["error"]) == (413, True)
    packed = zstandard.compress(bytes(2 << 20))
    bomb = httpx.post(url, headers={**key, **kind, "content-encoding": "zstd"}, content=packed)
    assert (bomb.status_code, "1048576 bytes" in bomb.json()["error"]) == (413, True)
    wrong = httpx.post(url, headers={**key, "content-type": "application/json"}, content=b"{}")
    assert wrong.status_code == 415
    unknown = httpx.post(
        f"{server.url}/api/v1/optim_step", headers=key, json={"model_id": "m", "seq_id": 1}
    )
    assert (unknown.status_code, "model_id='m'" in unknown.json()["error"]) == (404, True)
    bare = httpx.post(f"{server.url}/api/v1/optim_step", headers=key, content=b"[1]")
    assert bare.status_code == 400
    assert bare.json()["error"].startswith("body: ")


def test_checkpoints_outlive_their_client(server: Served) -> None:
    with server.client() as service:
        client = service.create_lora_training_client(base_model="tiny", rank=8).result()
        saved = [client.save_state(name).result(LIMIT_S).path for name in ("a", "b")]
        trainer = server.trainer
    assert trainer.is_closed
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    listed = rest.list_checkpoints(client.model_id).result(LIMIT_S)
    assert [one.tinker_path for one in listed.checkpoints] == saved
    info = rest.get_weights_info_by_tinker_path(saved[0]).result(LIMIT_S)
    assert (info.base_model, info.lora_rank, info.train_unembed) == ("tiny", 8, False)
    rest.delete_checkpoint(client.model_id, "weights/a").result(LIMIT_S)
    listed = rest.list_checkpoints(client.model_id).result(LIMIT_S)
    assert [one.tinker_path for one in listed.checkpoints] == saved[1:]


def test_a_full_disk_is_raised_at_once_and_harms_no_checkpoint(server: Served) -> None:
    client = training_client(server)
    saved = client.save_state("kept").result(LIMIT_S).path
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    full = OSError(errno.ENOSPC, "no space")
    server.trainer.fails = [full]
    with pytest.raises(tinker.RequestFailedError) as raised:
        client.save_state("more").result(LIMIT_S)
    assert raised.value.category is types.RequestErrorCategory.Server
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_lifetimes, "write_atomically", _raises(full))
        patch.setattr(os, "link", _raises(full))
        patch.setattr(shutil, "copy2", _raises(full))
        for call in (
            lambda: rest.set_checkpoint_ttl_from_tinker_path(saved, 3600),
            lambda: rest.copy_weights(saved, "project"),
        ):
            with pytest.raises(tinker.UnprocessableEntityError):
                call().result(LIMIT_S)
    listed = rest.list_checkpoints(client.model_id).result(LIMIT_S)
    assert [one.tinker_path for one in listed.checkpoints] == [saved]
    assert client.save_state("more").result(LIMIT_S).path.endswith("/weights/more")


def _raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_retried_request_is_the_same_future(server: Served) -> None:
    client = training_client(server)
    body = {"model_id": client.model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
    url, key = f"{server.url}/api/v1/optim_step", {"x-api-key": KEY}
    answers = [httpx.post(url, headers=key, json=body).json() for _ in range(3)]
    assert answers == [{"request_id": f"{client.model_id}:1"}] * 3
    fetched = httpx.post(
        f"{server.url}/api/v1/retrieve_future",
        headers=key,
        json={"request_id": answers[0]["request_id"]},
    )
    assert fetched.json() == {"metrics": {"learning_rate": 0.5}}
    assert server.trainer.calls == ["optim_step"]

"""Several real clients and real engines in one process: they share a base model and a batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tinker
from tinker import types

from scripts.bench.environment_primitives import build_model
from scripts.bench.tinker_clients import Client, Work, flood
from tests.tinker_server.local_backend import LocalBackend, without_ray
from tests.tinker_server.test_client import KEY, Served, served

STEPS, TOKENS = 2, 8
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("server")
    model = build_model(directory / "model")
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        with served(directory / "checkpoints", make=lambda: LocalBackend(model)) as one:
            yield one


def client(server: Served, number: int) -> Client:
    return Client(server.url, number, key=KEY)


def test_clients_train_at_once_as_each_does_alone(server: Served) -> None:
    """Meanwhile another client asks for many samples and ends in the middle of them."""
    clients = [client(server, number) for number in range(3)]
    alone = [one.train(Work(num_steps=STEPS, num_tokens=TOKENS)) for one in clients]
    for one in clients:
        one.close()
    clients = [client(server, number) for number in range(3)]
    is_ready, is_over = threading.Event(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        flooding = pool.submit(flood, server.url, 3, is_ready, is_over, num_requests=40, key=KEY)
        training = [
            pool.submit(one.train, Work(num_steps=STEPS, num_tokens=TOKENS)) for one in clients
        ]
        together = [one.result(LIMIT_S) for one in training]
        is_over.set()
        flooding.result(LIMIT_S)
    for one in clients:
        one.close()
    differences = [one.difference(two) for one, two in zip(alone, together, strict=True)]
    assert max(differences) <= 1e-6
    assert len({tuple(one.logprobs[-1]) for one in together}) == 3
    backend: LocalBackend = server.backend  # type: ignore[assignment]
    assert [one.is_shared for one in backend.hosts] == [True]


def test_weights_of_all_clients_are_sampled_in_one_batch_and_scored(server: Served) -> None:
    clients = [client(server, number) for number in range(2)]
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    samplers = {"base": service.create_sampling_client(base_model="tiny").result()}
    for one in clients:
        for step in range(2):
            one.train(Work(num_steps=1, num_tokens=TOKENS))
            path = one.client.save_weights_for_sampler(f"mark-{step}").result().path
            samplers[path] = service.create_sampling_client(model_path=path).result()
    prompt, params = (
        types.ModelInput.from_ints([3, 4, 5]),
        types.SamplingParams(max_tokens=8, seed=7),
    )
    asked = {name: one.sample(prompt, 2, params) for name, one in samplers.items()}
    found = set()
    for name, future in asked.items():
        sequences = future.result(LIMIT_S).sequences
        assert {one.sequence_id.partition("@")[2] for one in sequences} == {name}
        first = sequences[0]
        tokens = types.ModelInput.from_ints([3, 4, 5, *first.tokens])
        scored = samplers[name].compute_logprobs(tokens).result(LIMIT_S)
        assert np.allclose(scored[3:], first.logprobs, atol=1e-4), name
        found.add(tuple(first.logprobs))
    assert len(found) == 5
    for one in clients:
        one.close()
    service.close("success").result(LIMIT_S)


def test_samples_of_other_seeds_are_others(server: Served) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([3, 4, 5])
    params = [types.SamplingParams(max_tokens=16, seed=seed) for seed in (7, 7, 8, 7 + 2**31 - 1)]
    asked = [sampler.sample(prompt, 8, one) for one in params]
    first, again, *others = (
        [tuple(one.tokens) for one in future.result(LIMIT_S).sequences] for future in asked
    )
    assert first == again
    long = {one for one in first if len(one) > 8}
    assert long
    assert not long & {one for other in others for one in other}
    service.close("success").result(LIMIT_S)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_the_top_k_and_the_log_probability_of_a_sampled_token_agree(
    server: Served, temperature: float
) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([3, 4, 5])

    def sampled(temperature: float) -> types.SampleResponse:
        params = types.SamplingParams(max_tokens=16, temperature=temperature, seed=7)
        options = {"topk_prompt_logprobs": 4, "topk_sample_logprobs": 8}
        return sampler.sample(prompt, 2, params, **options).result(LIMIT_S)

    found = sampled(temperature)
    pairs = [
        (logprob, dict(top)[token])
        for one in found.sequences
        for token, logprob, top in zip(
            one.tokens, one.logprobs or [], one.topk_logprobs or [], strict=True
        )
        if token in dict(top or [])
    ]
    assert len(pairs) >= 2
    own, in_top = np.array(pairs).T
    np.testing.assert_allclose(own, in_top, atol=1e-4)
    assert found.topk_prompt_logprobs == sampled(1.0).topk_prompt_logprobs
    service.close("success").result(LIMIT_S)


def test_an_empty_list_of_stops_disables_the_end_of_sequence(server: Served) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    sampler = service.create_sampling_client(base_model="tiny").result()

    def lengths(**stop: object) -> list[tuple[int, str]]:
        params = types.SamplingParams(max_tokens=32, seed=7, **stop)
        asked = sampler.sample(types.ModelInput.from_ints([3, 4, 5]), 128, params)
        return [(len(one.tokens), one.stop_reason) for one in asked.result(LIMIT_S).sequences]

    for stopped in (lengths(), lengths(stop=[7]), lengths(stop=["ab"])):
        assert {reason for _, reason in stopped} == {"stop", "length"}
    assert set(lengths(stop=[])) == {(32, "length")}
    service.close("success").result(LIMIT_S)


def test_a_state_that_cannot_be_loaded_ends_its_model_alone(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = client(server, 0), client(server, 1)
    first.train(Work(num_steps=1, num_tokens=TOKENS))
    saved = first.client.save_state("here").result(LIMIT_S).path
    backend: LocalBackend = server.backend  # type: ignore[assignment]
    engine, _ = backend.engines[-2:]

    def fail(*_: object, **__: object) -> None:
        raise KeyError("a moment")

    monkeypatch.setattr(engine, "load_weights", fail)
    with pytest.raises(tinker.RequestFailedError) as raised:
        first.client.load_state(saved).result(LIMIT_S)
    assert first.client.model_id in str(raised.value)
    assert second.train(Work(num_steps=1, num_tokens=TOKENS)).rewards
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    assert again.get_info().model_name == "tiny"
    for one in (first, second):
        one.close()
    service.close("success").result(LIMIT_S)


def test_weights_that_have_diverged_fail_their_own_samples_alone(server: Served) -> None:
    first, second = client(server, 0), client(server, 1)
    good = second.client.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints([3, 4, 5]), types.SamplingParams(max_tokens=64)
    seeded = types.SamplingParams(max_tokens=64, seed=7)
    alone = good.sample(prompt, 2, seeded).result(LIMIT_S).sequences
    backend: LocalBackend = server.backend  # type: ignore[assignment]
    engine, _ = backend.engines[-2:]
    for parameter in engine.parameters.values():
        parameter.data.fill_(1e15)
    diverged = first.client.save_weights_and_get_sampling_client().result()
    asked = [good.sample(prompt, 4, params) for _ in range(8)]
    failing = [diverged.sample(prompt, 2, params) for _ in range(3)]
    together = good.sample(prompt, 2, seeded).result(LIMIT_S).sequences
    for one in failing:
        with pytest.raises(tinker.RequestFailedError) as raised:
            one.result(LIMIT_S)
        assert f"tinker://{first.client.model_id}/" in str(raised.value)
    with pytest.raises(tinker.RequestFailedError):
        diverged.compute_logprobs(prompt).result(LIMIT_S)
    for one in asked:
        assert len(one.result(LIMIT_S).sequences) == 4
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.logprobs for one in together] == [one.logprobs for one in alone]
    assert good.compute_logprobs(prompt).result(LIMIT_S)
    assert backend.samplers == ["sampler-0"]
    first.close()
    second.close()

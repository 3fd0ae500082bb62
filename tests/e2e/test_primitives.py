"""A real server process with the unmodified client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from scripts.bench.environment_primitives import KEY, NAME, build_model, grpo, serving

pytestmark = pytest.mark.slow

LIMIT_S = 120.0

# A client that trains until it is killed. It prints the paths of the state and of the same weights
# for samplers.
CLIENT = """
import sys
import tinker
from scripts.bench.environment_primitives import NAME, grpo
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
client = service.create_lora_training_client(NAME, rank=8, seed=0).result()
for number, step in enumerate(grpo(client, 100)):
    weights = client.save_weights_for_sampler(f"step-{number}").result().path
    print(client.save_state(f"step-{number}").result().path, weights, flush=True)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("server")
    model = build_model(directory / "model")
    with serving(model, directory, "--max-models", "8") as one:
        yield one


def service(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key=KEY)


def test_grpo_learns_and_every_sequence_names_the_weights_that_sampled_it(url: str) -> None:
    client = service(url).create_lora_training_client(NAME, rank=8, seed=0).result()
    steps = list(grpo(client, 8))
    assert steps[0].reward < 0.3
    assert steps[-1].reward > 0.8
    # On-policy, the sampler and the trainer are one policy.
    assert max(step.error for step in steps) < 1e-3
    labels = [label for step in steps for label in step.labels]
    weights = f"tinker://{client.model_id}/sampler_weights/step-"
    assert labels == [f"{weights}{number:06d}-{number + 1}" for number in range(8)]


def test_older_weights_and_the_base_model_can_be_sampled_too(url: str) -> None:
    # The log-probabilities of each sample are those of the weights that it names.
    one = service(url)
    client = one.create_lora_training_client(NAME, rank=8, seed=0).result()
    samplers = {"base": one.create_sampling_client(base_model=NAME).result()}
    for step in range(3):
        list(grpo(client, 1))
        path = client.save_weights_for_sampler(f"mark-{step}").result().path
        samplers[path] = one.create_sampling_client(model_path=path).result()
    prompt = types.ModelInput.from_ints([3, 4, 5])
    params = types.SamplingParams(max_tokens=8, seed=7)
    futures = [(name, samplers[name].sample(prompt, 4, params)) for name in [*samplers, *samplers]]
    found: dict[str, list[list[float]]] = {}
    for name, future in futures:
        sequences = future.result(LIMIT_S).sequences
        assert {each.sequence_id.partition("@")[2] for each in sequences} == {name}
        first = sequences[0]
        tokens = [3, 4, 5, *first.tokens]
        scored = samplers[name].compute_logprobs(types.ModelInput.from_ints(tokens)).result(LIMIT_S)
        assert np.allclose(scored[3:], first.logprobs, atol=1e-3), name
        found.setdefault(name, []).append(first.logprobs)
    assert all(first == again for first, again in found.values())
    assert len({tuple(first) for first, _ in found.values()}) == 4


def test_a_killed_client_continues_from_its_saved_state(url: str) -> None:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, url, KEY],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(3)]
    process.send_signal(signal.SIGKILL)  # in the middle of a step
    process.wait(LIMIT_S)
    path, weights = lines[-1]
    one = service(url)
    client = one.create_training_client_from_state_with_optimizer(path).result()
    assert client.model_id not in path
    samplers = [
        one.create_sampling_client(model_path=weights).result(),
        client.save_weights_and_get_sampling_client().result(),
    ]
    tokens = types.ModelInput.from_ints([3, 4, 5, 6, 7])
    before, after = (each.compute_logprobs(tokens).result(LIMIT_S)[1:] for each in samplers)
    assert np.allclose(before, after, atol=1e-4)
    (step,) = grpo(client, 1)
    assert step.labels == {f"tinker://{client.model_id}/sampler_weights/step-000003-2"}


def test_a_dead_sampler_is_an_error_and_is_replaced(url: str) -> None:
    sampler = service(url).create_sampling_client(base_model=NAME).result()
    prompt, params = types.ModelInput.from_ints([3, 4]), types.SamplingParams(max_tokens=2000)
    sampler.sample(prompt, 1, params).result(LIMIT_S)
    running = sampler.sample(prompt, 512, params)
    _kill("SamplerActor")
    with pytest.raises(tinker.RequestFailedError) as raised:
        running.result(LIMIT_S)
    assert "sampler-0" in str(raised.value)
    assert raised.value.category is types.RequestErrorCategory.Server
    assert sampler.sample(prompt, 1, params).result(LIMIT_S).sequences


def test_the_error_of_a_dead_trainer_has_its_name(url: str) -> None:
    client = service(url).create_lora_training_client(NAME, rank=8, seed=0).result()
    list(grpo(client, 1))
    saved = client.save_state("before").result().path
    _kill("PrimitiveTrainerActor")
    with pytest.raises(tinker.RequestFailedError) as raised:
        client.optim_step(types.AdamParams()).result(LIMIT_S)
    assert re.search(r"trainer-0 of host-\d+ .*session-\w+:train:0", str(raised.value))
    again = service(url).create_training_client_from_state_with_optimizer(saved).result()
    assert next(grpo(again, 1)).labels


def _kill(actor: str) -> None:
    """Kill the processes of actors of this class that belong to this server."""
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name().startswith(f"ray::{actor}")
        or any(part.startswith(f"ray::{actor}") for part in process.cmdline())
    ]
    assert found, f"no {actor} is there"
    for process in found:
        process.kill()

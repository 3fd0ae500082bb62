"""Several clients of one real server: they share a base model, and no other's fate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import tinker

from scripts.bench.environment_primitives import KEY, NAME, build_model, serving
from scripts.bench.tinker_clients import Client, Work, flooded

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).parents[2])
STEPS, TOKENS = 3, 16

# A client that trains until it is killed.
TRAINS = """
import sys
from scripts.bench.tinker_clients import Client, Work
client = Client(sys.argv[1], 9)
print("created", flush=True)
client.train(Work(num_steps=1000, num_tokens=16))
"""

# A client that saves states until the server is gone.
SAVES = """
import itertools, sys
from scripts.bench.tinker_clients import Client, Work
client = Client(sys.argv[1], 9)
for number in itertools.count():
    client.train(Work(num_steps=1, num_tokens=8))
    print(client.client.save_state(f"step-{number}").result().path, flush=True)
"""


def start(script: str, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, url],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )


def save_until_it_fails(client: Client, paths: list[str]) -> None:
    for number in range(100):
        paths.append(client.client.save_state(f"s{number}").result(60).path)


def test_clients_train_at_once_as_each_does_alone_whatever_others_do(tmp_path: Path) -> None:
    """Meanwhile one client floods the sampler, and another is killed in the middle of a step."""
    model = build_model(tmp_path / "model")
    with serving(model, tmp_path, "--max-models", "8") as url:
        clients = [Client(url, number) for number in range(3)]
        alone = [one.train(Work(num_steps=STEPS, num_tokens=TOKENS)) for one in clients]
        for one in clients:
            one.close()
        killed = start(TRAINS, url)
        assert killed.stdout is not None
        assert killed.stdout.readline() == "created\n"
        clients = [Client(url, number) for number in range(3)]
        with flooded(url, 3), ThreadPoolExecutor(3) as pool:
            training = [
                pool.submit(one.train, Work(num_steps=STEPS, num_tokens=TOKENS)) for one in clients
            ]
            killed.send_signal(signal.SIGKILL)
            killed.wait(60)
            together = [one.result(600) for one in training]
        for one in clients:
            one.close()
    differences = [one.difference(two) for one, two in zip(alone, together, strict=True)]
    assert max(differences) <= 1e-6


def test_states_are_whole_or_absent_after_a_kill_of_the_server(tmp_path: Path) -> None:
    model = build_model(tmp_path / "model")
    with serving(model, tmp_path) as url:
        saving = start(SAVES, url)
        assert saving.stdout is not None
        answered = [saving.stdout.readline().strip() for _ in range(3)]
        (server,) = [
            one
            for one in psutil.Process().children()
            if "serve" in one.cmdline() and str(model) in one.cmdline()
        ]
        server.kill()
        saving.kill()
        saving.wait(60)
    saved = [path for path in tmp_path.glob("checkpoints/*/weights/*") if path.name[0] != "."]
    assert len(saved) >= len(answered)
    with serving(model, tmp_path, "--max-models", "64") as url:
        assert not list(tmp_path.glob("checkpoints/*/*/.*.partial"))
        rest = tinker.RestClient(base_url=url, api_key=KEY)
        listed = {one.tinker_path for one in rest.list_user_checkpoints().result(60).checkpoints}
        assert listed >= set(answered)
        assert not [path for path in listed if "/sampler_weights/" in path]  # all had no name
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        for path in sorted(listed):
            client = service.create_training_client_from_state_with_optimizer(path).result(120)
            assert client.get_info().model_name == NAME
        service.close("success").result(60)


def test_a_full_disk_fails_a_save_and_nothing_else(tmp_path: Path) -> None:
    small = tmp_path / "checkpoints"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs privileges")
    try:
        with serving(build_model(tmp_path / "model"), tmp_path) as url:
            client = Client(url, 0)
            client.train(Work(num_steps=1, num_tokens=8))
            paths: list[str] = []
            with pytest.raises(tinker.RequestFailedError) as full:
                save_until_it_fails(client, paths)
            assert full.value.category is tinker.types.RequestErrorCategory.Server
            assert paths
            rest = tinker.RestClient(base_url=url, api_key=KEY)
            listed = rest.list_checkpoints(client.client.model_id).result(60).checkpoints
            states = [one.tinker_path for one in listed if "/weights/" in one.tinker_path]
            assert states == paths
            rest.delete_checkpoint(client.client.model_id, "weights/s0").result(60)
            client.train(Work(num_steps=1, num_tokens=8))  # the sampler weights have room again
            client.close()
    finally:
        # processes of the server may still have files open
        subprocess.run(["umount", "--lazy", str(small)], check=True)

"""Management routes, by the unmodified client and its command line."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli

from rlsys.tinker_server.management_routes import URL_LIFETIME_S, UrlSigner
from tests.tiers import rest_slow
from tests.tinker_server.clocks import Clock
from tests.tinker_server.refusals import refused
from tests.tinker_server.test_client import KEY, LIMIT_S, Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as one:
        yield one


def rest(server: Served) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def trained(server: Served) -> tinker.TrainingClient:
    client: tinker.TrainingClient = (
        server.client()
        .create_lora_training_client(base_model="tiny", rank=8, user_metadata={"run": "a"})
        .result()
    )
    client.save_state("first", ttl_seconds=3600).result(LIMIT_S)
    client.save_weights_for_sampler("second").result(LIMIT_S)
    return client


def command(server: Served, *arguments: str) -> Any:
    """Run the client's command line and return its JSON."""
    environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    found = CliRunner().invoke(main_cli, ["--format", "json", *arguments], env=environment)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout) if found.stdout.strip() else None


def test_training_runs_are_listed_also_when_their_session_is_over(server: Served) -> None:
    client = trained(server)
    run = rest(server).get_training_run(client.model_id).result(LIMIT_S)
    assert (run.base_model, run.is_lora, run.lora_rank) == ("tiny", True, 8)
    assert (run.corrupted, run.user_metadata) == (False, {"run": "a"})
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.checkpoint_id == "weights/first"
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/second"
    server.close()
    server.clients.clear()
    other = trained(server)
    listed = rest(server).list_training_runs().result(LIMIT_S)
    names = {one.training_run_id for one in listed.training_runs}
    assert names == {client.model_id, other.model_id}
    assert listed.cursor.total_count == 2
    page = rest(server).list_training_runs(limit=1, offset=1).result(LIMIT_S)
    assert [one.training_run_id for one in page.training_runs] == [
        listed.training_runs[1].training_run_id
    ]
    path = f"tinker://{client.model_id}/weights/first"
    ended = rest(server).get_training_run_by_tinker_path(path).result(LIMIT_S)
    assert (ended.lora_rank, ended.base_model) == (8, "tiny")
    with pytest.raises(tinker.NotFoundError):
        rest(server).get_training_run("nobody").result(LIMIT_S)


def test_checkpoints_are_listed_expire_and_are_copied(server: Served) -> None:
    client = trained(server)
    listed = rest(server).list_user_checkpoints().result(LIMIT_S)
    second, first = listed.checkpoints
    assert (first.checkpoint_type, second.checkpoint_type) == ("training", "sampler")
    assert first.size_bytes == 1  # the fake trainer writes its number of steps, "0"
    assert first.expires_at is not None
    assert round((first.expires_at - first.time).total_seconds()) == 3600
    assert second.expires_at is None
    rest(server).set_checkpoint_ttl_from_tinker_path(first.tinker_path, None).result(LIMIT_S)
    rest(server).set_checkpoint_ttl_from_tinker_path(second.tinker_path, 7200).result(LIMIT_S)
    listed = rest(server).list_checkpoints(client.model_id).result(LIMIT_S)
    ttls = {one.checkpoint_id: one.expires_at for one in listed.checkpoints}
    assert ttls["weights/first"] is None
    assert ttls["sampler_weights/second"] is not None
    with pytest.raises(tinker.UnprocessableEntityError) as raised:
        rest(server).set_checkpoint_ttl_from_tinker_path(first.tinker_path, 60).result(LIMIT_S)
    assert "ttl_seconds" in str(raised.value)
    copied = rest(server).copy_weights(first.tinker_path, "any-project").result(LIMIT_S)
    rest(server).delete_checkpoint_from_tinker_path(first.tinker_path).result(LIMIT_S)
    again = server.client().create_training_client_from_state(copied).result()
    assert again.get_info().lora_rank == 8


def test_sessions_are_listed(server: Served) -> None:
    client = trained(server)
    session, _, _ = client.model_id.partition(":")
    assert rest(server).list_sessions().result(LIMIT_S).sessions == [session]
    found = rest(server).get_session(session).result(LIMIT_S)
    assert found.training_run_ids == [client.model_id]
    with pytest.raises(tinker.NotFoundError):
        rest(server).get_session("session-0").result(LIMIT_S)


def test_external_weights_are_downloaded_by_signed_urls(server: Served) -> None:
    client = trained(server)
    path = client.save_weights_external("export", ttl_seconds=3600).result(LIMIT_S).path
    assert path == f"tinker://{client.model_id}/external_weights/export"
    signed = rest(server).get_external_weights_urls(path).result(LIMIT_S)
    assert list(signed.urls) == ["adapter_config.json"]
    url = signed.urls["adapter_config.json"]
    assert json.loads(urllib.request.urlopen(url, timeout=20).read()) == {"r": 8}
    for forged in (
        url.replace("expires=", "expires=1"),
        url.partition("?")[0],
        url.replace("adapter_config.json", "saved.json"),
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(forged, timeout=20)
        assert raised.value.code == 403
    # The published weights of the trainer stay: an export has no number.
    assert server.trainer.calls[-1] == "save_for_sampler None"
    listed = rest(server).list_checkpoints(client.model_id).result(LIMIT_S).checkpoints
    assert listed[-1].checkpoint_type == "external"


def test_an_export_for_recipients_needs_valid_keys(server: Served) -> None:
    client = trained(server)
    asked = client.save_weights_external("export", age_encryption_recipients=["age1nobody"])
    with pytest.raises(tinker.RequestFailedError) as raised:
        asked.result(LIMIT_S)
    assert "age1nobody" in str(raised.value)
    assert raised.value.category is types.RequestErrorCategory.User


def test_an_export_is_encrypted_to_its_recipients(server: Served) -> None:
    pyrage = pytest.importorskip("pyrage")
    identity = pyrage.x25519.Identity.generate()
    keys = [str(identity.to_public())]
    client = trained(server)
    exported = client.save_weights_external("export", age_encryption_recipients=keys)
    signed = rest(server).get_external_weights_urls(exported.result(LIMIT_S).path).result(LIMIT_S)
    (name,) = signed.urls
    assert name == "adapter_config.json.age"
    sealed = urllib.request.urlopen(signed.urls[name], timeout=20).read()
    assert json.loads(pyrage.decrypt(sealed, [identity])) == {"r": 8}


def test_the_clients_command_line(server: Served, tmp_path: Path) -> None:
    client = trained(server)
    path = f"tinker://{client.model_id}/weights/first"
    runs = command(server, "run", "list")["runs"]
    assert [one["training_run_id"] for one in runs] == [client.model_id]
    info = command(server, "run", "info", client.model_id)
    assert info["last_checkpoint"]["tinker_path"] == path
    listed = command(server, "checkpoint", "list")["checkpoints"]
    assert {one["checkpoint_id"] for one in listed} == {"weights/first", "sampler_weights/second"}
    assert command(server, "checkpoint", "info", path)["lora_rank"] == 8
    command(server, "checkpoint", "set-ttl", path, "--ttl", "7200")
    command(server, "checkpoint", "download", path, "--output", str(tmp_path / "downloaded"))
    (file,) = (tmp_path / "downloaded").rglob("adapter_config.json")
    assert json.loads(file.read_text()) == {"r": 8}
    command(server, "checkpoint", "delete", path, "--yes")
    listed = command(server, "checkpoint", "list", "--run-id", client.model_id)["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["sampler_weights/second"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    rest_slow(
        [
            ("POST", "training_runs/m/checkpoints/weights/a/publish", 422),
            ("DELETE", "training_runs/m/checkpoints/weights/a/publish", 422),
            ("GET", "training_runs/m/checkpoints/sampler_weights/a/archive", 422),
            ("PUT", "sessions/s/project", 422),
            ("GET", "sessions/s/trace_export", 422),
            ("POST", "sessions/search", 422),
            ("GET", "audit", 422),
            ("GET", "billing/usage/events", 422),
            ("POST", "auth/token", 422),
            ("GET", "nothing/of/the/kind", 404),
        ],
        first=2,
    ),
)
def test_other_routes_are_refused_by_name(
    server: Served, method: str, path: str, status: int
) -> None:
    url = f"{server.url}/api/v1/{path}"
    found = httpx.request(method, url, headers={"x-api-key": KEY})
    assert (found.status_code, path in found.json()["error"]) == (status, True)
    assert httpx.request(method, url).status_code == 401


def test_pages_are_whole_numbers_up_to_a_bound(server: Served) -> None:
    for query in ("limit=-1", "offset=x", f"limit={10**15 + 1}", f"limit={10**20}"):
        url = f"{server.url}/api/v1/training_runs?{query}"
        found = httpx.get(url, headers={"x-api-key": KEY})
        assert found.status_code == 422
        assert f"from 0 to {10**15}" in found.json()["error"]
    url = f"{server.url}/api/v1/training_runs?limit={10**15}"
    assert httpx.get(url, headers={"x-api-key": KEY}).status_code == 200


def test_a_signature_holds_for_one_path_and_one_hour() -> None:
    clock = Clock()
    signer = UrlSigner("key", now=clock)
    query, expires = signer.sign("m/a/file")
    fields = dict(one.split("=") for one in query.split("&"))
    signer.check("m/a/file", **fields)
    assert expires == 100 + URL_LIFETIME_S
    with refused("signature", status=403):
        signer.check("m/a/other", **fields)
    with refused("signature", status=403):
        UrlSigner("other", now=clock).check("m/a/file", **fields)
    clock.now += URL_LIFETIME_S
    with refused("expires", fields["expires"], status=403):
        signer.check("m/a/file", **fields)

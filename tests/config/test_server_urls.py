"""rollout.urls as options: addresses in one spelling, and what contradicts them."""

from __future__ import annotations

from typing import Any

import pytest

from rlsys.config import RolloutConfig, RunConfig
from rlsys.config.fields import to_dict
from rlsys.config.server_urls import normalized_urls
from tests.errors import invalid


def rollout(*urls: str, **options: Any) -> RolloutConfig:
    return RolloutConfig(**({"engine": "vllm", "urls": urls} | options))


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("http://a:8000", "http://a:8000"),
        (" http://a:8000/ ", "http://a:8000"),
        ("HTTP://Host-A", "http://host-a"),
        ("http://a:80", "http://a"),
        ("https://a:443/", "https://a"),
        ("https://a:80", "https://a:80"),
        ("http://[::1]:9", "http://[::1]:9"),
        ("http://a/behind/a/Proxy/", "http://a/behind/a/Proxy"),
    ],
)
def test_addresses_have_one_spelling(written: str, normal: str) -> None:
    assert normalized_urls([written]) == (normal,)
    assert rollout(written).urls == (normal,)
    assert normalized_urls([normal]) == (normal,)
    with invalid("rollout.urls", written):
        rollout(normal, written)


@pytest.mark.parametrize(
    "url",
    [
        "",
        " ",
        "ftp://host",
        "host:8000",
        "http://host:port",
        "http://host:99999",
        "http://:8000",
        "http://host:0",
        "http://a b",
        "http://host:8000/v1",
        "http://host:8000/v1/",
        "http://host:8000/proxy/v1",
        "http://host?x=1",
        "http://host#x",
    ],
)
def test_other_texts_are_no_addresses(url: str) -> None:
    with invalid("rollout.urls", url):
        rollout("http://a", url)


@pytest.mark.parametrize(
    "url", ["http://user:secret@host", "http://secret@host", "user:secret@host", "x://u:secret@h"]
)
def test_a_password_is_refused_and_not_printed(url: str) -> None:
    with invalid("rollout.urls") as found:
        rollout(url)
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"engine": "torch"}, "rollout.engine"),
        ({"num_replicas": 3}, "rollout.num_replicas"),
        ({"num_gpus": 1}, "rollout.num_gpus"),
        ({"quantization": "fp8_per_channel"}, "rollout.quantization"),
        ({"weight_transport": "nccl"}, "rollout.weight_transport"),
        ({"weight_transport": "cuda_ipc"}, "rollout.weight_transport"),
    ],
)
def test_options_that_contradict_urls_are_refused(options: dict[str, Any], field: str) -> None:
    assert rollout("http://a:1", "https://b").num_replicas == 2
    with invalid(field) as found:
        rollout("http://a:1", "https://b", **options)
    assert "GPU" not in found.value.fix  # servers have their own


def test_servers_keep_their_devices() -> None:
    with invalid("placement", "colocated"):
        RunConfig(rollout=rollout("http://a"), placement="colocated")


def test_the_record_of_a_run_has_the_normal_addresses() -> None:
    config = RunConfig(rollout=rollout("HTTP://A:80/"))
    assert to_dict(config)["rollout"]["urls"] == ["http://a"]

"""Checks of the servers of rollout.urls: another model or worker, and things that are no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.generation.vllm import vllm_server_checks
from rlsys.engines.generation.vllm.vllm_server_checks import check_served, check_servers
from rlsys.engines.generation.vllm.vllm_server_client import (
    API_KEY_VARIABLE,
    ServerClient,
    until_healthy,
)
from rlsys.engines.generation.vllm.vllm_server_config import IGNORED, differences, plain_config
from rlsys.errors import InvalidValues
from rlsys.launcher.tiny_models import build_tiny_model
from tests.engines.served_model import KEY, ServedModel, serving
from tests.errors import invalid

LIMIT_S = 60.0
HELLO = "rlsys_server_hello"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoConfig

    path = build_tiny_model(tmp_path_factory.mktemp("model") / "m", seed=0)
    return AutoConfig.from_pretrained(path)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await work()

    return asyncio.run(limited())


async def check(config: Any, *urls: str, num_first: int | None = None) -> None:
    num = len(urls) if num_first is None else num_first
    await check_servers(urls, plain_config(config), dtype="float32", max_context=64, num_first=num)


def checked(config: Any, **changes: Any) -> None:
    """Check a server with some attributes changed."""

    async def work() -> None:
        served = ServedModel(config, max_context=changes.pop("max_context", 512))
        for name, value in changes.items():
            setattr(served, name, value)
        async with serving(served) as url:
            await check(config, url)

    run(work)


@pytest.mark.parametrize(
    "changes",
    [
        {"reported_version": ""},
        {"reported_version": "0.31.2"},
        {"has_dev_mode": False},
        {"has_worker": False},
        {"takes_token_ids": False},
        {"key": KEY},
        {"max_context": 63},
    ],
)
def test_servers_that_do_not_fit_are_refused(config: Any, changes: dict[str, Any]) -> None:
    checked(config)
    with invalid("rollout.urls"):
        checked(config, **changes)


def with_changes(config: Any, **changes: Any) -> Any:
    other = deepcopy(config)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vocab_size", {"vocab_size": 4096}),
        ("rope_parameters.rope_theta", {"rope_parameters": {"rope_theta": 7.0}}),
        ("rms_norm_eps", {"rms_norm_eps": 0.5}),
        ("num_key_value_heads", {"num_key_value_heads": 77}),
        ("tie_word_embeddings", {"tie_word_embeddings": False}),
        ("hidden_act", {"hidden_act": "relu"}),
        ("attention_multiplier", {"attention_multiplier": 0.3}),  # a field that the run lacks
    ],
)
def test_a_server_whose_model_differs_in_one_field_is_refused(
    config: Any, name: str, changes: dict[str, Any]
) -> None:
    async def work() -> None:
        async with serving(ServedModel(with_changes(config, **changes))) as url:
            await check(config, url)

    with invalid("rollout.urls") as found:
        run(work)
    (value,) = changes.values()
    theirs = value["rope_theta"] if isinstance(value, dict) else value
    assert f"{name} is {theirs!r} instead of" in found.value.rule


def test_fields_that_do_not_change_the_computation_may_differ(config: Any) -> None:
    other = with_changes(
        config,
        _name_or_path="elsewhere",
        transformers_version="4.0",
        architectures=["Other"],
        head_dtype="float32",
        dtype="bfloat16",
        pad_token_id=1,
        use_cache=False,
        attention_dropout=0.5,
        never_given=None,
    )
    assert differences(plain_config(other), plain_config(config)) == []


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2)),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2)),
)
def test_each_differing_field_is_named_once(one: dict[str, int], other: dict[str, int]) -> None:
    found = [text.split()[0] for text in differences(one, other)]
    assert found == sorted(n for n in "abcd" if one.get(n) != other.get(n))
    assert not IGNORED & {"rope_theta", "rms_norm_eps", "tie_word_embeddings", "vocab_size"}


def test_vllm_may_untie_embeddings_that_the_checkpoint_has_twice(config: Any) -> None:
    async def work(is_untied: bool) -> None:
        served = ServedModel(with_changes(config, tie_word_embeddings=False))
        served.worker.model_config.word_embeddings_untied_by_checkpoint = is_untied
        async with serving(served) as url:
            await check(with_changes(config, tie_word_embeddings=True), url)

    run(lambda: work(True))
    with invalid("rollout.urls"):
        run(lambda: work(False))


def test_raw_log_probabilities_are_refused(config: Any) -> None:
    async def work() -> None:
        served = ServedModel(config)
        served.worker.model_config.logprobs_mode = "raw_logprobs"
        async with serving(served) as url:
            await check(config, url)

    with invalid("rollout.urls"):
        run(work)


def test_two_addresses_of_one_server_are_refused(config: Any) -> None:
    async def work(urls: Callable[[str, str], tuple[str, ...]], num_first: int) -> None:
        async with serving(ServedModel(config)) as one, serving(ServedModel(config)) as other:
            await check(config, *urls(one, other), num_first=num_first)

    def twice(one: str, other: str) -> tuple[str, ...]:
        return one, other, one.replace("127.0.0.1", "localhost")

    run(lambda: work(lambda one, other: (one, other), 2))
    for num_first in (3, 1):  # also if the second is not needed at the start
        with invalid("rollout.urls") as found:
            run(partial(work, twice, num_first))
        assert "localhost" in found.value.value
        assert "127.0.0.1" in found.value.rule


def test_only_the_first_servers_must_answer(config: Any) -> None:
    async def work(num_first: int) -> None:
        async with serving(ServedModel(config)) as gone:
            pass
        async with serving(ServedModel(config)) as one:
            await check(config, one, gone, num_first=num_first)

    run(lambda: work(1))
    with invalid("rollout.urls"):
        run(lambda: work(2))


def test_all_servers_are_named_at_once(config: Any) -> None:
    async def work() -> None:
        old = ServedModel(config)
        old.reported_version = "0.9"
        async with serving(old) as one, serving(ServedModel(config, max_context=8)) as other:
            await check(config, one, other)

    with pytest.raises(InvalidValues) as found:
        run(work)
    assert len({error.value for error in found.value.errors if hasattr(error, "value")}) == 2


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/version", "<html>"),
        ("/version", '{"version": '),
        ("/version", [1]),
        ("/version", {"version": None}),
        ("/version", {}),
        ("/version", 500),
        ("/version", 302),
        ("/version", {"version": "0.32.0", "filler": "x" * 5_000_000}),  # cut off
        ("/collective_rpc", {}),
        ("/collective_rpc", "<html>"),
        ("/collective_rpc", {"results": []}),
        ("/collective_rpc", {"results": [3]}),
        ("/collective_rpc", {"results": [{"rlsys": "yes"}]}),
        ("/inference/v1/abort_requests", 500),
    ],
)
def test_answers_of_another_shape_are_refused(config: Any, path: str, answer: Any) -> None:
    with invalid("rollout.urls"):
        checked(config, answers={path: answer})


@pytest.mark.parametrize(
    "change",
    [
        {"rlsys": "0.0.1"},
        {"rlsys": None},
        {"process": 3},
        {"config": [1]},
        {"max_context": "512"},
        {"max_context": True},
        {"logprobs_mode": None},
        {"has_priorities": 1},
    ],
)
def test_a_hello_of_another_version_or_shape_is_refused(config: Any, change: Any) -> None:
    hello = ServedModel(config).worker.rlsys_server_hello()
    checked(config, answers={HELLO: {"results": [hello]}})
    with invalid("rollout.urls"):
        checked(config, answers={HELLO: {"results": [hello | change]}})


def test_a_worker_keeps_its_identity(config: Any) -> None:
    one, other = ServedModel(config).worker, ServedModel(config).worker
    assert one.rlsys_server_hello()["process"] == one.rlsys_server_hello()["process"]
    assert one.rlsys_server_hello()["process"] != other.rlsys_server_hello()["process"]


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/inference/v1/abort_requests"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_asks_for_a_token_names_its_variable(
    config: Any, path: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = []
    for key in ("", KEY):  # not given, and refused
        monkeypatch.setenv(API_KEY_VARIABLE, key)
        with invalid("rollout.urls") as found:
            checked(config, answers={path: status})
        assert API_KEY_VARIABLE in found.value.fix
        rules.append(API_KEY_VARIABLE in found.value.rule)
    assert rules == [False, True]


def test_the_key_is_that_of_the_environment(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    checked(config, key=KEY)


@asynccontextmanager
async def raw(answer: bytes | None) -> AsyncIterator[str]:
    """Serve bytes to each connection; None: nothing, and the connection stays open."""
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if answer is not None:
            await reader.read(1)
            writer.write(answer)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for one in writers:
            one.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
        (b"", "closes"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"version"', "within its answer"),
        (None, "within 0.3 s"),
    ],
)
def test_other_programs_are_described_without_the_clients_own_words(
    config: Any, answer: bytes | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server_checks, "CHECK_TIMEOUT_S", 0.3)

    async def work() -> None:
        async with raw(answer) as url:
            await check(config, url)

    with invalid("rollout.urls") as found:
        run(work)
    text = str(found.value)
    assert reason in text
    assert ".." not in text.replace(found.value.value, "")
    assert not any(word in text for word in ("ssl:", "message=", "Error", "url="))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no.such.host.invalid:8000"])
def test_an_address_without_a_server_is_described_plainly(config: Any, url: str) -> None:
    with invalid("rollout.urls", url) as found:
        run(lambda: check(config, url))
    assert "ssl:" not in str(found.value)
    assert ".." not in str(found.value)


def test_an_endless_answer_ends_the_check(config: Any) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" " * 100_000)

    async def work() -> None:
        app = web.Application()
        app.add_routes([web.get("/version", endless)])
        async with TestServer(app) as server:
            await check(config, str(server.make_url("")).rstrip("/"))

    with invalid("rollout.urls"):
        run(work)


def test_an_address_without_a_server_is_waited_for(config: Any) -> None:
    async def work() -> None:
        async with serving(ServedModel(config)) as url, ServerClient(url) as client:
            assert await client.is_healthy()
        async with asyncio.timeout(0.5):
            await until_healthy([url])(0)

    with pytest.raises(TimeoutError):
        run(work)


def test_a_difference_beyond_the_first_is_counted(config: Any) -> None:
    own = {f"field_{number}": number for number in range(20)}
    served = vllm_server_checks.ServedModel(
        process="p", config={}, dtype="float32", max_context=64, has_priorities=False
    )
    with invalid("rollout.urls") as found:
        check_served("http://a", served, own, dtype="float32", max_context=64)
    num_shown = vllm_server_checks.MAX_DIFFERENCES
    assert found.value.rule.count(" instead of ") == num_shown
    assert found.value.rule.endswith(f"and {20 - num_shown} more")


def test_a_server_in_another_precision_is_refused() -> None:
    served = vllm_server_checks.ServedModel(
        process="p", config={}, dtype="bfloat16", max_context=64, has_priorities=False
    )
    check_served("http://a", served, {}, dtype="bfloat16", max_context=64)
    with invalid("rollout.urls", "http://a"):
        check_served("http://a", served, {}, dtype="float32", max_context=64)

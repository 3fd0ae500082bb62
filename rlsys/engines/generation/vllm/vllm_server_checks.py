"""Checks of the servers of rollout.urls before a run uses them.

    GET /version, /v1/models             ─► is it a vLLM of this version, with access?
    POST /inference/v1/abort_requests    ─► does it take token ids? (a request that aborts nothing)
    POST /collective_rpc                 ─► rlsys_server_hello: worker, model, context, process

A server may be anything that answers HTTP, so the shape of each answer is checked too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.safe_json import parse_json
from rlsys.common.version import VERSION as RLSYS_VERSION
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.engines.generation.vllm.vllm_server_client import (
    API_KEY_VARIABLE,
    FIELD,
    START,
    VERSION,
    ServerClient,
)
from rlsys.engines.generation.vllm.vllm_server_config import differences
from rlsys.errors import ErrorCollector, InvalidValue, require

# Time limit of each answer to a check, and most bytes of it.
CHECK_TIMEOUT_S = 30.0
CHECK_BYTES = 4 * 2**20

HELLO: Mapping[str, type] = {
    "process": str,
    "logprobs_mode": str,
    "config": dict,
    "dtype": str,
    "max_context": int,
    "has_priorities": bool,
}
MAX_DIFFERENCES = 8  # in one message


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Facts about a server that must fit the run.

    Attributes:
        process: Id of the engine's process. Two addresses of one server have the same.
        config: Fields of the model's configuration, as `plain_config` returns them.
        dtype: Precision of the weights and of the computation.
        max_context: Longest prompt and completion together, in tokens.
        has_priorities: Whether the server orders waiting requests by priority.
    """

    process: str
    config: Mapping[str, Any]
    dtype: str
    max_context: int
    has_priorities: bool


async def read_served(client: ServerClient) -> ServedModel:
    """Return what a server serves.

    Raises:
        InvalidValue: It is no vLLM, of another version, refuses the key, or lacks the worker.
        NoServer: It does not answer.
    """
    await _check_version(client)
    await _call(client, "GET", "/v1/models")
    nothing: dict[str, Any] = {"request_ids": []}
    status, _ = await _call(client, "POST", "/inference/v1/abort_requests", nothing)
    require(
        status == 200,
        FIELD,
        client.url,
        rule=f"the server does not take token ids (status {status} of /inference)",
        fix="Start it with --enable-scale-out.",
    )
    return await _hello(client)


def check_served(
    url: str, served: ServedModel, config: Mapping[str, Any], *, dtype: str, max_context: int
) -> None:
    """Raise InvalidValue unless a server has this model in this precision and enough context.

    `config` is a result of `plain_config`.
    """
    differing = differences(served.config, config)
    num_more = len(differing) - MAX_DIFFERENCES
    more = f" and {num_more} more" if num_more > 0 else ""
    require(
        not differing,
        FIELD,
        url,
        rule="the server has another model than model.path: "
        + ", ".join(differing[:MAX_DIFFERENCES])
        + more,
        fix="Start it with the model of the run.",
    )
    require(
        served.dtype == dtype,
        FIELD,
        url,
        rule=f"the server computes in {served.dtype}, and model.dtype is {dtype}",
        fix=f"Start it with --dtype {dtype}.",
    )
    require(
        served.max_context >= max_context,
        FIELD,
        url,
        rule=f"the server's context has {served.max_context} tokens, and the run needs "
        f"{max_context}",
        fix=f"Start it with --max-model-len {max_context} or more, or shorten "
        "data.max_prompt_tokens or sampling.max_tokens.",
    )


async def check_servers(
    urls: Sequence[str],
    config: Mapping[str, Any],
    *,
    dtype: str,
    max_context: int,
    num_first: int,
) -> None:
    """Check that servers can be replicas of a model in this precision, all at a time.

    The first `num_first` must answer. The others may start later, so that only their process is
    compared with those of the others.

    Raises:
        InvalidValue: A server does not answer or does not fit, or two addresses have one server.
    """
    answers = await asyncio.gather(*(_answer(url) for url in urls))
    mistakes = ErrorCollector()
    for url, answer in list(zip(urls, answers, strict=True))[:num_first]:
        with mistakes.collect():
            if isinstance(answer, InvalidValue):
                raise answer
            check_served(url, answer, config, dtype=dtype, max_context=max_context)
    first: dict[str, str] = {}
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, InvalidValue):
            continue
        other = first.setdefault(answer.process, url)
        with mistakes.collect():
            require(
                other == url,
                FIELD,
                url,
                rule=f"is the same server as {other}, but each server is one replica",
                fix="Remove one of the two addresses.",
            )
    mistakes.raise_found()


async def _answer(url: str) -> ServedModel | InvalidValue:
    async with ServerClient(url) as client:
        try:
            return await read_served(client)
        except EngineError as error:
            rule = str(error).removeprefix(f"{url} ")
            fix = f"Check that this machine reaches the server. {START}."
            return InvalidValue(FIELD, url, rule=rule, fix=fix)
        except InvalidValue as error:
            return error


async def _call(
    client: ServerClient, method: str, path: str, body: Any = None
) -> tuple[int, bytes]:
    """Return status and body of an answer.

    Raises:
        InvalidValue: The server asks for a token, or refuses the one that it got.
    """
    status, content = await client.call(
        method, path, body, timeout_s=CHECK_TIMEOUT_S, max_bytes=CHECK_BYTES
    )
    has_key = bool(os.environ.get(API_KEY_VARIABLE))
    require(
        status not in (401, 403),
        FIELD,
        client.url,
        rule=f"the server refuses the token of the variable {API_KEY_VARIABLE} (status {status} "
        f"of {path})"
        if has_key
        else f"the server asks for a token (status {status} of {path})",
        fix=f"Set the environment variable {API_KEY_VARIABLE} to the server's --api-key.",
    )
    return status, content


async def _check_version(client: ServerClient) -> None:
    status, content = await _call(client, "GET", "/version")
    answer = _parsed(content)
    found = answer.get("version") if isinstance(answer, dict) else None
    is_vllm = status == 200 and isinstance(found, str) and bool(found)
    require(
        is_vllm,
        FIELD,
        client.url,
        rule="the answer to /version is not vLLM's "
        + (f"(status {status})" if status != 200 else "(it has no version in JSON)"),
        fix=f"Give the address of a vLLM server. {START}.",
    )
    require(
        str(found).split(".")[:2] == VERSION.split("."),
        FIELD,
        client.url,
        rule=f"the server runs vLLM {str(found)[:40]}, and rlsys's worker is for {VERSION}",
        fix=f"Install vllm=={VERSION}.* there.",
    )


async def _hello(client: ServerClient) -> ServedModel:
    body = {"method": "rlsys_server_hello", "args": []}
    status, content = await _call(client, "POST", "/collective_rpc", body)
    hello = _first_result(content)
    require(
        status == 200 and hello is not None,
        FIELD,
        client.url,
        rule="the server does not run rlsys's worker"
        if status != 404
        else "the server does not accept weights (VLLM_SERVER_DEV_MODE)",
        fix=START + ".",
    )
    assert hello is not None
    _check_hello(client.url, hello)
    return ServedModel(
        process=hello["process"],
        config=hello["config"],
        dtype=hello["dtype"],
        max_context=hello["max_context"],
        has_priorities=hello["has_priorities"],
    )


def _check_hello(url: str, hello: Mapping[str, Any]) -> None:
    """Raise InvalidValue unless the worker is of this rlsys and returns log-probabilities."""
    found = str(hello.get("rlsys", "of an earlier version"))[:40]
    require(
        found == RLSYS_VERSION,
        FIELD,
        url,
        rule=f"the server's worker is from rlsys {found}, and the run has {RLSYS_VERSION}",
        fix="Install the same version of rlsys in both places, and restart the server.",
    )
    lacking = [name for name, kind in HELLO.items() if type(hello.get(name)) is not kind]
    require(
        not lacking,
        FIELD,
        url,
        rule=f"the server's worker does not give {', '.join(lacking)}",
        fix=START + ".",
    )
    require(
        hello["logprobs_mode"] == "processed_logprobs",
        FIELD,
        url,
        rule=f"the server returns {hello['logprobs_mode']}, and the trainer needs "
        "log-probabilities at the temperature",
        fix="Start it with --logprobs-mode processed_logprobs.",
    )


def _first_result(content: bytes) -> dict[str, Any] | None:
    answer = _parsed(content)
    results = answer.get("results") if isinstance(answer, dict) else None
    first = results[0] if isinstance(results, list) and results else None
    return first if isinstance(first, dict) else None


def _parsed(content: bytes) -> Any:
    """Return the value of JSON text, or None."""
    try:
        return parse_json(content)
    except ValueError:
        return None

"""Rules about rollout.urls: vLLM servers that run already, each a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

from rlsys.errors import InvalidValue, require

FIELD = "rollout.urls"
# Options that the servers have in place of the run, with the values that leave them out.
OF_SERVERS: Mapping[str, object] = {
    "tensor_parallel": 1,
    "num_gpus": 0,
    "quantization": None,
    "speculation": {},
    "vllm": {},
}
DEFAULT_PORTS = {"http": 80, "https": 443}
ADDRESS_RULE = "is no address with http:// or https://, a host, and a port of at most 65535"
HIDDEN = "***"  # replaces user and password in messages


def normalized_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses in one spelling, so that equal ones have equal texts.

    Raises:
        InvalidValue: One of them is not the address of a server, or occurs twice.
    """
    found: dict[str, str] = {}
    for url in urls:
        normal = _normalized(url)
        require(
            normal not in found,
            FIELD,
            url,
            rule=f"is the same address as {found.get(normal)!r}, but each server is one replica",
            fix="Remove it.",
        )
        found[normal] = url
    return tuple(found)


def check_urls(
    urls: Sequence[str], *, engine: str, num_replicas: int, of_servers: Mapping[str, object]
) -> None:
    """Raise InvalidValue unless the other options fit servers that run apart from the run.

    `of_servers` has the values of the options in OF_SERVERS.
    """
    require(
        engine == "vllm",
        "rollout.engine",
        engine,
        rule="the servers of rollout.urls run vLLM",
        fix='Use rollout.engine="vllm".',
    )
    servers = "1 address" if len(urls) == 1 else f"{len(urls)} addresses"
    require(
        num_replicas in (1, len(urls)),
        "rollout.num_replicas",
        num_replicas,
        rule=f"rollout.urls has {servers}, and each server is a replica",
        fix="Leave it out.",
    )
    for name, left_out in OF_SERVERS.items():
        require(
            of_servers[name] == left_out,
            f"rollout.{name}",
            of_servers[name],
            rule="is an option of the servers of rollout.urls",
            fix="Leave it out, and set it where the servers start.",
        )


def _normalized(url: str) -> str:
    """Return an address with lower-case scheme and host, without default port and last slash."""
    example = "Give addresses such as http://host:8000."
    require(url.strip() != "", FIELD, url, rule="has an empty address", fix=example)
    parts = _parts(url.strip())
    if parts is None:
        raise InvalidValue(FIELD, _masked(url), rule=ADDRESS_RULE, fix=example)
    require(
        parts.username is None and parts.password is None,
        FIELD,
        _masked(url),
        rule="has a user or a password, which the records of the run would contain",
        fix="Remove them. A server's --api-key belongs into the variable VLLM_API_KEY.",
    )
    require(
        not parts.query and not parts.fragment,
        FIELD,
        url,
        rule="has more than scheme, host, port and path",
        fix=example,
    )
    path = parts.path.rstrip("/")
    require(
        path != "/v1" and not path.endswith("/v1"),
        FIELD,
        url,
        rule="is the address of the OpenAI API, and rlsys needs that of the server",
        fix="Leave out /v1.",
    )
    host = str(parts.hostname)
    host = f"[{host}]" if ":" in host else host
    is_default = parts.port in (None, DEFAULT_PORTS[parts.scheme])
    return f"{parts.scheme}://{host}{'' if is_default else f':{parts.port}'}{path}"


def _parts(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        is_address = (
            parts.scheme in DEFAULT_PORTS
            and bool(parts.hostname)
            and parts.port != 0
            and not any(one.isspace() for one in url)
        )
    except ValueError:  # a port that is no number
        return None
    return parts if is_address else None


def _masked(url: str) -> str:
    """Return an address without user and password, for messages."""
    start, at, rest = url.rpartition("@")
    if not at:
        return url
    scheme, separator, _ = start.partition("://")
    return f"{scheme}://{HIDDEN}@{rest}" if separator else f"{HIDDEN}@{rest}"

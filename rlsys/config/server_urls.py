"""Rules about rollout.urls: vLLM servers that run already, each a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from rlsys.errors import require

FIELD = "rollout.urls"
# Options that the servers have in place of the run, with the values that leave them out.
OF_SERVERS: Mapping[str, object] = {
    "tensor_parallel": 1,
    "num_gpus": 0,
    "quantization": None,
    "speculation": {},
    "vllm": {},
}


def check_urls(
    urls: Sequence[str], *, engine: str, num_replicas: int, of_servers: Mapping[str, object]
) -> None:
    """Raise InvalidValue unless the addresses are those of different servers, one a replica.

    `of_servers` has the values of the options in OF_SERVERS.
    """
    require(
        engine == "vllm",
        "rollout.engine",
        engine,
        rule="the servers of rollout.urls run vLLM",
        fix='Use rollout.engine="vllm".',
    )
    for url in urls:
        require(
            _is_address(url),
            FIELD,
            url,
            rule="is no address of a server",
            fix="Give addresses such as http://host:8000.",
        )
    require(
        len({url.rstrip("/") for url in urls}) == len(urls),
        FIELD,
        urls,
        rule="has an address twice, but each server is one replica",
        fix="Remove it.",
    )
    require(
        num_replicas in (1, len(urls)),
        "rollout.num_replicas",
        num_replicas,
        rule=f"rollout.urls has {len(urls)} servers, and each is a replica",
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


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False

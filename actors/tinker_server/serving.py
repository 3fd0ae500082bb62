"""Server of the Tinker API in this process, with trainers and samplers as actors.

http_server (uvicorn) ─► rlsys.tinker_server.http_app ─► service ─► RayBackend
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlsys.common.number_text import counted
from rlsys.config import ModelConfig
from rlsys.config.model_paths import absolute_path, rollout_with_absolute_paths
from rlsys.errors import InvalidValue
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.datum_rows import ModelLimits
from rlsys.tinker_server.server_checkpoints import ServerCheckpoints
from rlsys.tinker_server.server_config import ServerConfig

from ..cluster.cluster_checks import connected
from ..trainer.trainer_proxy import absolute
from .primitive_trainer_actor import ServedModel
from .tinker_backend import RayBackend


@dataclass(frozen=True, kw_only=True)
class CheckedServer:
    """Parts of a server that were checked before Ray starts."""

    config: ServerConfig
    key: str
    checkpoints: ServerCheckpoints
    backend: RayBackend
    listening: socket.socket


def checked(config: ServerConfig, key: str) -> CheckedServer:
    """Return the checked parts of a server.

    Raises:
        ValueError: A package is missing, the client would refuse the key, the model cannot be
            served, the directory of checkpoints cannot be written, or the port is in use.
    """
    _check_packages()
    from rlsys.tinker_server.http_app import check_key

    check_key(key)
    backend = _backend(config)
    return CheckedServer(
        config=config,
        key=key,
        checkpoints=_checkpoints(config),
        backend=backend,
        listening=listening_socket(config),
    )


@contextlib.contextmanager
def connected_to_ray(config: ServerConfig) -> Iterator[None]:
    """Connect to Ray as runs do. A server reserves no CPUs."""
    print("starting Ray", flush=True)
    with connected(config.cluster) as warning:
        if warning:
            print(f"warning: {warning}")
        yield


async def serve(checked: CheckedServer) -> None:
    """Serve until a signal ends the process.

    Raises:
        RunFailed: No sampler starts.
    """
    from rlsys.errors import RunFailed
    from rlsys.tinker_server.http_app import Api
    from rlsys.tinker_server.tinker_service import ServerLimits, Service

    from .http_server import HttpServer

    config, key, backend = checked.config, checked.key, checked.backend
    listening = checked.listening
    print(
        f"starting {counted(config.rollout.num_replicas, 'sampler')} of {config.model.path}",
        flush=True,
    )
    try:
        await backend.start()
    except PartDied as death:
        await backend.close()
        raise RunFailed(str(death)) from death
    service = Service(
        backend,
        checked.checkpoints,
        clock=time.monotonic,
        limits=ServerLimits(
            session_timeout_s=config.session_timeout_s,
            gap_timeout_s=config.session_timeout_s,
            max_models=config.max_models,
        ),
    )
    api = Api(service, key=key, max_body_bytes=config.max_body_mib * 2**20)
    host, port = listening.getsockname()[:2]
    print(f"serving {_name(config)}; for the client:")
    print(f"  export TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY={key}", flush=True)
    await HttpServer(api).serve(sockets=[listening])


def _check_packages() -> None:
    for package in ("uvicorn", "starlette", "google.protobuf"):
        if importlib.util.find_spec(package) is None:
            raise InvalidValue(
                package,
                rule="the server needs this package, which is not installed",
                fix="pip install 'rlsys[serve]'.",
            )


def _backend(config: ServerConfig) -> RayBackend:
    """Return the backend. Raise ValueError for a model that cannot be served."""
    from rlsys.data.prompts import load_tokenizer
    from rlsys.engines.models.model_shape import model_shape

    path = config.model.path
    shape = model_shape(path)
    load_tokenizer(path)
    served = ServedModel(
        name=_name(config),
        model=ModelConfig(
            path=absolute_path(path),
            dtype=config.model.dtype,
            gradient_checkpointing=config.model.gradient_checkpointing,
        ),
        trainer=config.trainer.whole,
        rollout=rollout_with_absolute_paths(config.rollout),
        cluster=config.cluster,
        max_adapters=config.max_adapters,
        models_per_trainer=config.models_per_trainer,
    )
    limits = ModelLimits(vocab_size=_vocab_size(path), max_context=shape.max_context)
    return RayBackend(served, limits, list(shape.linear_layers))


def _checkpoints(config: ServerConfig) -> ServerCheckpoints:
    checkpoints = ServerCheckpoints(absolute(Path(config.checkpoints_dir)))
    try:
        checkpoints.recover()
    except OSError as error:
        raise InvalidValue(
            "checkpoints_dir",
            config.checkpoints_dir,
            rule=f"the server cannot write there ({error.strerror or error}: {error.filename})",
            fix="Choose another directory, or make it writable.",
        ) from error
    return checkpoints


def _name(config: ServerConfig) -> str:
    return config.model.name or config.model.path


def _vocab_size(path: str) -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    return size


def listening_socket(config: ServerConfig) -> socket.socket:
    """Return a listening socket.

    Its connections send each part of an answer at once. asyncio sets this only on sockets of
    IPPROTO_TCP, which those of `create_server` are not. Without it, the second part of an answer
    waits for the client's delayed acknowledgement, 40 ms on Linux.
    """
    try:
        listening = socket.create_server((config.host, config.port), backlog=4096)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise InvalidValue(
            "port",
            config.port,
            rule=f"the server cannot listen on {config.host} ({error.strerror})",
            fix="Choose another, or --port 0 for any free port.",
        ) from error

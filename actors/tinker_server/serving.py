"""A server of the Tinker API in this process, its trainers and samplers as actors.

uvicorn ─► rlsys.tinker_server.http_app ─► service ─► RayBackend
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlsys.config import ModelConfig
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.datum_rows import ModelLimits
from rlsys.tinker_server.server_checkpoints import ServerCheckpoints
from rlsys.tinker_server.server_config import ServerConfig

from ..cluster.cluster_checks import connected
from ..trainer.trainer_proxy import absolute
from .tinker_backend import RayBackend, ServedModel


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a server is made of, before Ray starts."""

    config: ServerConfig
    key: str
    backend: RayBackend
    listening: socket.socket


def checked(config: ServerConfig, key: str) -> Checked:
    """Raises ValueError for a package that is missing, a key that the client would not take, a
    model that is none, and a port that is taken.
    """
    _check_packages()
    from rlsys.tinker_server.http_app import check_key

    check_key(key)
    backend = _backend(config)
    return Checked(config=config, key=key, backend=backend, listening=_listening(config))


@contextlib.contextmanager
def connected_to_ray(config: ServerConfig) -> Iterator[None]:
    """As for runs; a server reserves no CPUs."""
    print("starting Ray", flush=True)
    with connected(config.cluster) as warning:
        if warning:
            print(f"warning: {warning}")
        yield


async def serve(checked: Checked) -> None:
    """Until a signal ends it. Raises RunFailed where no sampler starts."""
    import uvicorn

    from rlsys.errors import RunFailed
    from rlsys.tinker_server.http_app import Api
    from rlsys.tinker_server.tinker_service import ServerLimits, Service

    config, key, backend = checked.config, checked.key, checked.backend
    listening = checked.listening
    print(f"starting {config.rollout.num_replicas} samplers of {config.model.path}", flush=True)
    try:
        await backend.start()
    except PartDied as death:
        await backend.close()
        raise RunFailed(str(death)) from death
    service = Service(
        backend,
        ServerCheckpoints(absolute(Path(config.checkpoints_dir))),
        clock=time.monotonic,
        limits=ServerLimits(
            session_timeout_s=config.session_timeout_s,
            gap_timeout_s=config.session_timeout_s,
            max_models=config.max_models,
        ),
    )
    api = Api(service, key=key, max_body_bytes=config.max_body_mib * 2**20)
    server = uvicorn.Server(
        uvicorn.Config(
            api.application(),
            log_level="warning",
            access_log=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=5,
        )
    )
    host, port = listening.getsockname()[:2]
    print(f"serving {_name(config)}; for the client:")
    print(f"  export TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY={key}", flush=True)
    await server.serve(sockets=[listening])


def _check_packages() -> None:
    for package in ("uvicorn", "starlette", "google.protobuf"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"the server needs the package {package}, which is not installed; pip install "
                "'rlsys[serve]'."
            )


def _backend(config: ServerConfig) -> RayBackend:
    """Looks at the model. Raises ValueError."""
    from rlsys.data.prompts import load_tokenizer
    from rlsys.engines.models.model_shape import model_shape

    path = config.model.path
    shape = model_shape(path)
    load_tokenizer(path)
    where = str(Path(path).absolute()) if Path(path).is_dir() else path  # actors live elsewhere
    served = ServedModel(
        name=_name(config),
        model=ModelConfig(
            path=where,
            dtype=config.model.dtype,
            gradient_checkpointing=config.model.gradient_checkpointing,
        ),
        trainer=config.trainer.whole,
        rollout=config.rollout,
        cluster=config.cluster,
    )
    limits = ModelLimits(vocab_size=_vocab_size(path), max_context=shape.max_context)
    return RayBackend(served, limits, list(shape.linear_layers))


def _name(config: ServerConfig) -> str:
    return config.model.name or config.model.path


def _vocab_size(path: str) -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    return size


def _listening(config: ServerConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port), backlog=4096)
    except OSError as error:
        raise ValueError(
            f"host={config.host!r}, port={config.port}: {error.strerror}; choose another, or "
            "--port 0 for any that is free."
        ) from error

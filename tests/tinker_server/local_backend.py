"""The server's backend with real engines in this process, without Ray."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.cluster.calls import WorkerDied
from actors.tinker_server.primitive_trainer_actor import (
    EngineFactory,
    PrimitiveTrainerActor,
    ServedModel,
)
from actors.tinker_server.sampler_actor import SamplerActor
from actors.tinker_server.shared_trainer import TrainerHost, TrainerPool
from actors.tinker_server.tinker_backend import RayBackend
from rlsys.config import ClusterConfig, ModelConfig, RolloutConfig, TrainerConfig
from rlsys.engines.models.model_shape import model_shape
from rlsys.tinker_server.call_engine import PrimitiveEngine
from rlsys.tinker_server.datum_rows import ModelLimits


class LocalWorker:
    """A Worker whose actor is an object in this process. Its methods run one at a time."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.timeout_s = 600.0
        self.cause = ""
        self._actor = actor
        self._thread = ThreadPoolExecutor(1)
        self._died = asyncio.Event()

    @property
    def is_dead(self) -> bool:
        return bool(self.cause)

    def start_call(
        self, method: str, *args: Any, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        return self._answer(getattr(self._actor, method), args)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        return await self.start_call(method, *args)

    async def _answer(self, function: Any, args: tuple[Any, ...]) -> Any:
        if asyncio.iscoroutinefunction(function):
            return await function(*args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(function, *args))

    async def watch(self) -> None:
        await self._died.wait()
        raise WorkerDied(f"{self.name} died: {self.cause}")

    def end(self, cause: str) -> None:
        self.cause = self.cause or cause
        self._died.set()

    def kill(self) -> None:
        self.end("killed")


@dataclass(frozen=True, kw_only=True)
class RecordingFactory(EngineFactory):
    """An EngineFactory with a list of its engines."""

    engines: list[PrimitiveEngine]

    def __call__(self, rank: int, lora: str, seed: int, frozen: Any) -> PrimitiveEngine:
        self.engines.append(super().__call__(rank, lora, seed, frozen))
        return self.engines[-1]


class LocalBackend(RayBackend):
    """RayBackend with LocalWorkers."""

    def __init__(self, model_path: Path, **limits: int) -> None:
        shape = model_shape(str(model_path))
        served = ServedModel(
            name="tiny",
            model=ModelConfig(path=str(model_path)),
            trainer=TrainerConfig(),
            rollout=RolloutConfig(max_running=256, kv_cache_gib=0.1),
            cluster=ClusterConfig(),
            **{"max_adapters": 16, "models_per_trainer": 8, **limits},
        )
        vocabulary = 1000  # no request of the tests has a token beyond the model's
        model_limits = ModelLimits(vocab_size=vocabulary, max_context=shape.max_context)
        super().__init__(served, model_limits, list(shape.linear_layers))
        self.hosts: list[TrainerHost] = []
        self.engines: list[PrimitiveEngine] = []  # of all trainers, in the order of their starts
        self.samplers: list[str] = []  # that were started
        self.warnings: list[str] = []
        self._pool = TrainerPool(served, self._start_host)

    def _start_host(self, served: ServedModel, name: str, is_shared: bool) -> TrainerHost:
        factory = RecordingFactory(served=served, is_shared=is_shared, engines=self.engines)
        actor = _class_of(PrimitiveTrainerActor)(0, factory)
        worker: Any = LocalWorker(f"trainer-0 of {name}", actor)
        host = TrainerHost(
            name, [worker], is_shared=is_shared, start_timeout_s=600.0, warn=self.warnings.append
        )
        self.hosts.append(host)
        return self.hosts[-1]

    def _start_sampler(self, name: str) -> Any:
        self.samplers.append(name)
        return LocalWorker(name, _class_of(SamplerActor)(self._sampler_factory()))


def without_ray(patch: pytest.MonkeyPatch) -> None:
    """Let the actors' code run outside of Ray."""
    context = SimpleNamespace(get_node_id=lambda: "node")
    patch.setattr(ray, "get_runtime_context", lambda: context)
    patch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


def _class_of(actor: Any) -> Any:
    return actor.__ray_metadata__.modified_class

"""Trainers and samplers of a server of the Tinker API, as Ray actors.

RayBackend ─► RayTrainer, one per model ─► TrainerHost ─► PrimitiveTrainerActor, one per rank
          └─► RaySampler, for all models ─► SamplerActor
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlsys.config import SamplingConfig
from rlsys.config.training_config import check_adapters
from rlsys.errors import InvalidValue
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.datum_rows import ModelLimits
from rlsys.tinker_server.server_backend import BaseModel, ScoreRequest, Scores
from rlsys.tinker_server.server_checkpoints import SamplerWeights
from rlsys.types import Generation, GenerationRequest, WeightManifest

from ..cluster.calls import Worker
from .primitive_trainer_actor import ServedModel
from .ray_sampler import RaySampler
from .sampler_actor import SamplerActor, SamplerFactory
from .shared_trainer import RayTrainer, TrainerPool, start_host

# Of W + B A · alpha / rank, for every rank: then one learning rate suits all ranks (LoRA Without
# Regret, Thinking Machines 2025).
ALPHA = 32


class RayBackend:
    """Implementation of rlsys.tinker_server.server_backend.Backend on the connected Ray cluster."""

    def __init__(
        self, served: ServedModel, limits: ModelLimits, linear_layers: Sequence[str]
    ) -> None:
        self._served = served
        self._linear_layers = linear_layers
        self._base = BaseModel(name=served.name, path=served.model.path, limits=limits)
        self._pool = TrainerPool(served, functools.partial(start_host, warn=_warn))
        self._trainers: list[RayTrainer] = []
        num_replicas = served.rollout.num_replicas
        self._samplers = [
            RaySampler(
                self._start_sampler,
                f"sampler-{number}",
                base_key=served.name,
                max_running=2 * served.rollout.max_running,
                max_adapters=served.max_adapters if served.samples_adapters else 0,
                is_renewed=served.rollout.engine == "vllm",
                batch_size=served.rollout.max_running,
                start_timeout_s=served.cluster.start_timeout_s,
                published=self._published,
                warn=_warn,
            )
            for number in range(num_replicas)
        ]

    @property
    def base_models(self) -> Sequence[BaseModel]:
        """The one model that is served."""
        return [self._base]

    async def start(self) -> None:
        """Start the samplers. Trainers start with their models.

        Raises:
            PartDied: A sampler died.
            ValueError: The engine cannot run the model.
        """
        for sampler in self._samplers:
            await sampler.start()

    def adapters(self, base_model: str, *, rank: int, attention: bool, mlp: bool) -> str:
        """Return adapters as in model.lora."""
        return adapters(self._linear_layers, rank=rank, attention=attention, mlp=mlp)

    async def start_trainer(
        self, name: str, base_model: str, lora: str, seed: int, owner: str
    ) -> RayTrainer:
        """Start the trainer of a model. Owners take turns."""
        served = self._served
        check_adapters(replace(served.model, lora=lora), served.trainer)
        trainer = RayTrainer(name, served, lora, seed, owner, self._pool)
        self._trainers = [one for one in self._trainers if not one.is_closed]
        self._trainers.append(trainer)
        try:
            await trainer.start()
        except BaseException:  # cancelled too: the session has ended
            await trainer.close()
            raise
        return trainer

    async def sample(
        self, weights: SamplerWeights, requests: Sequence[GenerationRequest], owner: str
    ) -> Sequence[Generation]:
        """Return completions from the sampler that can start them first."""
        sampler = min(self._samplers, key=lambda one: one.load_of(weights))
        return await sampler.sample(weights, requests, owner)

    async def score(self, request: ScoreRequest) -> Sequence[Scores]:
        """Return the scores of each row."""
        return await self._samplers[0].score(request)

    async def close(self) -> None:
        """End all samplers and trainers."""
        for sampler in self._samplers:
            await sampler.close()
        for trainer in self._trainers:
            with contextlib.suppress(PartDied):
                await trainer.close()
        await self._pool.close()

    def _published(self, number: int, node_id: str) -> WeightManifest | None:
        """Return the manifest of published weights if all shares are on that node."""
        for trainer in self._trainers:
            manifest = trainer.published
            if manifest is not None and manifest.version == number:
                is_here = all(share.node == node_id for share in manifest.shares)
                return manifest if is_here else None
        return None

    def _start_sampler(self, name: str) -> Worker:
        served = self._served
        options = {"num_cpus": 0, "num_gpus": served.rollout.num_gpus}
        return Worker(
            name,
            SamplerActor.options(**options).remote(self._sampler_factory()),  # type: ignore[attr-defined]
            timeout_s=served.cluster.call_timeout_s,
            heartbeat_timeout_s=served.cluster.heartbeat_timeout_s,
        )

    def _sampler_factory(self) -> SamplerFactory:
        served = self._served
        return SamplerFactory(
            make_engine=_SamplerEngine(served=served, max_context=self._base.limits.max_context),
            base_path=served.model.path,
            dtype=served.model.dtype,
            device="cuda" if served.rollout.num_gpus else "cpu",
            pass_tokens=served.trainer.micro_batch_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class _SamplerEngine:
    served: ServedModel
    max_context: int

    def __call__(self) -> Any:
        from rlsys.engines.generation.engine_choice import build_engine

        served = self.served
        return build_engine(
            served.model, served.rollout, SamplingConfig(), max_context=self.max_context
        )


def _warn(message: str) -> None:
    """Print a line in the log of the server."""
    print(f"warning: {message}", flush=True)


def adapters(linear_layers: Sequence[str], *, rank: int, attention: bool, mlp: bool) -> str:
    """Return adapters as in model.lora, for all linear layers but the head or a part of them.

    Raises:
        InvalidValue: The names of the layers do not show which are of attention or MLP.
    """
    if attention and mlp:
        return f"r{rank}a{ALPHA}"
    attention_layers = [name for name in linear_layers if "attn" in name or "attention" in name]
    chosen = attention_layers if attention else sorted(set(linear_layers) - set(attention_layers))
    suffixes = sorted({name.rpartition(".")[2] for name in chosen})
    other_suffixes = {name.rpartition(".")[2] for name in set(linear_layers) - set(chosen)}
    if not suffixes or other_suffixes & set(suffixes):
        what = "attention" if attention else "MLP"
        raise InvalidValue(
            "lora_config",
            rule=f"the names of the model's layers do not show which are {what}",
            fix="Train both, with train_attn=True and train_mlp=True.",
        )
    return f"r{rank}a{ALPHA}:{','.join(suffixes)}"

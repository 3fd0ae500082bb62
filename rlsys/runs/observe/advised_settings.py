"""Settings of a run on which the fixes of findings depend.

config.json or to_dict(config) ─► advised_settings ─► rlsys.runs.observe.diagnosis

A fix must be one that the user can follow: no replica can be removed from one, and float32 has no
more precise alternative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# More precise types of the weights than each of these.
PRECISER = {"bfloat16": ("float32", "float16"), "float16": ("float32",)}


@dataclass(frozen=True, kw_only=True)
class AdvisedSettings:
    """Settings that fixes name. The defaults are those of RunConfig.

    Attributes:
        max_staleness: asynchrony.max_staleness.
        updates: Optimizer updates of a step. The bound is at least one less.
        order: asynchrony.order.
        dtype: model.dtype.
        quantization: rollout.quantization, "" for none.
        num_replicas: Number of replicas.
        on_gpus: Whether replicas have GPUs.
        engine: rollout.engine.
        max_running: rollout.max_running.
        shares_devices: Whether sampling and training take turns on the same devices, so that
            neither can be too slow for the other.
    """

    max_staleness: int = 1
    updates: int = 1
    order: str = "issued"
    dtype: str = "float32"
    quantization: str = ""
    num_replicas: int = 1
    on_gpus: bool = False
    engine: str = "torch"
    max_running: int = 256
    shares_devices: bool = False

    @property
    def precision_fix(self) -> str:
        """A change after which sampler and trainer compute more alike, or ""."""
        if self.quantization:
            return "leave out rollout.quantization"
        names = " or ".join(f'"{name}"' for name in PRECISER.get(self.dtype, ()))
        return f"use model.dtype={names} instead of {self.dtype}" if names else ""

    @property
    def staleness_fix(self) -> str:
        """A change after which the data is less stale, or ""."""
        return "lower asynchrony.max_staleness" if self.max_staleness >= self.updates else ""

    @property
    def cache_fix(self) -> str:
        """A change with which an engine has more memory for keys and values."""
        vllm_on_gpus = self.on_gpus and self.engine == "vllm"
        return "raise rollout." + ("gpu_memory_frac" if vllm_on_gpus else "kv_cache_gib")

    @property
    def fewer_replicas_fix(self) -> str:
        """A change with which fewer processes generate, or ""."""
        return "remove replicas (rollout.num_replicas)" if self.num_replicas > 1 else ""

    @property
    def more_generation_fix(self) -> str:
        """A change with which more is generated at a time."""
        cores = "" if self.on_gpus else ", or their cores (rollout.num_cpus)"
        return f"raise rollout.num_replicas{cores}"


def advised_settings(config: Mapping[str, Any]) -> AdvisedSettings:
    """Return the settings of a configuration as config.json has it; others have their default."""
    own = AdvisedSettings()

    def value(name: str, default: Any) -> Any:
        found: Any = config
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        kind = (int, float) if isinstance(default, float) else type(default)
        return found if isinstance(found, kind) else default

    urls = value("rollout.urls", [])
    return AdvisedSettings(
        max_staleness=value("asynchrony.max_staleness", own.max_staleness),
        updates=value("trainer.num_minibatches", 1) * value("trainer.num_epochs", 1),
        order=value("asynchrony.order", own.order),
        dtype=value("model.dtype", own.dtype),
        quantization=value("rollout.quantization", own.quantization),
        num_replicas=len(urls) or value("rollout.num_replicas", own.num_replicas),
        on_gpus=value("rollout.num_gpus", 0.0) > 0,
        engine=value("rollout.engine", own.engine),
        max_running=max(1, value("rollout.max_running", own.max_running)),
        shares_devices=value("placement", "") == "colocated",
    )


def sentence(changes: Sequence[str]) -> str:
    """Return alternatives as one sentence; empty ones are left out."""
    found = [change for change in changes if change]
    text = " or ".join((", ".join(found[:-1]), found[-1])) if len(found) > 2 else " or ".join(found)
    return f"{text[:1].upper()}{text[1:]}."

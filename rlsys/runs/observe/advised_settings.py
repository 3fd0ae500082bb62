"""Settings of a run on which the fixes of findings depend.

config.json or to_dict(config), machines ─► advised_settings ─► rlsys.runs.observe.diagnosis

A fix must be one that the user can follow: no replica can be removed from one, and float32 has no
more precise alternative.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.config.parallel_layout import parse_layouts
from rlsys.errors import InvalidValue

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
        has_room: Whether the machines have cores, or GPUs, for one more replica.
        found: Kinds of findings so far. Later fixes must not undo theirs.
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
    has_room: bool = True
    found: frozenset[str] = frozenset()

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
    def staler_fix(self) -> str:
        """A change after which more rollouts are in progress, or "" if the data is too stale."""
        is_too_stale = self.found & {"kl_sampler_trainer", "diverging"}
        return "" if is_too_stale else "raise asynchrony.max_staleness"

    @property
    def shorter_fix(self) -> str:
        """A change after which completions are shorter, or "" if they are cut off already."""
        return "" if "truncated" in self.found else "lower sampling.max_tokens"

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
        if not self.has_room:
            devices = "GPUs" if self.on_gpus else "cores"
            return f"use machines with more {devices}, because these have none left"
        cores = "" if self.on_gpus else ", or their cores (rollout.num_cpus)"
        return f"raise rollout.num_replicas{cores}"


def advised_settings(config: Mapping[str, Any], cluster: str = "") -> AdvisedSettings:
    """Return the settings of a configuration as config.json has it; others have their default.

    Args:
        config: The configuration.
        cluster: Devices of the run, such as 1x2xCPU or 2x8xH100, or "" if they are unknown.
    """
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
        has_room=bool(urls) or _has_room(config, cluster),
    )


def _has_room(config: Mapping[str, Any], cluster: str) -> bool:
    """Return whether one more replica fits onto the devices, True if that is unknown."""
    devices = re.fullmatch(r"(?:([0-9]+)x)?([0-9]+)x(\S+)", cluster)
    joins = isinstance(address := _section(config, "cluster").get("address"), str)
    if devices is None or (joins and address != "local"):
        return True
    kind = "num_cpus" if devices[3].upper() == "CPU" else "num_gpus"
    total = int(devices[1] or 1) * int(devices[2])
    return total - _reserved(config, kind) >= _number(_section(config, "rollout").get(kind))


def _reserved(section: Mapping[str, Any], kind: str) -> float:
    """Return the cores or GPUs that all workers of a configuration reserve."""
    total = sum(_reserved(one, kind) for one in section.values() if isinstance(one, Mapping))
    if isinstance(layouts := section.get("layout"), str):
        num_workers: float = _num_ranks(layouts)
    else:
        num_workers = _number(section.get("num_replicas", section.get("num_workers", 1)))
    return total + num_workers * _number(section.get(kind))


def _num_ranks(layouts: str) -> int:
    """Return the ranks of the preferred layout of a list, 1 if it is unreadable."""
    try:
        return parse_layouts(layouts)[0].num_ranks
    except InvalidValue:
        return 1


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0.0


def sentence(changes: Sequence[str]) -> str:
    """Return alternatives as one sentence; empty ones are left out."""
    found = [change for change in changes if change]
    text = " or ".join((", ".join(found[:-1]), found[-1])) if len(found) > 2 else " or ".join(found)
    return f"{text[:1].upper()}{text[1:]}."

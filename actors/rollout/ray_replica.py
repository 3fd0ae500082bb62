"""A replica of the controller whose engine runs in a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlsys.controller.worker_protocols import (
    Collected,
    ReplicaDied,
    RowsLost,
    StepPart,
    WeightsGone,
    Withdrawn,
)
from rlsys.dataflow.store.blocks import ColumnRef
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.reallocation.transport.shared_device import DeviceSharingError
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.types import GenerationRequest, WeightManifest

from ..cluster.calls import InputLost, Worker, WorkerError
from ..cluster.long_poll import COLLECT_WAIT_S
from ..cluster.method_words import doing
from ..store.store_shards import StoreShards
from ..trainer.trainer_proxy import RayTrainerProxy

# Errors that end a replica. Other errors are a user's mistake and would repeat in its successor.
DEADLY = (WorkerError, EngineError, RowsLost, OSError)


class RayReplica:
    """A process of a replica, from `start` on.

    Any failure except a user's mistake ends its process. `trainer_proxy` publishes its weights;
    None if they never change.
    """

    def __init__(
        self, worker: Worker, trainer_proxy: RayTrainerProxy | None, shards: StoreShards
    ) -> None:
        self.worker = worker
        self._trainer_proxy = trainer_proxy
        self._shards = shards
        self.node_id = self._actor_id = ""

    @property
    def workers(self) -> list[Worker]:
        """Return its processes."""
        return [self.worker]

    @property
    def nodes(self) -> set[str]:
        """Return the ids of the nodes on which it loads weights; empty before its start."""
        return {self.node_id} - {""}

    @property
    def name(self) -> str:
        """Return the name of this life."""
        return self.worker.name

    @property
    def node(self) -> str:
        """Return the id of its node."""
        return self.node_id

    async def start(self, timeout_s: float) -> None:
        """Start the engine."""
        self.node_id, self._actor_id = await self._call("place", timeout_s=timeout_s)
        await self._call("start", timeout_s=timeout_s)

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Sequence[ColumnRef]]
    ) -> None:
        """Submit requests; see `RolloutActor.submit`."""
        await self._call("submit", list(requests), {name: list(c) for name, c in priors.items()})

    async def collect(self) -> Collected:
        """Return what has ended since the last call."""
        collected: Collected = await self._poll("collect")
        return collected

    async def progress(self) -> Sequence[StepPart]:
        """Return all new tokens of running requests."""
        parts: list[StepPart] = await self._call("progress", 1)
        return parts

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests."""
        await self._call("abort", list(request_ids))

    async def withdraw(self, request_ids: Sequence[str]) -> Withdrawn:
        """Stop sampling requests so that another replica continues them."""
        withdrawn: Withdrawn = await self._call("withdraw", list(request_ids))
        return withdrawn

    async def release(self) -> None:
        """Free the memory of the engine until new weights arrive."""
        await self._call("release")

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        """Load a version; return the seconds without sampling."""
        if delayed:  # without a limit; rollouts are collected meanwhile
            while not await self._poll("drain"):
                pass
        try:
            return await self._take(manifest)
        except DamagedWeightsError:  # possibly damaged in transit, so load it again
            try:
                return await self._take(manifest)
            except DamagedWeightsError as error:
                self._publisher.mark_corrupt(manifest, str(error))
                raise self._died("update_weights", error) from None

    async def _take(self, manifest: WeightManifest) -> float:
        local: WeightManifest | None = None
        try:
            while True:
                local = None
                local = await self._on_node(manifest)
                try:
                    pause_s: float = await self.worker.call("update_weights", local)
                except DeviceSharingError as error:
                    self._publisher.imports.refuse_devices(f"{self.name}: {error}")
                except FileNotFoundError:
                    if not self._publisher.imports.take_over(self.node_id, local, self.worker):
                        raise
                else:
                    return pause_s
        except (InputLost, FileNotFoundError) as error:
            raise WeightsGone(
                f"{self.name} cannot load version {manifest.version} any more: {error}"
            ) from None
        except DamagedWeightsError:
            self._publisher.imports.damaged(manifest, self.node_id, local)
            raise
        except (*DEADLY, ValueError) as error:
            raise self._died("update_weights", error) from None

    async def _on_node(self, manifest: WeightManifest) -> WeightManifest:
        """Return a version as this node has it; a version without weights has no data."""
        if not manifest.shares:
            return manifest
        return await self._publisher.imports.on_node(manifest, self.node_id, self.worker)

    @property
    def _publisher(self) -> RayTrainerProxy:
        assert self._trainer_proxy is not None, "its weights never change"
        return self._trainer_proxy

    async def clean_up(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """Kill the process and reclaim its memory in the store."""
        self.worker.kill()
        await self._shards.reclaim(self._actor_id, live_rows)

    async def _poll(self, method: str) -> Any:
        """Call a method that waits up to COLLECT_WAIT_S by design."""
        return await self._call(method, timeout_s=COLLECT_WAIT_S + self.worker.timeout_s)

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        try:
            return await self.worker.call(method, *args, timeout_s=timeout_s)
        except DEADLY as error:
            raise self._died(method, error) from None

    def _died(self, method: str, error: Exception) -> ReplicaDied:
        self.worker.end(str(error))
        is_complete = isinstance(error, WorkerError)
        return ReplicaDied(
            str(error) if is_complete else f"{self.name} died while {doing(method)}: {error}"
        )

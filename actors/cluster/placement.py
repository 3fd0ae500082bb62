"""Reserve a place in the cluster for every rank and every replica.

In: what each actor needs. Out: places, reserved as Ray placement groups: one for all ranks of a
model and one for each replica, so that a replica that waits for a new node does not block others.
A colocated replica shares the places of one rank or of several. Several such ranks have a placement
group of their own on one node, because the processes of a replica are on one node. A place outlives
its actor: the successor takes it over. When the node is lost, Ray reserves the place on another
node as soon as one has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlsys.common.option_names import option
from rlsys.errors import NOT_GIVEN, InvalidValue

from .local_ray import RayFailed, is_intact, last_line, within

# Ray's smallest share of a core or GPU is a ten-thousandth.
RAY_UNITS = 10_000

# Limit for releasing a reservation; if Ray's head is dead, the call never returns.
RELEASE_TIMEOUT_S = 2.0


class ClusterTooSmall(InvalidValue):
    """The cluster can never hold the run, or had no room for it in time."""

    def __init__(
        self, field: str = "cluster", value: Any = NOT_GIVEN, *, rule: str, fix: str
    ) -> None:
        super().__init__(field, value, rule=rule, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Reservation of one actor. `fix` names the option that changes it."""

    name: str
    num_cpus: float
    num_gpus: float
    fix: str
    colocated_with: tuple[Need, ...] = ()  # shares the places of these and reserves nothing
    is_shared: bool = False  # another need is colocated with it
    partners: tuple[Need, ...] = ()  # start and end with it, on the same node if it has room

    def __str__(self) -> str:
        gpus = f", {self.num_gpus:g} GPU" if self.num_gpus else ""
        others = " and ".join(other.name for other in self.colocated_with)
        place = f" shares the devices of {others}, in turns" if others else ""
        return f"{self.name} ({self.num_cpus:g} CPU{gpus}){place}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Reserved resources for one actor."""

    need: Need
    group: PlacementGroup
    index: int  # of the bundle in its group
    partners: tuple[Place, ...] = ()
    shared: tuple[Place, ...] = ()  # of the needs with which it is colocated; its own is the first
    devices: tuple[str, ...] = ()  # GPUs of these places, if `with_devices` has asked for them

    @property
    def options(self) -> dict[str, Any]:
        """Return the Ray options of the actor that uses the place.

        Two actors that share a place exist at the same time. Ray counts its cores for one of them
        and half of its GPU for each. An actor that shares several places is in the first of them
        and gets the GPUs of the others from `with_devices`.
        """
        need = self.need
        num_sharing = 2 if need.colocated_with or need.is_shared else 1
        return {
            "num_cpus": 0 if need.colocated_with else need.num_cpus,
            "num_gpus": need.num_gpus / (num_sharing * max(1, len(need.colocated_with))),
            **self.bundle,
        }

    @property
    def bundle(self) -> dict[str, Any]:
        """Return the Ray option that puts an actor or a task into this place."""
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.index
            )
        }

    async def node_id(self) -> str:
        """Return the id of the node of the place, after waiting until it has one.

        Raises:
            RayFailed: Ray considers this run dead and has removed its places.
        """
        try:
            await self.group.ready()
        except RayError as error:
            raise RayFailed(
                f"Ray removed the reservation of {self.need.name} ({last_line(error)}). It "
                "considers the recipe's node dead: the node was suspended or is overloaded. "
                f"Continue with {option('resume', True)}."
            ) from error
        node_id: str = placement_group_table(self.group)["bundles_to_node_id"][self.index]
        return node_id

    async def with_devices(self, timeout_s: float) -> Place:
        """Return the place with the GPUs of all places that it shares.

        Ray gives an actor the GPU of one place only. Each place is asked with the share that the
        actor leaves unused there, because the rank there may be dead. On CPUs, and in a single
        place, nothing is asked.

        Raises:
            TimeoutError: A place did not answer within `timeout_s`.
            RayError: A node is lost.
        """
        if len(self.shared) < 2 or not self.need.num_gpus:
            return self
        asked = [
            _visible_device.options(**{**self.options, **place.bundle}).remote()
            for place in self.shared
        ]
        async with asyncio.timeout(timeout_s):
            return replace(self, devices=tuple(await asyncio.gather(*asked)))


@ray.remote(max_calls=1)
def _visible_device() -> str:
    """Return the GPU that Ray gives to a task in one place."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places of all actors of a run."""

    ranks: Sequence[Place]
    replicas: Sequence[Place]
    roles: Mapping[str, Sequence[Place]]  # by name of the model


def places_on_live_nodes(places: Sequence[Place]) -> dict[int, str]:
    """Return the live node of each place, by its number, without places that wait for a node.

    The calls to Ray may take a while.
    """
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    tables = {group: placement_group_table(group) for group in {place.group for place in places}}
    found = {}
    for number, place in enumerate(places):
        node_id = tables[place.group]["bundles_to_node_id"].get(place.index)
        if node_id in alive:
            found[number] = node_id
    return found


def check_capacity(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise ClusterTooSmall unless the nodes' total resources hold all needs.

    Places first fit, largest first: an estimate of what Ray's own packing achieves, not a
    placement.
    """
    free = [[_units(node.get(kind, 0)) for kind in ("CPU", "GPU")] for node in nodes]
    for need in sorted(needs, key=_largest_first):
        cpus, gpus = _units(need.num_cpus), _units(need.num_gpus)
        for node in free:
            if node[0] >= cpus and node[1] >= gpus:
                node[:] = node[0] - cpus, node[1] - gpus
                break
        else:
            raise ClusterTooSmall(
                rule=f"the run needs {_total(needs)} ({_grouped(needs)}), the cluster "
                f"has {_describe(nodes)}; there is no room for {need.name}",
                fix=f"Lower {need.fix}, or add a node.",
            )


@contextlib.asynccontextmanager
async def reserved(
    ranks: Sequence[Need],
    replicas: Sequence[Need],
    *,
    roles: Mapping[str, Sequence[Need]],
    min_replicas: int,
    timeout_s: float,
) -> AsyncIterator[Places]:
    """Reserve a place for each need until the block ends.

    All ranks, the workers of all other models and the first `min_replicas` replicas with their
    partners have their places when the block starts.

    Raises:
        ClusterTooSmall: The cluster is too small for these, or other programs did not free the room
            within `timeout_s` (cluster.start_timeout_s).
    """
    needed = [*ranks, *(need for of_role in roles.values() for need in of_role)]
    alone = [[need, *need.partners] for need in replicas if not need.colocated_with]
    needed += [
        one
        for need in replicas[:min_replicas]
        if not need.colocated_with
        for one in (need, *need.partners)
    ]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    check_capacity(by_node(needed, ranks_on_one_node(replicas)), nodes)
    together = [*ranks_on_one_node(replicas).values()]
    # Ray places groups in this order: the largest first, optional ones last.
    others = [rank for rank in ranks if not any(rank in of_one for of_one in together)]
    parts: list[Sequence[Need]] = [part for part in (others, *roles.values()) if part]
    parts += [*together, *alone[:min_replicas]]
    parts.sort(key=lambda part: _largest_first(part[0]))
    parts += alone[min_replicas:]
    places: dict[Need, Place] = {}
    try:
        for part in parts:
            group = placement_group(
                [{"CPU": need.num_cpus, "GPU": need.num_gpus} for need in part],
                strategy="STRICT_PACK" if part in together else "PACK",
            )
            for index, need in reversed([*enumerate(part)]):  # partners follow their replica
                partners = tuple(places[one] for one in need.partners)
                places[need] = Place(need=need, group=group, index=index, partners=partners)
        for need in replicas:
            if need.colocated_with:
                shared = tuple(places[rank] for rank in need.colocated_with)
                places[need] = replace(shared[0], need=need, shared=shared)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(places[need].node_id() for need in needed))
        except TimeoutError:
            raise ClusterTooSmall(
                rule=f"the run needs {_total(needed)}; the cluster is large enough "
                f"({_describe(nodes)}), but other programs used it for {timeout_s:g} s "
                "(cluster.start_timeout_s)",
                fix="Wait until they end, or add a node.",
            ) from None
        yield Places(
            ranks=[places[need] for need in ranks],
            replicas=[places[need] for need in replicas],
            roles={name: [places[need] for need in needs] for name, needs in roles.items()},
        )
    finally:
        for group in {place.group for place in places.values()}:
            if is_intact():
                within(RELEASE_TIMEOUT_S, functools.partial(remove_placement_group, group))


def ranks_on_one_node(replicas: Sequence[Need]) -> dict[str, tuple[Need, ...]]:
    """Return the ranks of each replica that shares the places of several, by its name."""
    return {need.name: need.colocated_with for need in replicas if len(need.colocated_with) > 1}


def by_node(needs: Sequence[Need], together: Mapping[str, tuple[Need, ...]]) -> list[Need]:
    """Return the needs; those of ranks that must be on one node are summed."""
    sums = [
        replace(
            ranks[0],
            name=f"ranks of {replica}",
            num_cpus=sum(need.num_cpus for need in ranks),
            num_gpus=sum(need.num_gpus for need in ranks),
        )
        for replica, ranks in together.items()
    ]
    summed = {need for ranks in together.values() for need in ranks}
    return [*sums, *(need for need in needs if need not in summed)]


def _units(share: float) -> int:
    """Return the share in Ray's units; integers add up exactly to a whole node."""
    return round(share * RAY_UNITS)


def _largest_first(need: Need) -> tuple[float, float]:
    return (-need.num_gpus, -need.num_cpus)


def _grouped(needs: Sequence[Need]) -> str:
    """Return the needs in a line, with those that differ only in their number as one item."""
    groups: dict[str, list[Need]] = {}
    for need in needs:
        kind = re.sub(r"-\d+$", "", need.name)
        groups.setdefault(str(replace(need, name=kind)), []).append(need)
    return ", ".join(
        str(same[0]) if len(same) == 1 else f"{len(same)} x {kind}" for kind, same in groups.items()
    )


def _total(needs: Sequence[Need]) -> str:
    cpus, gpus = sum(need.num_cpus for need in needs), sum(need.num_gpus for need in needs)
    return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def _describe(nodes: Sequence[Mapping[str, float]]) -> str:
    each = [f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes]
    return f"{len(nodes)} node(s): " + "; ".join(each)

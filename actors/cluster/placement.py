"""A place in the cluster for every rank of the trainer and for every replica.

In: what each actor needs. Out: places, reserved as Ray placement groups: one for all ranks of a
model, one for each replica, so that a replica can wait for a node that is yet to come without
holding up others. Or a replica has the place of a rank, in turns with it. A place outlives the
actor in it: the successor takes it over, and when its node is lost, Ray reserves it on another as
soon as one has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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

from .local_ray import RayFailed, is_intact, last_line, within

# Ray's smallest share of a core or GPU is a ten-thousandth.
RAY_UNITS = 10_000

# For giving a reservation back; where Ray's head is dead nobody waits for it.
RELEASE_TIMEOUT_S = 2.0


class ClusterTooSmall(ValueError):
    """The cluster can never hold the run, or did not have the room in time."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one actor reserves. `fix` names the option that changes it."""

    name: str
    num_cpus: float
    num_gpus: float
    fix: str
    beside: Need | None = None  # in whose place it is, which is large enough; reserves nothing
    is_shared: bool = False  # another is beside it
    partners: tuple[Need, ...] = ()  # come and go with it, on its node if that has the room

    def __str__(self) -> str:
        gpus = f", {self.num_gpus:g} GPU" if self.num_gpus else ""
        place = f" in the place of {self.beside.name}, in turns" if self.beside else ""
        return f"{self.name} ({self.num_cpus:g} CPU{gpus}){place}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Room for one actor."""

    need: Need
    group: PlacementGroup
    index: int  # of the bundle in its group
    partners: tuple[Place, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Of the actor that is to take the place. Two that share it are there at the same time: one
        has its cores as Ray counts them, and each half of its GPU.
        """
        need = self.need
        num_sharing = 2 if need.beside or need.is_shared else 1
        return {
            "num_cpus": 0 if need.beside else need.num_cpus,
            "num_gpus": need.num_gpus / num_sharing,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.index
            ),
        }

    async def node_id(self) -> str:
        """Of the node that has it; waits until one has. Raises RayFailed if Ray takes this run for
        dead, and its places with it.
        """
        try:
            await self.group.ready()
        except RayError as error:
            raise RayFailed(
                f"Ray has taken the place of {self.need.name} from the run ({last_line(error)}): "
                "the recipe's node counts as dead, because it was stopped, or has too much to do. "
                f"Continue with {option('resume', True)}."
            ) from error
        node_id: str = placement_group_table(self.group)["bundles_to_node_id"][self.index]
        return node_id


@dataclass(frozen=True, kw_only=True)
class Places:
    ranks: Sequence[Place]
    replicas: Sequence[Place]
    roles: Mapping[str, Sequence[Place]]  # by the name of the model beside the policy


def standing(places: Sequence[Place]) -> dict[int, str]:
    """By number of a place, the living node that has it; without those that wait for one. Asks Ray,
    which may take a while.
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
    """Raise ClusterTooSmall unless the nodes' resources, all free, hold all needs.

    First fit, largest first: a bound on what Ray's own packing achieves, not a placement.
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
                f"the run needs {_total(needs)} ({', '.join(map(str, needs))}), the cluster has "
                f"{_describe(nodes)}; {need.name} finds no place. Lower {need.fix}, or add a node."
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
    """Reserve a place for each; given back at the end of the block. All ranks, the workers of all
    other models and the first `min_replicas` replicas, with their partners, have theirs when the
    block begins.

    Raises ClusterTooSmall if the cluster is too small for these, or if others have not freed the
    room for them within `timeout_s` (cluster.start_timeout_s).
    """
    needed = [*ranks, *(need for of_role in roles.values() for need in of_role)]
    alone = [[need, *need.partners] for need in replicas if need.beside is None]
    needed += [
        one
        for need in replicas[:min_replicas]
        if need.beside is None
        for one in (need, *need.partners)
    ]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    check_capacity(needed, nodes)
    # Ray looks for room in this order: as above, the largest first; what may wait, last.
    parts: list[Sequence[Need]] = [ranks, *roles.values()]
    parts += alone[:min_replicas]
    parts.sort(key=lambda part: _largest_first(part[0]))
    parts += alone[min_replicas:]
    places: dict[Need, Place] = {}
    try:
        for part in parts:
            group = placement_group(
                [{"CPU": need.num_cpus, "GPU": need.num_gpus} for need in part], strategy="PACK"
            )
            for index, need in reversed([*enumerate(part)]):  # partners stand behind
                partners = tuple(places[one] for one in need.partners)
                places[need] = Place(need=need, group=group, index=index, partners=partners)
        for need in replicas:
            if need.beside is not None:
                places[need] = replace(places[need.beside], need=need)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(places[need].node_id() for need in needed))
        except TimeoutError:
            raise ClusterTooSmall(
                f"the run needs {_total(needed)}; the cluster is large enough "
                f"({_describe(nodes)}), but others have held it for {timeout_s:g} s "
                "(cluster.start_timeout_s). Wait for them, or add a node."
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


def _units(share: float) -> int:
    """Whole numbers, in which Ray counts too: shares that add up to a node fill it exactly."""
    return round(share * RAY_UNITS)


def _largest_first(need: Need) -> tuple[float, float]:
    return (-need.num_gpus, -need.num_cpus)


def _total(needs: Sequence[Need]) -> str:
    cpus, gpus = sum(need.num_cpus for need in needs), sum(need.num_gpus for need in needs)
    return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def _describe(nodes: Sequence[Mapping[str, float]]) -> str:
    each = [f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes]
    return f"{len(nodes)} node(s): " + "; ".join(each)

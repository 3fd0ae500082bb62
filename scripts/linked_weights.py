"""Weights of real ranks that arrive in this process over links, as on another node."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.reallocation.transport.group_transport import GroupReceiver, GroupSender
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.weight_deltas import Inbox, WeightOffer
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.reallocation.transport.wires import Limits
from rlsys.types import WeightManifest

HOST = "127.0.0.1"
NODE = "another node"
# The receiver comes when all layouts are trained.
PATIENT = Limits(form_s=1800.0, bucket_s=600.0)


@dataclass(frozen=True, kw_only=True)
class OfferedWeights:
    """A version that its ranks are sending."""

    manifest: WeightManifest
    offers: tuple[WeightOffer, ...]
    link: Link


def offered(
    engine: FSDPEngine, manifest: WeightManifest | None, opened: ExitStack
) -> OfferedWeights:
    """Send this rank's part of a version that rank 0 has published; a collective."""
    ranks = engine.ranks
    (manifest,) = [one for one in ranks.all(manifest) if one is not None]
    weight_delta = engine.weight_delta(manifest, NODE, None)
    sender = GroupSender(HOST, PATIENT)
    opened.callback(sender.close)
    link = Link(kind="gloo", node=NODE, importer="a reader", trainer=0, number=1 + manifest.version)
    offer = None if weight_delta is None else sender.offer(weight_delta)
    if offer is not None:
        sender.send(offer, link)
    offers = tuple(one for one in ranks.all(offer) if one is not None)
    return OfferedWeights(manifest=manifest, offers=offers, link=link)


def received(weights: OfferedWeights, opened: ExitStack) -> WeightManifest:
    """Receive a version into memory of this process, and keep it open."""
    shares = GroupReceiver(HOST, PATIENT).receive(Inbox(), weights.offers, weights.link)
    local = replace(weights.manifest, shares=tuple(shares))
    return opened.enter_context(Weights(local)).local

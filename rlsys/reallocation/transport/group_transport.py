"""Versions of the weights over process groups: the ends of a rank and of an importer.

    rank                                         importer, one per node
    GroupSender.offer(delta) ──► WeightOffer ──► GroupReceiver.receive(inbox, offers, link)
    GroupSender.send(offer, link) ════════ wire ══════════► inbox

An offer describes a WeightDelta without its bytes, so the control path carries little. The importer
receives the bytes directly into the memory that the readers of its node map.

A rank sends from threads, one per link. A dead or slow importer delays only its own thread, never
the trainer's step or another importer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch.distributed as dist

from rlsys.common.background_tasks import report, start_thread
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.shared_memory import Bytes
from rlsys.reallocation.transport.weight_deltas import Inbox, WeightDelta, WeightOffer, parts_of
from rlsys.reallocation.transport.wires import (
    DEFAULT_LIMITS,
    RECEIVER,
    SENDER,
    Limits,
    LinkError,
    Meeting,
    Wires,
    make_wire,
    receive,
    send,
)
from rlsys.types import WeightShare

logger = logging.getLogger(__name__)

# Errors of groups and stores: gloo raises RuntimeError, the store DistError, sockets OSError.
LINK_ERRORS = (RuntimeError, dist.DistError, OSError)


class GroupSender:
    """The end of a rank. `host` is the address of its node."""

    def __init__(self, host: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self._host = host
        self._limits = limits
        self._meeting: Meeting | None = None  # opened by the first offer
        self._wires = Wires()
        self._number = 0
        self._offered: dict[int, tuple[int, Sequence[Bytes]]] = {}  # version and parts by number
        self._lock = threading.Lock()

    def offer(self, weight_delta: WeightDelta) -> WeightOffer:
        """Keep a delta until one of another version is offered."""
        share, parts = weight_delta.share, parts_of(weight_delta.content)
        with self._lock:
            if self._meeting is None:
                self._meeting = Meeting(self._host)
            self._number += 1
            self._offered = {
                number: one for number, one in self._offered.items() if one[0] == share.version
            }
            self._offered[self._number] = share.version, parts
            return WeightOffer(
                share=share,
                base=weight_delta.base,
                sizes=tuple(map(len, parts)),
                number=self._number,
                meeting=self._meeting.address,
            )

    def send(self, offer: WeightOffer, link: Link) -> None:
        """Start to send what was offered; the importer reports failures to the controller."""
        with self._lock:
            offered = self._offered.get(offer.number)
        parts = None if offered is None else offered[1]
        start_thread(self._send, link, parts, name=f"rlsys-weights-to-{link.importer}", fail=report)

    def _send(self, link: Link, parts: Sequence[Bytes] | None) -> None:
        assert self._meeting is not None, "offer comes first"
        connect = partial(make_wire, link, SENDER, self._meeting.address, self._host, self._limits)
        try:
            wire = self._wires.get(link.node, link, connect)
            if parts is None:  # a newer version was offered meanwhile
                self._wires.drop(link.node, link)
                return
            send(wire, parts)
        except LINK_ERRORS as error:
            self._wires.drop(link.node, link)
            logger.info("weights were not sent to %s: %s", link.importer, _first_line(error))

    def close(self) -> None:
        """Close all links."""
        self._wires.keep(())


class GroupReceiver:
    """The end of an importer. `host` is the address of its node."""

    def __init__(self, host: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self._host = host
        self._limits = limits
        self._wires = Wires()

    def receive(self, inbox: Inbox, offers: Sequence[WeightOffer], link: Link) -> list[WeightShare]:
        """Return offered versions as shares of this node, received from all ranks at once.

        Raises LinkError if a link does not form, breaks or takes too long, and as `Inbox.receive`
        does.
        """
        with ThreadPoolExecutor(max(1, len(offers)), thread_name_prefix="rlsys-import") as threads:
            receiving = [
                threads.submit(inbox.receive, one, partial(self._fetch, one, link))
                for one in offers
            ]
        if broken := [one.exception() for one in receiving if _is_broken(one.exception())]:
            raise LinkError(
                f"{link.importer} at {self._host} did not receive weights over {link.kind} from "
                f"{'; '.join(map(str, broken))}. A link must form within {self._limits.form_s:g} "
                f"s, and move a bucket within {self._limits.bucket_s:g} s. Allow connections "
                'between the nodes on all ports, or use rollout.weight_transport="objects".'
            )
        return [one.result() for one in receiving]

    def keep(self, ranks: Sequence[int]) -> None:
        """Close the links of all other ranks."""
        self._wires.keep(list(map(str, ranks)))

    def _fetch(self, offer: WeightOffer, link: Link, parts: Sequence[Bytes]) -> None:
        key = str(offer.share.rank)
        connect = partial(make_wire, link, RECEIVER, offer.meeting, self._host, self._limits)
        try:
            receive(self._wires.get(key, link, connect), parts)
        except LINK_ERRORS as error:
            self._wires.drop(key, link)
            host, port = offer.meeting
            raise LinkError(
                f"rank {key} at {host}:{port} ({type(error).__name__}: {_first_line(error)})"
            ) from None


def _is_broken(error: BaseException | None) -> bool:
    return isinstance(error, LinkError)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]

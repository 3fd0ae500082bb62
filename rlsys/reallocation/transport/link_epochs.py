"""Membership of the links over which the ranks of a trainer send weights to other nodes.

On each node, one process imports weights for all readers of the node. A link connects a rank to
this process. All links of a node belong to one epoch:

              join                           worked
    (none) ───────► epoch n ──► link ◄──────────────┐
                       ▲         │ failed, interrupted, another importer
                       └─ n + 1 ◄┴─► after MAX_FAILURES in a row: no links for RETRY_AFTER_S

Both ends know the epoch of a link, so a message of an earlier epoch never reaches a later one. A
node's epochs do not depend on other nodes: a process that dies interrupts the links of its own node
only. The clock is injected, and there is no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from rlsys.config.rollout_config import WeightTransport

# gloo sends from host memory, nccl from buffers on GPUs.
LinkKind = Literal["gloo", "nccl"]

# The first failure may be a death that its supervisor has not noticed yet.
MAX_FAILURES = 2
RETRY_AFTER_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """The links of one node's importer in one epoch."""

    kind: LinkKind
    node: str
    importer: str  # name of the process
    trainer: int  # number of trainer restarts
    number: int  # of the node's epoch

    @property
    def name(self) -> str:
        """Unique name, equal on both ends."""
        return f"{self.trainer}/{self.node}/{self.importer}/{self.number}"

    @property
    def order(self) -> tuple[int, int]:
        """Position among the links of a node; later links are larger."""
        return self.trainer, self.number


class Verdict(enum.Enum):
    """Next step after a failed link."""

    RETRY = "connect again"
    USE_OBJECTS = "send Ray objects for a while"
    GIVE_UP = "report the failure"


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    link: Link
    num_failures: int = 0  # in a row
    objects_until: float = 0.0


class LinkEpochs:
    """Epochs of all nodes.

    `transport` "objects" means that no link is used. With "auto" and "cuda_ipc", Ray objects
    replace links that fail repeatedly.
    """

    def __init__(self, transport: WeightTransport, clock: Callable[[], float]) -> None:
        self._kind: LinkKind | None = None if transport == "objects" else "gloo"
        if transport == "nccl":
            self._kind = "nccl"
        self._falls_back = transport in ("auto", "cuda_ipc")
        self._clock = clock
        self._num_restarts = 0
        self._numbers: dict[str, int] = {}  # newest epoch by node; numbers are never used again
        self._epochs: dict[str, _Epoch] = {}  # by node

    def link(self, node: str, importer: str) -> Link | None:
        """Return the link to the importer of a node; None to send Ray objects."""
        if self._kind is None:
            return None
        epoch = self._epochs.get(node)
        if epoch is None or epoch.link.importer != importer:
            epoch = self._epochs[node] = _Epoch(link=self._next(self._kind, node, importer))
        return None if self._clock() < epoch.objects_until else epoch.link

    def worked(self, link: Link) -> None:
        """Record a complete transfer."""
        if epoch := self._current(link):
            self._epochs[link.node] = replace(epoch, num_failures=0)

    def interrupted(self, link: Link) -> None:
        """Replace a link whose content is unknown, because a transfer ended early."""
        if epoch := self._current(link):
            self._epochs[link.node] = replace(epoch, link=self._successor(link))

    def failed(self, link: Link) -> Verdict:
        """Replace a link that did not connect, broke or took too long."""
        epoch = self._current(link)
        if epoch is None:
            return Verdict.RETRY
        num_failures = epoch.num_failures + 1
        new = replace(epoch, link=self._successor(link), num_failures=num_failures)
        verdict = Verdict.RETRY
        if num_failures >= MAX_FAILURES:
            new = replace(new, num_failures=0)
            verdict = Verdict.GIVE_UP
            if self._falls_back:
                new = replace(new, objects_until=self._clock() + RETRY_AFTER_S)
                verdict = Verdict.USE_OBJECTS
        self._epochs[link.node] = new
        return verdict

    def trainer_restarted(self) -> None:
        """Forget all links, because their ranks have ended."""
        self._num_restarts += 1
        self._epochs = {}

    def _current(self, link: Link) -> _Epoch | None:
        epoch = self._epochs.get(link.node)
        return epoch if epoch is not None and epoch.link == link else None

    def _successor(self, link: Link) -> Link:
        return self._next(link.kind, link.node, link.importer)

    def _next(self, kind: LinkKind, node: str, importer: str) -> Link:
        number = self._numbers[node] = self._numbers.get(node, 0) + 1
        return Link(
            kind=kind, node=node, importer=importer, trainer=self._num_restarts, number=number
        )

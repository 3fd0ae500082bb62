"""Import of published weights into the nodes that lack them, once for all readers of a node.

    reader ──► WeightImports.on_node(manifest) ──► importer: one of the node's replicas
                                                      ▲
                        ranks of other nodes ─────────┘ over links, or as Ray objects

Readers on a rank's node map what the rank has staged. On other nodes, the importer receives the
rest into memory that all readers of the node map. The first replica that asks becomes the importer.
When it dies, the next one takes over and receives the whole version. Nodes are independent: each
has its own links and its own lock.

A version in memory of the ranks' GPUs is imported like one of another node, if a reader on the same
node cannot open it. Later versions are then published in host memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlsys.config.rollout_config import WeightTransport
from rlsys.reallocation.transport.link_epochs import (
    RETRY_AFTER_S,
    Link,
    LinkEpochs,
    Verdict,
)
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.wires import LinkError
from rlsys.types import WeightManifest, WeightShare

from ..cluster.calls import InputLost, Worker, WorkerError

logger = logging.getLogger(__name__)

# Means any node without a rank.
OTHER_NODE = ""


class WeightSource(Protocol):
    """A trainer, which sends its published weights."""

    def weight_deltas(
        self, manifest: WeightManifest, node_id: str, base: int | None, link: Link | None
    ) -> list[Any]:
        """Return references to what a node lacks of a version; empty if it has a whole version.

        With a `link`, they refer to offers, and the ranks begin to send.
        """

    def send_again(self, manifest: WeightManifest) -> None:
        """Pack a version again for the next request."""


@dataclass
class _Node:
    """Weights on a node."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    importer: Worker | None = None
    published: WeightManifest | None = None
    local: WeightManifest | None = None  # the published version as readers see it, if complete
    base: int | None = None  # version that the importer has completely
    num_imported: int = 0  # shares of `local` in the importer's memory


class WeightImports:
    """Imports of one trainer's weights. `report` gets messages for the user."""

    def __init__(
        self,
        source: WeightSource,
        transport: WeightTransport = "auto",
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self._source = source
        self._epochs = LinkEpochs(transport, clock)
        self._report = report
        self._num_restarts = 0
        self.reads_devices = True
        """True while readers on a rank's node can open the memory of its GPU."""
        self._nodes: dict[str, _Node] = defaultdict(_Node)

    async def on_node(
        self, manifest: WeightManifest, node_id: str, reader: Worker
    ) -> WeightManifest:
        """Return a version as readers on a node see it, after importing what the node lacks.

        Raises MemoryGone or InputLost if the trainer no longer has the version, LinkError if no
        link forms, DamagedWeightsError as `Inbox` does, and the errors of `reader` as importer.
        """
        node = self._nodes[node_id]
        async with node.lock:
            is_alive = node.importer is not None and not node.importer.is_dead
            if node.local is not None and node.published == manifest and is_alive:
                return node.local
            if node.local is not None and manifest.version < node.local.version:
                raise MemoryGone(
                    f"version {manifest.version} of the weights is gone: this node has version "
                    f"{node.local.version}."
                )
            return await self._import(node, manifest, node_id, reader)

    def take_over(self, node_id: str, local: WeightManifest, reader: Worker) -> bool:
        """Make a reader the importer, because it cannot open what another one has imported.

        Returns False if nothing was imported, the reader is the importer, or the node has another
        version by now.
        """
        node = self._nodes[node_id]
        is_imported = node.local is local and node.num_imported > 0
        if not is_imported or node.importer is reader:
            return False
        node.importer, node.local, node.base = reader, None, None
        return True

    def refuse_devices(self, reason: str) -> None:
        """Import versions that are in memory of GPUs, because a reader cannot open it."""
        if self.reads_devices:
            self.reads_devices = False
            self._report(f"Weights pass through host memory instead of CUDA IPC: {reason}.")
        for node in self._nodes.values():
            if node.local is not None and _on_devices(node.local.shares):
                node.local, node.base = None, None

    def damaged(self, manifest: WeightManifest, node_id: str, local: WeightManifest | None) -> None:
        """Import a version again, in whole, because a reader found damage in it.

        `local` is what the reader opened; None if the import failed.
        """
        node = self._nodes[node_id]
        if node.local is local:
            node.local, node.base = None, None
            self._source.send_again(manifest)

    def trainer_restarted(self) -> None:
        """Forget links and versions of ranks that have ended."""
        self._epochs.trainer_restarted()
        self._num_restarts += 1
        for node in self._nodes.values():
            node.local, node.base = None, None

    async def _import(
        self, node: _Node, manifest: WeightManifest, node_id: str, reader: Worker
    ) -> WeightManifest:
        num_restarts = self._num_restarts
        here = [share for share in manifest.shares if share.node == node_id]
        place = node_id
        if _on_devices(here) and not self.reads_devices:
            here, place = [], OTHER_NODE
        imported: Sequence[WeightShare] | None = None
        while imported is None:
            if node.importer is None or node.importer.is_dead:
                node.importer, node.base = reader, None
            base, node.base, node.local = node.base, None, None
            link = self._epochs.link(node_id, node.importer.name)
            sent = self._source.weight_deltas(manifest, place, base, link)
            imported = await self._received(node.importer, manifest, link, sent, reader)
        node.published, node.num_imported = manifest, len(imported)
        # Versions of an earlier life may have the numbers of later ones.
        node.base = manifest.version if num_restarts == self._num_restarts else None
        node.local = replace(manifest, shares=(*here, *imported))
        return node.local

    async def _received(
        self,
        importer: Worker,
        manifest: WeightManifest,
        link: Link | None,
        sent: Sequence[Any],
        reader: Worker,
    ) -> Sequence[WeightShare] | None:
        """Return what the importer has received; None to try again."""
        if not sent:
            return ()
        try:
            imported: Sequence[WeightShare] = await importer.call(
                "import_weights", manifest, link, *sent
            )
        except LinkError as error:
            assert link is not None
            self._retry_or_raise(link, error)
            return None
        except BaseException as error:
            if link is not None:
                self._epochs.interrupted(link)
            is_importers = isinstance(error, WorkerError) and not isinstance(error, InputLost)
            if is_importers and importer is not reader:
                importer.end(str(error))
                return None
            raise
        if link is not None:
            self._epochs.worked(link)
        return imported

    def _retry_or_raise(self, link: Link, error: LinkError) -> None:
        verdict = self._epochs.failed(link)
        if verdict is Verdict.GIVE_UP:
            raise error
        if verdict is Verdict.USE_OBJECTS:
            self._report(
                f"{error} Weights travel as Ray objects to this node for {RETRY_AFTER_S:g} s."
            )


def _on_devices(shares: Sequence[WeightShare]) -> bool:
    return any(share.on_device is not None for share in shares)

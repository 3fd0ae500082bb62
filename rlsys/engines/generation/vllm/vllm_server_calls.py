"""Calls of a vLLM server's workers by its client (rollout.urls).

    POST /collective_rpc ─► method of each worker ─► JSON

Arguments and results are JSON, bytes are base64: pickles would let each client run code here. New
weights are opened in the shared memory of this node. If they are on another node, the client sends
their bytes. vllm is not imported, so that tests can call the methods without it.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np

from rlsys.common.safe_json import parse_json
from rlsys.common.version import VERSION as RLSYS_VERSION
from rlsys.engines.generation.vllm.vllm_server_config import plain_config
from rlsys.engines.models.expert_layout import Routing
from rlsys.reallocation.transport.shared_memory import Bytes, SharedMemory
from rlsys.reallocation.transport.version_memory import NAME
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import ExpertArray, WeightManifest, WeightShare


class WorkerCalls(Protocol):
    """The part of vllm_worker.Worker that the server's calls use."""

    model_config: Any
    scheduler_config: Any

    def rlsys_start(self, shapes: Mapping[str, list[int]]) -> tuple[str, str] | None:
        """See `Worker.rlsys_start`."""

    def record_experts(self, routing: Routing) -> dict[str, Any]:
        """See `Worker.record_experts`."""

    def forget_experts(self) -> None:
        """See `Worker.forget_experts`."""

    def rows_of_experts(
        self, starts: Mapping[str, int], ended: Sequence[str]
    ) -> dict[str, ExpertArray]:
        """See `Worker.rows_of_experts`."""

    def begin_update(self, manifest: WeightManifest) -> None:
        """See `Worker.begin_update`."""

    def rlsys_is_prepared(self) -> bool | tuple[str, str]:
        """See `Worker.rlsys_is_prepared`."""


class ServerCalls:
    """The methods that a server's worker has in addition to those of vllm_worker.Worker."""

    _process: str | None = None  # differs from that of each other server
    _takes_updates = False
    _received: dict[int, tuple[SharedMemory, Bytes]] | None = None  # by trainer rank

    @property
    def _worker(self) -> WorkerCalls:
        return cast("WorkerCalls", self)

    def rlsys_server_hello(self) -> dict[str, Any]:
        """Return what a client compares with its run."""
        worker, config = self._worker, plain_config(self._worker.model_config.hf_config)
        if getattr(worker.model_config, "word_embeddings_untied_by_checkpoint", False):
            config["tie_word_embeddings"] = True  # vLLM changes it if there are both tensors
        if self._process is None:
            self._process = secrets.token_hex(8)
        return {
            "rlsys": RLSYS_VERSION,
            "process": self._process,
            "logprobs_mode": str(worker.model_config.logprobs_mode),
            "config": config,
            "dtype": str(worker.model_config.dtype).removeprefix("torch."),
            "max_context": worker.model_config.max_model_len,
            "has_priorities": str(worker.scheduler_config.policy) == "priority",
        }

    def rlsys_server_start(self, shapes: str, routing: str) -> dict[str, Any]:
        """Prepare for updates, once for all clients; record experts if there is a routing.

        Returns rule and fix of an InvalidValue as "refusal" if the model is not supported.
        """
        if not self._takes_updates:
            if refusal := self._worker.rlsys_start(parse_json(shapes)):
                return {"refusal": list(refusal)}
            self._takes_updates = True
        if (sizes := parse_json(routing)) is not None:
            return self._worker.record_experts(Routing(**sizes))
        self._worker.forget_experts()
        return {}

    def rlsys_server_experts(self, starts: str, ended: str) -> dict[str, Any]:
        """Return the rows of experts of requests; only the first rank has them."""
        found = self._worker.rows_of_experts(parse_json(starts), parse_json(ended))
        return {
            name: {"shape": list(rows.shape), "rows": base64.b64encode(rows.tobytes()).decode()}
            for name, rows in found.items()
        }

    def rlsys_server_receive(self, rank: str, num_bytes: str, start: str, content: str) -> None:
        """Write a piece of a trainer rank's weights into memory of this process."""
        if self._received is None:
            self._received = {}
        size, place = parse_json(num_bytes), parse_json(rank)
        before = self._received.get(place)
        if before is None or len(before[1]) != size:
            if before is not None:
                before[0].close()
            memory = SharedMemory(NAME, size, purpose="a version of the weights of another node")
            self._received[place] = memory, memory.map()
        piece = np.frombuffer(base64.b64decode(parse_json(content)), np.uint8)
        offset = parse_json(start)
        self._received[place][1][offset : offset + len(piece)] = piece

    def rlsys_server_prepare(self, manifest: str, is_received: str) -> dict[str, bool]:
        """Start to prepare a version; return whether this process can read it.

        Received bytes are compared with their digests first. Raises DamagedWeightsError.
        """
        wanted = manifest_of(parse_json(manifest))
        try:
            if parse_json(is_received):
                wanted = self._in_memory(wanted)
                weights = Weights(wanted)
                weights.verify()
                weights.close()
            self._worker.begin_update(wanted)
        except OSError:  # no such process on this node, or one of another user
            return {"is_here": False}
        return {"is_here": True}

    def _in_memory(self, manifest: WeightManifest) -> WeightManifest:
        received = self._received or {}
        ranks = {share.rank for share in manifest.shares}
        for rank in received.keys() - ranks:
            received.pop(rank)[0].close()
        shares = (replace(one, path=received[one.rank][0].path) for one in manifest.shares)
        return replace(manifest, shares=tuple(shares))

    def rlsys_server_is_prepared(self) -> dict[str, bool]:
        """Return whether the version is ready. Raises the error of a failed preparation."""
        return {"is_prepared": self._worker.rlsys_is_prepared() is True}


def manifest_of(plain: Mapping[str, Any]) -> WeightManifest:
    """Return the manifest that the client sent as JSON."""
    shares = tuple(WeightShare(**share) for share in plain["shares"])
    return WeightManifest(version=plain["version"], shares=shares)

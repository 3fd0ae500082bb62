"""Listing and managing training runs, checkpoints and sessions.

A training run is a living model, or one with checkpoints. The answers have the fields of the
client's types TrainingRun, Checkpoint and GetSessionResponse.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlsys.tinker_server import request_checks
from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.checkpoint_lifetimes import MAX_TIME
from rlsys.tinker_server.request_checks import Body
from rlsys.tinker_server.server_checkpoints import (
    CheckpointKind,
    SavedModel,
    ServerCheckpoint,
    ServerCheckpoints,
)
from rlsys.tinker_server.sessions import Sessions
from rlsys.tinker_server.trained_models import Models, TrainedModel
from rlsys.tinker_server.training_commands import lora_rank

# The server has one key, so there is one owner.
OWNER = "rlsys"

CHECKPOINT_TYPES: Mapping[CheckpointKind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """A part of a list."""

    limit: int
    offset: int

    def of(self, found: Sequence[Any]) -> Sequence[Any]:
        """Return this part of a list."""
        return found[self.offset : self.offset + self.limit]

    def cursor(self, total: int) -> dict[str, int]:
        """Return the cursor of a list of `total` entries."""
        return {"offset": self.offset, "limit": self.limit, "total_count": total}


class Management:
    """Management of a server. `now` returns the Unix time in seconds."""

    def __init__(
        self,
        checkpoints: ServerCheckpoints,
        sessions: Sessions,
        models: Models,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._checkpoints = checkpoints
        self._sessions = sessions
        self._models = models
        self._now = now

    # Training runs.

    def runs(self, page: Page) -> dict[str, Any]:
        """Describe all training runs, the last used first."""
        saved: dict[str, list[ServerCheckpoint]] = {}
        for one in self._checkpoints.all():
            saved.setdefault(one.model, []).append(one)
        models = {one.name: one for one in self._models.all}
        names = [*models, *(name for name in saved if name not in models)]
        found = [self._run(name, models.get(name), saved.get(name, [])) for name in names]
        found.sort(key=lambda one: str(one["last_request_time"]), reverse=True)
        return {"training_runs": page.of(found), "cursor": page.cursor(len(found))}

    def run(self, name: str) -> dict[str, Any]:
        """Describe one training run.

        Raises:
            ApiError: 404, there is no such run.
        """
        model = next((one for one in self._models.all if one.name == name), None)
        saved = self._checkpoints.of_model(name)
        if model is None and not saved:
            raise ApiError(
                "training_run",
                name,
                rule="there is no such model, and no checkpoint of it",
                fix="List the runs with GET training_runs.",
                status=404,
            )
        return self._run(name, model, saved)

    def _run(
        self, name: str, model: TrainedModel | None, saved: Sequence[ServerCheckpoint]
    ) -> dict[str, Any]:
        if model is not None:
            saved_model = SavedModel(
                base_model=model.base.name,
                lora=model.lora,
                version=0,
                user_metadata=model.user_metadata,
            )
            used = self._now() - self._sessions.idle_s(model.session)
        else:
            saved_model = self._description(saved[-1])
            used = saved[-1].time
        newest = {one.kind: self._described(one) for one in saved}  # the last of each kind
        return {
            "training_run_id": name,
            "base_model": saved_model.base_model,
            "model_owner": OWNER,
            "is_lora": bool(saved_model.lora),
            "lora_rank": lora_rank(saved_model.lora) or None,
            "corrupted": model is not None and bool(model.death),
            "last_request_time": _iso(used),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": saved_model.user_metadata or None,
        }

    # Checkpoints.

    def checkpoints(self, page: Page) -> dict[str, Any]:
        """Describe the checkpoints of all training runs, newest first."""
        found = self._checkpoints.all()[::-1]
        shown = [self._described(one) for one in page.of(found)]
        return {"checkpoints": shown, "cursor": page.cursor(len(found))}

    def checkpoints_of(self, model: str) -> dict[str, Any]:
        """Describe the checkpoints of one training run, oldest first."""
        return {"checkpoints": [self._described(one) for one in self._checkpoints.of_model(model)]}

    def _described(self, one: ServerCheckpoint) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{one.kind}/{one.name}",
            "checkpoint_type": CHECKPOINT_TYPES[one.kind],
            "time": _iso(one.time),
            "tinker_path": one.path,
            "size_bytes": one.num_bytes,
            "public": False,
            "user_metadata": self._description(one).user_metadata or None,
            "expires_at": None if one.expires_at is None else _iso(one.expires_at),
        }

    def _description(self, one: ServerCheckpoint) -> SavedModel:
        """Return the description of a checkpoint, an empty one if it is damaged."""
        try:
            return self._checkpoints.description(one.directory)
        except ApiError:
            return SavedModel(base_model="", lora="", version=0)

    def weights_info(self, body: Body) -> dict[str, Any]:
        """Describe the model of a checkpoint."""
        found = self._checkpoints.get(request_checks.text(body, "tinker_path"))
        saved = self._checkpoints.description(found.directory)
        return {
            "base_model": saved.base_model,
            "is_lora": bool(saved.lora),
            "lora_rank": lora_rank(saved.lora) or None,
            "train_unembed": False,
        }

    def files(self, path: str) -> dict[str, int]:
        """Return the files of a checkpoint with their sizes."""
        found = self._checkpoints.get(path)
        return {
            file.relative_to(found.directory).as_posix(): file.stat().st_size
            for file in found.files
        }

    def directory(self, path: str) -> Path:
        """Return the directory of a checkpoint."""
        return self._checkpoints.get(path).directory

    def set_ttl(self, path: str, body: Body) -> None:
        """Set or remove the lifetime of a checkpoint."""
        self._checkpoints.set_ttl(path, request_checks.ttl_s(body))

    async def delete(self, path: str) -> None:
        """Delete a checkpoint."""
        await self._checkpoints.remove(self._checkpoints.get(path).directory)

    async def copy(self, body: Body, idempotency_key: str) -> dict[str, Any]:
        """Copy a checkpoint to its own training run. The server has no projects.

        A request with the same key gets the same copy.
        """
        path = request_checks.text(body, "source_path")
        key = idempotency_key or secrets.token_hex(16)
        digest = hashlib.blake2b(f"{key} {path}".encode(), digest_size=8).hexdigest()
        copied = await self._checkpoints.copy(path, f"copy-{digest}", request_checks.ttl_s(body))
        return {"tinker_path": copied}

    # Sessions.

    def sessions(self, page: Page) -> dict[str, Any]:
        """List the ids of the living sessions, newest first."""
        return {"sessions": page.of([one.name for one in self._sessions.all()])}

    def session(self, name: str) -> dict[str, Any]:
        """Describe a living session.

        Raises:
            ApiError: 404, the session has ended or is unknown.
        """
        session = self._sessions.get(name)
        return {
            "training_run_ids": sorted(session.models),
            "sampler_ids": list(session.sampling.values()),
            "user_metadata": session.metadata or None,
            "display_name": session.display_name,
        }


def _iso(unix_time: float) -> str:
    return datetime.fromtimestamp(min(unix_time, MAX_TIME), UTC).isoformat()

"""Commands of a model: create, forward and backward pass, step, save and load.

Each method checks a request, adds a command to the model's log, and returns the name of a future.
After a failed backward pass the next step is refused, because its gradient is incomplete.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.tinker_server import encryption, provenance, request_checks
from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.api_losses import STABLE_REINFORCE, loss_kind, loss_of
from rlsys.tinker_server.datum_rows import rows_of
from rlsys.tinker_server.futures import Answer, Futures, json_answer
from rlsys.tinker_server.protobuf_messages import PROTOBUF, WirePass, encode_pass
from rlsys.tinker_server.request_checks import Body
from rlsys.tinker_server.sampler_versions import WeightsIndex
from rlsys.tinker_server.server_backend import Backend, BaseModel
from rlsys.tinker_server.server_checkpoints import (
    SamplerWeights,
    ServerCheckpoints,
    check_undamaged,
)
from rlsys.tinker_server.sessions import Sessions
from rlsys.tinker_server.stability import StabilityRecords
from rlsys.tinker_server.trained_models import Models, TrainedModel

# Sampler weights without a name are temporary. This many of each model are kept.
NUM_EPHEMERAL = 8


class Training:
    """All training commands of a server."""

    def __init__(
        self,
        backend: Backend,
        checkpoints: ServerCheckpoints,
        *,
        sessions: Sessions,
        futures: Futures,
        models: Models,
        weights: WeightsIndex,
        records: StabilityRecords,
        base_model: Callable[[str], BaseModel],
    ) -> None:
        self._backend = backend
        self._checkpoints = checkpoints
        self._sessions = sessions
        self._futures = futures
        self._models = models
        self._weights = weights
        self._records = records
        self._base_model = base_model

    # Models.

    def create_model(self, body: Body, digest: bytes) -> str:
        """Create a model."""
        lora_request = request_checks.lora(body)
        base = self._base_model(request_checks.text(body, "base_model"))
        lora = ""
        if lora_request.rank:
            lora = self._backend.adapters(
                base.name,
                rank=lora_request.rank,
                attention=lora_request.attention,
                mlp=lora_request.mlp,
            )
        seed = secrets.randbelow(2**31) if lora_request.seed is None else lora_request.seed
        model = self._new_model(body, base, lora, lora_request.rank)

        async def create() -> Answer:
            model.trainer = await self._backend.start_trainer(
                model.name, base.name, lora, seed, model.session
            )
            return json_answer({"type": "create_model", "model_id": model.name})

        return self._models.enter(model, 0, digest, create)

    def create_from_state(self, body: Body, digest: bytes) -> str:
        """Create a model whose first command loads a checkpoint of another."""
        path = request_checks.text(body, "path")
        _, directory = self._checkpoints.parse(path, "weights")
        saved = self._checkpoints.description(directory)
        base = self._base_model(
            request_checks.optional_text(body, "base_model") or saved.base_model
        )
        model = self._new_model(body, base, saved.lora, lora_rank(saved.lora))
        optimizer = request_checks.flag(body, "optimizer")

        async def create() -> Answer:
            await check_undamaged(path, directory)
            seed = secrets.randbelow(2**31)
            model.trainer = await self._backend.start_trainer(
                model.name, base.name, saved.lora, seed, model.session
            )
            await model.trainer.load(directory, optimizer=optimizer)
            return json_answer({"type": "load_weights", "path": path, "model_id": model.name})

        return self._models.enter(model, 0, digest, create)

    def _new_model(self, body: Body, base: BaseModel, lora: str, rank: int) -> TrainedModel:
        return self._models.add(
            self._sessions.seen(request_checks.text(body, "session_id")),
            request_checks.whole_number(body, "model_seq_id", high=2**31 - 1),
            base=base,
            lora=lora,
            rank=rank,
            user_metadata=request_checks.user_metadata(body),
        )

    def unload(self, body: Body) -> str:
        """End a model. Its checkpoints are kept."""
        model = self._models.get(request_checks.text(body, "model_id"))
        self._models.end(model.name, f"model {model.name} was unloaded.")
        name = f"{model.name}:unload"
        if name not in self._futures:
            self._futures.open(name, owner=model.session)
            answer = json_answer({"type": "unload_model", "model_id": model.name})
            self._futures.finish(name, answer)
        return name

    def info(self, body: Body) -> dict[str, Any]:
        """Describe a model."""
        model = self._models.get(request_checks.text(body, "model_id"))
        return {
            "type": "get_info",
            "model_id": model.name,
            "model_name": model.base.name,
            "is_lora": bool(model.lora),
            "lora_rank": model.rank or None,
            "model_data": {"model_name": model.base.name, "tokenizer_id": model.base.path},
        }

    # Passes and steps.

    def forward_backward(self, sent: WirePass, digest: bytes, num_bytes: int) -> str:
        """Run a forward pass of a model, and a backward pass unless the request is forward only.

        `num_bytes` is the size of the request's body.
        """
        model = self._models.get(sent.model_id)
        name = "forward" if sent.forward_only else "forward_backward"

        async def run() -> Answer:
            try:
                if sent.problem is not None:
                    raise sent.problem
                kind, loss = loss_kind(sent.loss), loss_of(sent.loss, sent.config)
                data = sent.data
                if sent.loss == STABLE_REINFORCE:
                    data = provenance.with_records(data, self._records, model.session)
                rows = await asyncio.to_thread(rows_of, data, sent.loss, kind, model.base.limits)
                assert model.trainer is not None
                result = await model.trainer.forward_backward(
                    rows, loss, backward=not sent.forward_only
                )
            except (ValueError, FloatingPointError, OSError) as error:
                if not sent.forward_only:
                    model.incomplete = f"{name} with seq_id={sent.seq_id} failed: {error}"
                raise
            encoded = encode_pass(result.logprobs, {"loss:sum": result.loss})
            return Answer(body=encoded, content_type=PROTOBUF)

        return self._models.enter(model, sent.seq_id, digest, run, num_bytes=num_bytes)

    def optim_step(self, body: Body, digest: bytes) -> str:
        """Take an optimizer step of a model."""
        model = self._models.get(request_checks.text(body, "model_id"))

        async def run() -> Answer:
            params = request_checks.adam(body)
            assert model.trainer is not None
            if model.incomplete:
                why, model.incomplete = model.incomplete, ""
                await model.trainer.discard()
                raise ApiError(
                    "optim_step",
                    rule="the gradient is incomplete, so no step is taken and it is discarded",
                    fix=f"Repeat the failed command, then all others of the step: {why}",
                )
            return json_answer({"metrics": await model.trainer.optim_step(params)})

        return self._models.enter(model, request_checks.seq_id(body), digest, run)

    # Checkpoints.

    def save_weights(self, body: Body, digest: bytes) -> str:
        """Save the parameters and moments of a model."""
        model = self._models.get(request_checks.text(body, "model_id"))

        async def run() -> Answer:
            trainer = model.trainer
            assert trainer is not None
            name = request_checks.optional_text(body, "path") or f"step-{trainer.version:06d}"
            path = self._checkpoints.path(model.name, "weights", name)
            async with self._checkpoints.writing(
                path,
                model.description(request_checks.user_metadata(body)),
                overwrite=request_checks.flag(body, "overwrite"),
                ttl_s=request_checks.ttl_s(body),
            ) as place:
                await trainer.save(place)
            return json_answer({"type": "save_weights", "path": path})

        return self._models.enter(model, request_checks.seq_id(body), digest, run)

    def load_weights(self, body: Body, digest: bytes) -> str:
        """Load a checkpoint, into a new model if the request has a session."""
        if body.get("session_id") is not None:
            return self.create_from_state(body, digest)
        model = self._models.get(request_checks.text(body, "model_id"))

        async def run() -> Answer:
            path = request_checks.text(body, "path")
            _, directory = self._checkpoints.parse(path, "weights")
            saved = self._checkpoints.description(directory)
            if (saved.base_model, saved.lora) != (model.base.name, model.lora):
                raise ApiError(
                    "path",
                    path,
                    rule=f"it was saved by {saved.base_model} with adapters "
                    f"{saved.lora or 'none'}, and this model is {model.base.name} with "
                    f"{model.lora or 'none'}",
                    fix="Make a training client from the state instead.",
                )
            await check_undamaged(path, directory)
            assert model.trainer is not None
            await model.trainer.load(directory, optimizer=request_checks.flag(body, "optimizer"))
            model.incomplete = ""
            return json_answer({"type": "load_weights", "path": path, "model_id": model.name})

        return self._models.enter(model, request_checks.seq_id(body), digest, run)

    def save_weights_for_sampler(self, body: Body, digest: bytes) -> str:
        """Save the weights of a model for samplers."""
        model = self._models.get(request_checks.text(body, "model_id"))

        async def run() -> Answer:
            assert model.trainer is not None
            requested = request_checks.optional_text(body, "path")
            version = model.trainer.version
            model.num_saved += 1
            name = requested or f"step-{version:06d}-{model.num_saved}"
            path = self._checkpoints.path(model.name, "sampler_weights", name)
            weights = await self._save_for_sampler(model, path, body, is_temporary=not requested)
            answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
            if requested is not None:
                return json_answer({**answer, "path": path})
            session = self._sessions.seen(model.session)
            number = request_checks.whole_number(body, "sampling_session_seq_id", high=2**31 - 1)
            inflight = body.get("kind") == "inflight"
            sampling = self._sessions.sampling_session(session, number, weights, inflight=inflight)
            if inflight:
                self._sessions.update_inflight(model.name, weights)
            self._keep_ephemeral(model, weights)
            return json_answer({**answer, "sampling_session_id": sampling.name})

        return self._models.enter(model, request_checks.seq_id(body), digest, run)

    async def _save_for_sampler(
        self, model: TrainedModel, path: str, body: Body, *, is_temporary: bool
    ) -> SamplerWeights:
        assert model.trainer is not None
        number = self._weights.reserve()
        description = model.description(request_checks.user_metadata(body))
        async with self._checkpoints.writing(
            path,
            replace(description, is_temporary=is_temporary),
            overwrite=False,
            ttl_s=request_checks.ttl_s(body),
        ) as place:
            await model.trainer.save_for_sampler(place, number)
        return self._weights.add(path, number)

    def _keep_ephemeral(self, model: TrainedModel, newest: SamplerWeights) -> None:
        """Remove temporary sampler weights except the newest NUM_EPHEMERAL."""
        model.ephemeral.append(newest)
        for one in model.ephemeral[:-NUM_EPHEMERAL]:
            assert one.directory is not None
            self._checkpoints.start_removal(one.directory)
        del model.ephemeral[:-NUM_EPHEMERAL]

    def save_weights_external(self, body: Body, digest: bytes) -> str:
        """Save files for a download: a PEFT adapter or a whole model, encrypted on request."""
        model = self._models.get(request_checks.text(body, "model_id"))

        async def run() -> Answer:
            assert model.trainer is not None
            name = request_checks.text(body, "path")
            recipients = request_checks.texts(body, "age_encryption_recipients")
            encrypt = encryption.for_recipients(recipients) if recipients else None
            path = self._checkpoints.path(model.name, "external_weights", name)
            async with self._checkpoints.writing(
                path, model.description({}), overwrite=False, ttl_s=request_checks.ttl_s(body)
            ) as place:
                await model.trainer.save_for_sampler(place, None)
                await asyncio.to_thread(_flatten, place)
                if encrypt is not None:
                    await asyncio.to_thread(_encrypt_all, place, encrypt)
            return json_answer({"type": "save_weights_external", "path": path})

        return self._models.enter(model, request_checks.seq_id(body), digest, run)


def _flatten(directory: Path) -> None:
    """Move the files in folders of a directory to its top."""
    for folder in [one for one in directory.iterdir() if one.is_dir()]:
        for file in list(folder.iterdir()):
            file.rename(directory / file.name)
        folder.rmdir()


def _encrypt_all(directory: Path, encrypt: Callable[[Path, Path], None]) -> None:
    """Replace each file by an encrypted one with the suffix .age."""
    files: Sequence[Path] = [one for one in directory.rglob("*") if one.is_file()]
    for file in files:
        encrypt(file, file.with_name(f"{file.name}.age"))
        file.unlink()


def lora_rank(lora: str) -> int:
    """Return the rank of adapters as in model.lora, 0 without adapters."""
    from rlsys.config.lora import Lora

    return Lora.parse(lora).rank if lora else 0

"""Sampling: sampling sessions, their samples, and the poll for ended ones.

create_sampling_session() ──► sample() ──► a task per request ──► future and completion
                                            └──► stability records, if requested
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from rlsys.tinker_server import request_checks
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.ended_samples import Completions, EndedSample
from rlsys.tinker_server.futures import Answer, Failure, Futures
from rlsys.tinker_server.protobuf_messages import PROTOBUF
from rlsys.tinker_server.request_checks import Body, SampleRequest
from rlsys.tinker_server.sample_request import SampledSequence, run_sample
from rlsys.tinker_server.sampler_versions import WeightsIndex
from rlsys.tinker_server.server_backend import Backend, BaseModel
from rlsys.tinker_server.server_checkpoints import SamplerWeights
from rlsys.tinker_server.sessions import Session, Sessions
from rlsys.tinker_server.stability import RecordedSequence, StabilityRecords
from rlsys.tinker_server.trained_models import sentence

logger = logging.getLogger(__name__)

# Each clone of a sampling client numbers its requests in its own block.
REQUESTS_PER_CLIENT = 1_000_000_000


class Sampling:
    """All sampling of a server."""

    def __init__(
        self,
        backend: Backend,
        *,
        sessions: Sessions,
        futures: Futures,
        weights: WeightsIndex,
        records: StabilityRecords,
        base_model: Callable[[str], BaseModel],
    ) -> None:
        self._backend = backend
        self._sessions = sessions
        self._futures = futures
        self._weights = weights
        self._records = records
        self._base_model = base_model
        self._samples: dict[str, asyncio.Task[None]] = {}  # by future
        self._completions: dict[tuple[str, int], Completions] = {}

    def create_session(self, body: Body) -> dict[str, Any]:
        """Create a sampling session."""
        session = self._sessions.seen(request_checks.text(body, "session_id"))
        number = request_checks.whole_number(body, "sampling_session_seq_id", high=2**31 - 1)
        sampling = self._sessions.sampling_session(session, number, self._weights_of(body))
        return {"type": "create_sampling_session", "sampling_session_id": sampling.name}

    def join_session(self, body: Body) -> dict[str, Any]:
        """Assign a number to another client of a sampling session."""
        sampling = self._sessions.sampling(request_checks.text(body, "sampling_session_id"))
        sampling.num_clients += 1
        return {"type": "join_sampling_session", "client_counter": sampling.num_clients - 1}

    def sampler(self, name: str) -> dict[str, Any]:
        """Describe the weights of a sampling session."""
        weights = self._sessions.sampling(name).weights
        return {
            "sampler_id": name,
            "base_model": weights.base_model,
            "model_path": weights.path or None,
        }

    def _weights_of(self, body: Body) -> SamplerWeights:
        path = request_checks.optional_text(body, "model_path")
        if path is not None:
            return self._weights.get(path)
        return SamplerWeights(
            base_model=self._base_model(request_checks.text(body, "base_model")).name
        )

    def sample(self, body: Body) -> dict[str, Any]:
        """Start a sample; return its future and the ids of its sequences.

        An id ends with the path of the weights that sample the sequence. A repeated request gets
        the same future.
        """
        session_name = request_checks.text(body, "sampling_session_id")
        sampling = self._sessions.sampling(session_name)
        number = request_checks.whole_number(body, "seq_id", high=2**62)
        weights = sampling.weights
        request = request_checks.sample(body, self._base_model(weights.base_model).limits)
        name = f"{session_name}:{number}"
        ids = [f"{name}:{index}@{weights.label}" for index in range(request.num_samples)]
        if name not in self._futures:
            self._futures.open(name, owner=sampling.session)
            task = asyncio.create_task(
                self._sample(name, weights, request, sampling.session, ids), name=name
            )
            self._samples[name] = task
            task.add_done_callback(lambda done: self._ended(name, session_name, number, done))
        return {"request_id": name, "sample_sequence_ids": ids}

    async def _sample(
        self,
        name: str,
        weights: SamplerWeights,
        request: SampleRequest,
        session: str,
        ids: Iterable[str],
    ) -> None:
        try:
            result = await run_sample(self._backend, name, session, weights, request)
        except PartDied as death:
            outcome: Answer | Failure = Failure(
                message=f"{sentence(death)} Another one replaces it. Sample again.",
                category="server",
            )
        except (ValueError, FloatingPointError) as error:
            outcome = Failure(message=str(error), category="user")
        except OSError as error:
            outcome = Failure(message=str(error), category="server")
        else:
            if request.record:
                self._record(session, ids, request, result)
            outcome = Answer(body=result.body, content_type=PROTOBUF)
        self._futures.finish(name, outcome)

    def _record(
        self, session: str, ids: Iterable[str], request: SampleRequest, result: SampledSequence
    ) -> None:
        for sequence_id, one in zip(ids, result.generations, strict=True):
            recorded = RecordedSequence(
                prompt=request.prompt, token_ids=one.token_ids, logprobs=one.sampler_logprobs
            )
            self._records.add(session, sequence_id, recorded)

    def _ended(self, name: str, session: str, number: int, task: asyncio.Task[None]) -> None:
        self._samples.pop(name, None)
        if task.cancelled():
            self._futures.finish(
                name, Failure(message="the sample was cancelled.", category="user")
            )
        elif (error := task.exception()) is not None:
            logger.error("sample %s ended by a server error", name, exc_info=error)
            message = f"sample {name} ended by a server error: {error!r}"
            self._futures.finish(name, Failure(message=message, category="server"))
        if name not in self._futures:  # its session has ended
            return
        outcome = self._futures.outcome(name)
        size = len(outcome.body) if isinstance(outcome, Answer) else None
        client = number // REQUESTS_PER_CLIENT
        self.completions(session, client).add(EndedSample(request=name, size=size))

    def completions(self, sampling_session: str, client: int) -> Completions:
        """Return the events of one client of a sampling session."""
        return self._completions.setdefault((sampling_session, client), Completions())

    def cancel(self, body: Body) -> None:
        """Cancel a sample. Do nothing after its end."""
        task = self._samples.get(request_checks.text(body, "request_id"))
        if task is not None:
            task.cancel()

    def end_all_of(self, session: Session) -> None:
        """Cancel the samples of a session that has ended, and forget its completions."""
        for future, task in list(self._samples.items()):
            if future.startswith(f"{session.name}:"):
                task.cancel()
        for sampling in session.sampling.values():
            for key in [key for key in self._completions if key[0] == sampling]:
                self._completions.pop(key).wake()

    async def close(self) -> None:
        """Cancel all samples."""
        tasks = list(self._samples.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

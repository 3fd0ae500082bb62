"""What every generation engine offers.

An engine runs in one process, samples many requests at once (continuous batching) and stamps every
token with the policy_version of the weights that sampled it.

    submit(requests) ──► [ waiting ] ──► [ running slots ] ──► collect() ──► generations
                                              ▲
    pause() → load(manifest) → resume() ──────┘   running requests keep their KV cache

Where a trainer uses the same device in turn, `release` lets its memory go until the next `load`.

`submit` takes a batch as one unit, in order: with one engine kind, the same batches in the same
order give the same tokens and log-probabilities whatever the timing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlsys.types import Generation, GenerationRequest, WeightManifest


class EngineError(RuntimeError):
    """The engine cannot go on: its loop died, or its process did. The message says why."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    num_waiting: int
    num_running: int
    num_generated_tokens: int  # since start
    policy_version: int
    num_prompt_tokens: int = 0  # since start, of the requests that have run
    num_reused_tokens: int = 0  # among these, whose keys and values were there already


class GenerationEngine(Protocol):
    async def start(self) -> None:
        """Load the model; returns when requests can run."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue a batch. Raises ValueError for a request that can never run (prompt longer than
        the context), naming the request, its length and the limit.
        """

    async def collect(self) -> list[Generation]:
        """Wait until at least one request has ended; return all that have, in the order they ended.

        Raises EngineError as soon as the engine has died, also while waiting.
        """

    async def progress(self) -> list[Generation]:
        """What the running requests have sampled so far, as ABORTED generations; they run on.
        Whatever computes them is asked: from an engine that hangs no answer comes.
        """

    async def abort(self, request_ids: Collection[str]) -> None:
        """Cancel; each comes out of `collect` as ABORTED with what it had. Unknown ids are ignored
        (they may just have ended).
        """

    async def pause(self) -> None:
        """Returns when no forward pass runs. Requests keep their KV cache and their place."""

    async def prepare(self, manifest: WeightManifest) -> None:
        """All of an update that can be done beside generation: open the version, check and verify
        it, bring it into the form that the engine computes with. `load` must follow, or another
        `prepare`, which takes its place.

        Raises MemoryGone if the version is gone, DamagedWeightsError if it is not what was staged,
        ValueError if names or shapes do not fit the model.
        """

    async def load(self) -> None:
        """Switch to the version that is prepared, while paused. Tokens sampled from now on carry
        it.
        """

    async def resume(self) -> None: ...

    async def release(self) -> None:
        """Let the memory of weights, keys and values go; `load` takes it back. Every request has
        ended (see WeightSwitch.release), and none may be submitted until then.
        """

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End every thread and process of the engine. Idempotent."""

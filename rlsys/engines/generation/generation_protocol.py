"""The interface of a generation engine.

An engine runs in one process, samples many requests at once (continuous batching) and marks every
token with the policy_version of the weights that sampled it.

    submit(requests) ──► [ waiting ] ──► [ running slots ] ──► collect() ──► generations
                                              ▲
    pause() → load(manifest) → resume() ──────┘   running requests keep their KV cache

If a trainer shares the device, `release` frees the engine's memory until the next `load`.

`submit` takes a batch as one unit, in order: with one kind of engine, the same batches in the same
order give the same tokens and log-probabilities whatever the timing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rlsys.types import Generation, GenerationRequest, WeightManifest


class EngineError(RuntimeError):
    """Death of an engine's loop or process. The message has the cause."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters of an engine."""

    num_waiting: int
    num_running: int
    num_generated_tokens: int  # since start
    policy_version: int
    num_prompt_tokens: int = 0  # since start, of requests that have run
    num_reused_tokens: int = 0  # among these, those whose keys and values were cached
    kv_usage: float | None = None  # used share of the memory for keys and values, if known
    num_preempted: int = 0  # since start, times that a running request lost its keys and values
    num_drafted_tokens: int = 0  # since start, with speculation
    num_accepted_tokens: int = 0  # among these
    draft_speedup: float | None = None  # of passes with n-grams, in tokens/s, once measured

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None before the first draft."""
        drafted = self.num_drafted_tokens
        return self.num_accepted_tokens / drafted if drafted else None


class GenerationEngine(Protocol):
    """An engine that samples completions of many requests at once."""

    @property
    def context(self) -> int:
        """Return the largest number of tokens of a prompt and its completion, after `start`.

        A completion that reaches it ends with LENGTH.
        """

    async def start(self) -> None:
        """Load the model and return when requests can run."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue a batch.

        Raises ValueError for a request that can never run, such as one with a prompt longer than
        the context.
        """

    async def collect(self) -> list[Generation]:
        """Wait until at least one request has ended and return all that have, in order of ending.

        A request ends as FAILED, alone, when the model gives no finite probability of a token.
        The caller calls `Generation.raise_failure`, or handles it otherwise.

        Raises EngineError as soon as the engine has died, also while it waits.
        """

    async def progress(self) -> list[Generation]:
        """Return what the running requests have sampled so far, as ABORTED; they continue.

        The call reaches the process that samples, so it does not return if that process hangs.
        """

    async def abort(self, request_ids: Collection[str]) -> None:
        """Cancel requests. `collect` returns each as ABORTED with the tokens sampled so far.

        Unknown ids are ignored, because a request may just have ended.
        """

    async def pause(self) -> None:
        """Stop before the next forward pass. Requests keep their KV cache and their place."""

    async def prepare(self, manifest: WeightManifest) -> None:
        """Prepare an update of the weights while generation continues.

        Opens the version, checks and verifies it, and converts it to the engine's layout. `load`
        must follow, or another `prepare`, which replaces this one.

        Raises MemoryGone if the version is gone, DamagedWeightsError if its bytes have changed,
        ValueError if names or shapes do not fit the model.
        """

    async def load(self) -> None:
        """Switch to the prepared version while paused. Tokens sampled from now on carry it."""

    async def resume(self) -> None:
        """Continue after `pause`."""

    async def release(self) -> None:
        """Free the memory of weights, keys and values until the next `load`.

        Every request must have ended (see WeightSwitch.release), and none may be submitted before
        `load`.
        """

    def stats(self) -> EngineStats:
        """Return the engine's counters."""

    async def close(self) -> None:
        """End every thread and process of the engine. Idempotent."""


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that samples requests of several low-rank adapters in one batch.

    Requests name their adapter, and requests without one use the engine's own weights.
    """

    async def add_adapter(self, number: int, directory: Path) -> None:
        """Load an adapter, as PEFT saves it, under a positive number, while generation continues.

        Raises OSError if it cannot be read, ValueError if it does not fit the model.
        """

    async def drop_adapter(self, number: int) -> None:
        """Free the memory of an adapter that no request has."""

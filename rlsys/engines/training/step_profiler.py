"""Profiles of chosen optimizer steps of one trainer rank, by torch.profiler.

    accumulate ... accumulate, optimizer_step, publish ─► profile/trainer-0-step-000005.json.gz

Each step has a file of its own, for Perfetto or chrome://tracing, with a range for the step and one
for each call. On a GPU the same ranges are NVTX ranges, for Nsight Systems. A run that profiles no
step uses the engine itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlsys.types import MicroBatch, StepResult, WeightManifest

if TYPE_CHECKING:
    from rlsys.engines.training.training_protocol import TrainingEngine

logger = logging.getLogger(__name__)

# Calls of accumulate that are recorded in each step. Later ones look the same, and a trace must fit
# into memory.
MAX_CALLS = 32


class ProfiledEngine:
    """A training engine whose calls are recorded in chosen steps. Other calls pass through.

    Args:
        engine: The engine.
        steps: Steps to record, counted from 1.
        directory: Where the traces are written.
        name: Name of the rank, such as trainer-0.
    """

    def __init__(self, engine: TrainingEngine, *, steps: range, directory: Path, name: str) -> None:
        self._engine: Any = engine
        self._steps = steps
        self._directory = directory
        self._name = name
        self._open = contextlib.ExitStack()  # the recorded step
        self._profile: profile | None = None
        self._step = 0
        self._num_calls = 0  # of accumulate, in this step
        self._activities = [ProfilerActivity.CPU]
        self._on_gpu = torch.cuda.is_available()
        if self._on_gpu:
            self._activities.append(ProfilerActivity.CUDA)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def accumulate(self, *micro_batches: MicroBatch) -> None:
        """Accumulate gradients."""
        with self._recorded("accumulate", self._engine.policy_version + 1):
            self._num_calls += 1
            if self._num_calls == MAX_CALLS + 1:
                self._record(False)
            self._engine.accumulate(*micro_batches)

    def infer(self, *args: Any, **named: Any) -> Any:
        """Compute values with the current weights."""
        with self._recorded("infer", self._engine.policy_version + 1):
            return self._engine.infer(*args, **named)

    def optimizer_step(self, *, last: bool = True) -> StepResult:
        """Take an optimizer step."""
        with self._recorded("optimizer_step", self._engine.policy_version + 1):
            self._record(True)
            result: StepResult = self._engine.optimizer_step(last=last)
            return result

    def publish(self, *args: Any, **named: Any) -> WeightManifest | None:
        """Publish the weights of the step that was just taken."""
        with self._recorded("publish", self._engine.policy_version):
            published: WeightManifest | None = self._engine.publish(*args, **named)
            return published

    def hold(self, *args: Any) -> Any:
        """End the recording of a step, and hold the state."""
        self._finish()
        return self._engine.hold(*args)

    def export(self, *args: Any) -> Any:
        """End the recording of a step, and export the model."""
        self._finish()
        return self._engine.export(*args)

    def release(self) -> None:
        """End the recording of a step, and release the device."""
        self._finish()
        self._engine.release()

    def close(self) -> None:
        """End the recording of a step, and close the engine."""
        self._finish()
        self._engine.close()

    @contextlib.contextmanager
    def _recorded(self, name: str, step: int) -> Iterator[None]:
        """Record a call, if its step is chosen."""
        if step != self._step:
            self._finish()
        if self._profile is None and step in self._steps and step != self._step:
            self._begin(step)
        if self._profile is None:
            yield
            return
        with self._range(f"step {step}: {name}"):
            yield

    def _begin(self, step: int) -> None:
        self._step, self._num_calls = step, 0
        self._profile = self._open.enter_context(profile(activities=self._activities))
        self._open.enter_context(self._range(f"step {step}"))

    def _record(self, on: bool) -> None:
        if self._profile is not None and self._num_calls > MAX_CALLS:
            self._profile.toggle_collection_dynamic(on, self._activities)

    def _finish(self) -> None:
        """Write the trace of the recorded step. Without room on the disk, it is left out."""
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        self._open.close()
        path = self._directory / f"{self._name}-step-{self._step:06d}.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except OSError as error:
            logger.warning("%s is not written: %s", path, error)

    @contextlib.contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with record_function(name):
            if not self._on_gpu:
                yield
                return
            torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                torch.cuda.nvtx.range_pop()

"""The vLLM worker of one tensor-parallel rank, with what reinforcement learning asks of it.

vLLM builds `Worker` in a process of its own, from the class's dotted name; VLLMEngine calls
`rlsys_start` once, `rlsys_answer` now and then, and at each weight update `rlsys_prepare`,
`rlsys_is_prepared` until it is so, and `rlsys_load`. Added to vLLM's worker are

- weights from shared memory into the running model,
- sampling by the requests' own random streams, log-probabilities before top-k and top-p,
- on the CPU the sleep mode that vLLM has on GPUs: memory that is let go for a while,
- the end of the engine's processes when the process that owns the engine dies, however it dies.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves
from vllm.platforms import current_platform

from rlsys.engines.devices.offload import OffloadedMemory
from rlsys.engines.generation.vllm.vllm_sampler import replace_sampler
from rlsys.engines.generation.vllm.vllm_weights import WeightUpdater
from rlsys.engines.models.model_tensors import as_saved
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import WeightManifest

OWNER_VARIABLE = "RLSYS_ENGINE_OWNER"  # process id of the engine's owner, for the workers

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class Worker(PlatformWorker):
    """vLLM's worker of this platform; the added methods are called through collective_rpc.

    What a user can put right comes back as text, not as an exception: vLLM would bury it.
    """

    _updater: WeightUpdater
    _update: Update | None = None
    _asleep: OffloadedMemory | None = None  # keys and values, on the CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _end_with(int(os.environ[OWNER_VARIABLE]))
        super().__init__(*args, **kwargs)

    def rlsys_start(self, shapes: Mapping[str, list[int]]) -> str | None:
        """Before the first request. `shapes`: the Hugging Face model's tensors."""
        self._forget_where_ranks_met()
        replace_sampler(self.model_runner)
        try:
            self._updater = WeightUpdater(
                self.get_model(),
                {name: tuple(shape) for name, shape in shapes.items()},
                self.model_config.dtype,
                partial(as_saved, self.model_config.model),
            )
        except ValueError as error:
            return str(error)
        return None

    def rlsys_holdings(self) -> bytes:
        """What this rank has of the Hugging Face model, pickled: vLLM's channel carries plain data
        alone.
        """
        return pickle.dumps(self._updater.holdings)

    def rlsys_answer(self) -> None:
        """Nothing is wanted but the answer."""

    def _forget_where_ranks_met(self) -> None:
        """A file in the temporary directory, which nobody would remove."""
        scheme, _, path = self.distributed_init_method.partition("://")
        if scheme == "file":
            Path(path).unlink(missing_ok=True)

    def rlsys_prepare(self, pickled_manifest: bytes) -> None:
        """Begin to prepare a version, already found intact and fitting, beside generation.

        Pickled, because vLLM's channel carries plain data alone.
        """
        if self._update is not None:
            self._update.let_go()
        self._update = Update(self._updater, pickle.loads(pickled_manifest))

    def rlsys_is_prepared(self) -> bool:
        """Raises what made it fail."""
        assert self._update is not None
        return self._update.is_ready()

    def sleep(self, level: int = 1) -> None:
        """Called when nothing runs, at level 2: weights, keys and values are of no more use."""
        if not current_platform.is_cpu():
            super().sleep(level)
            return
        self._updater.release()
        # Zeros afterwards, as at the start: kernels read what nobody has written.
        self._asleep = OffloadedMemory(tree_leaves(self.model_runner.kv_caches))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Memory again; `rlsys_load` brings the weights."""
        if not current_platform.is_cpu():
            super().wake_up(tags)
            return
        assert self._asleep is not None
        self._asleep.take_back()
        self._asleep = None

    def rlsys_load(self) -> None:
        """While generation is paused."""
        assert self._update is not None
        self._update.switch()
        self._update = None


class Update:
    """A version of the weights on its way into the model: prepared on a thread of its own, which
    leaves the worker to go on.
    """

    def __init__(self, updater: WeightUpdater, manifest: WeightManifest) -> None:
        self._weights = Weights(manifest)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlsys-update")
        self._switch = self._thread.submit(updater.prepare, self._weights)

    def is_ready(self) -> bool:
        """Raises what made it fail."""
        if not self._switch.done():
            return False
        self._switch.result()
        return True

    def switch(self) -> None:
        """What has been replaced is let go beside generation, and this version too."""
        self.let_go(self._switch.result()())

    def let_go(self, replaced: list[Any] | None = None) -> None:
        def end() -> None:
            if replaced is not None:
                replaced.clear()
            self._weights.close()

        self._thread.submit(end)
        self._thread.shutdown(wait=False)


def _end_with(owner: int) -> None:
    """Kill vLLM's engine core and this worker once the process `owner` is gone.

    vLLM ends its core on an orderly shutdown only; after a SIGKILL it would stay for ever.
    """
    parent = os.getppid()
    core = os.pidfd_open(os.getpid() if parent == owner else parent)
    owner_end = select.poll()
    owner_end.register(os.pidfd_open(owner), select.POLLIN)

    def watch() -> None:
        owner_end.poll()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(core, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="rlsys-owner-watch", daemon=True).start()

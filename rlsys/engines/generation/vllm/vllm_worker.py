"""The vLLM worker of one tensor-parallel rank, extended for reinforcement learning.

vLLM creates `Worker` in a process of its own, from the class's dotted name. VLLMEngine calls
`rlsys_start` once, `rlsys_add_policy` for each other policy of the engine, `rlsys_ping` now and
then, and for each weight update `rlsys_prepare`, `rlsys_is_prepared` until it is true, and
`rlsys_load`. Policies are numbered from 0. The worker adds to vLLM's

- weights from shared memory into the running model,
- sampling by the requests' own random streams, log-probabilities before top-k and top-p,
- on the CPU the experts of every token, if their routing is replayed in training,
- on the CPU the sleep mode that vLLM has on GPUs: memory that is freed for a while,
- the end of the engine's processes when the process that owns the engine dies, by any cause.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from vllm.platforms import current_platform

from rlsys.engines.devices.offload import OffloadedMemory
from rlsys.engines.generation.vllm.vllm_adapters import AdapterUpdater
from rlsys.engines.generation.vllm.vllm_drafter import split_shapes, with_drafter
from rlsys.engines.generation.vllm.vllm_ngrams import PacedNgrams
from rlsys.engines.generation.vllm.vllm_requests import adapter_number
from rlsys.engines.generation.vllm.vllm_router_hooks import (
    RouterHooks,
    check_routers,
    moe_layers,
)
from rlsys.engines.generation.vllm.vllm_sampler import replace_sampler
from rlsys.engines.generation.vllm.vllm_speculation import DraftCounts, SeededRejectionSampler
from rlsys.engines.generation.vllm.vllm_weights import Switch, Updater, WeightUpdater
from rlsys.engines.models.expert_layout import Routing
from rlsys.engines.models.model_tensors import as_saved
from rlsys.errors import InvalidValue
from rlsys.reallocation.transport.cuda_ipc import shared_device
from rlsys.reallocation.transport.weight_views import UPDATE_ERRORS, Weights
from rlsys.types import ExpertArray, WeightManifest

OWNER_VARIABLE = "RLSYS_ENGINE_OWNER"  # process id of the engine's owner, for the workers

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class Worker(PlatformWorker):
    """vLLM's worker of this platform; the added methods are called through collective_rpc.

    Mistakes that a user can correct are returned as text, because vLLM would hide an exception.
    """

    _updaters: list[Updater]  # by policy
    _updates: dict[int, Update]  # by policy, those that are being prepared
    _drafts: DraftCounts
    _ngrams: PacedNgrams | None = None
    _num_preempted = 0  # since the start
    _asleep: OffloadedMemory | None = None  # keys and values, on the CPU
    _hooks: RouterHooks | None = None  # of the first rank on the CPU, if experts are recorded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if OWNER_VARIABLE in os.environ:  # absent in a server, which has no owner
            _end_with(int(os.environ[OWNER_VARIABLE]))
        if current_platform.is_cpu():
            # Asks Linux for the AMX tiles, which vLLM's 16-bit kernels use without asking: else
            # the first of them ends the process by SIGILL, unless oneDNN happened to ask before.
            torch.cpu._init_amx()
        super().__init__(*args, **kwargs)

    def rlsys_start(
        self, shapes: Mapping[str, list[int]], adapter: Mapping[str, int] | None = None
    ) -> tuple[str, str] | None:
        """Prepare for updates before the first request.

        `shapes` are those of the tensors that updates bring: the Hugging Face model's, or with
        an `adapter` (rank `r` and `lora_alpha`) the factors of its layers.

        Returns rule and fix of an InvalidValue for an unsupported model.
        """
        self._remove_rendezvous_file()
        self._replace_samplers()
        self._updaters, self._updates = [], {}
        return self.rlsys_add_policy(shapes, adapter)

    def rlsys_add_policy(
        self, shapes: Mapping[str, list[int]], adapter: Mapping[str, int] | None
    ) -> tuple[str, str] | None:
        """Prepare for updates of the next policy, with an adapter of its own; see `rlsys_start`."""
        number = adapter_number(len(self._updaters))
        of_policy, of_head = split_shapes(shapes)
        dtype = self.model_config.dtype
        try:
            updater: Updater = (
                WeightUpdater(
                    self.get_model(),
                    of_policy,
                    dtype,
                    partial(as_saved, self.model_config.model),
                )
                if adapter is None
                else AdapterUpdater(self.model_runner, number, of_policy, **adapter)
            )
            self._updaters.append(with_drafter(updater, self.model_runner, of_head, dtype))
        except InvalidValue as error:
            return error.rule, error.fix
        except ValueError as error:
            return str(error), "Use the torch engine for this architecture."
        return None

    def rlsys_record_experts(self, pickled_routing: bytes) -> dict[str, Any]:
        """See `record_experts`; the routing is pickled for vLLM's channel."""
        return self.record_experts(pickle.loads(pickled_routing))

    def record_experts(self, routing: Routing) -> dict[str, Any]:
        """Record the experts of all later steps; the routing is that of the Hugging Face model.

        Returns the numbers of the layers with experts, or rule and fix of an InvalidValue.
        """
        model = self.get_model()
        try:
            check_routers(model, routing)
            if self._hooks is not None:
                self._hooks.forget_requests(records=True)
            elif current_platform.is_cpu() and self.rank == 0:
                self._hooks = RouterHooks(self.model_runner, model, routing)
        except InvalidValue as error:
            return {"refusal": [error.rule, error.fix]}
        return {"layers": [layer.layer_id for layer in moe_layers(model)]}

    def forget_experts(self) -> None:
        """Record no experts any more, until `record_experts` is called again."""
        if self._hooks is not None:
            self._hooks.forget_requests(records=False)

    def rlsys_experts(self, starts: Mapping[str, int], ended: Sequence[str]) -> bytes:
        """See `rows_of_experts`; the rows are pickled for vLLM's channel."""
        return pickle.dumps(self.rows_of_experts(starts, ended))

    def rows_of_experts(
        self, starts: Mapping[str, int], ended: Sequence[str]
    ) -> dict[str, ExpertArray]:
        """Return the rows of requests from a position on, and forget ended requests.

        Only the first rank on the CPU has rows.
        """
        if self._hooks is None:
            return {}
        rows = self._hooks.rows
        found = {name: rows.rows(name, start) for name, start in starts.items()}
        rows.forget(ended)
        return found

    def rlsys_holdings(self) -> bytes:
        """Return this rank's shards of the Hugging Face model, pickled for vLLM's channel."""
        return pickle.dumps(self._updaters[0].holdings)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, and count the requests that the scheduler has preempted for it."""
        self._num_preempted += len(scheduler_output.preempted_req_ids or ())
        if self._ngrams is not None:
            self._ngrams.begin(
                scheduler_output.num_scheduled_tokens,
                scheduler_output.scheduled_spec_decode_tokens,
            )
        return super().execute_model(scheduler_output)

    def rlsys_ping(self) -> tuple[int, int, int, float | None]:
        """Return the numbers of drafted and accepted tokens and of preemptions since the start.

        The last result is the speed-up by n-gram drafts, if it is known. The answer shows that the
        worker responds.
        """
        speedup = None if self._ngrams is None else self._ngrams.speedup
        return self._drafts.drafted, self._drafts.accepted, self._num_preempted, speedup

    def _replace_samplers(self) -> None:
        parts = replace_sampler(self.model_runner)
        self._drafts = DraftCounts()
        if parts is not None and getattr(self.model_runner, "rejection_sampler", None) is not None:
            checking = SeededRejectionSampler(self.model_runner, *parts)
            self.model_runner.rejection_sampler = checking
            self._drafts = checking.counts
            if self.model_runner.speculative_config.method == "ngram":
                self._ngrams = PacedNgrams(self.model_runner.drafter)

    def _remove_rendezvous_file(self) -> None:
        """Remove a temporary file that vLLM leaves."""
        scheme, _, path = self.distributed_init_method.partition("://")
        if scheme == "file":
            Path(path).unlink(missing_ok=True)

    def rlsys_prepare(self, pickled_manifest: bytes, policy: int = 0) -> None:
        """Start to prepare a verified version of a policy during generation.

        The manifest is pickled, because vLLM's channel carries plain data only.
        """
        self.begin_update(pickle.loads(pickled_manifest), policy)

    def begin_update(self, manifest: WeightManifest, policy: int = 0) -> None:
        """Open a version and prepare it on a thread, in place of an earlier one of the policy."""
        before = self._updates.pop(policy, None)
        if before is not None:
            before.release()
        self._updates[policy] = Update(self._updaters[policy], manifest, self.device)

    def rlsys_is_prepared(self, policy: int = 0) -> bool | tuple[str, str]:
        """Return whether the version is ready, or the name and text of one of UPDATE_ERRORS.

        Raises any other error of the preparation.
        """
        return self._updates[policy].is_ready()

    def sleep(self, level: int = 1) -> None:
        """Free weights, keys and values at level 2, while nothing runs."""
        if not current_platform.is_cpu():
            super().sleep(level)
            return
        for updater in self._updaters:
            updater.release()
        # Zeros afterwards, as at the start: kernels read places that were not written yet.
        self._asleep = OffloadedMemory(tree_leaves(self.model_runner.kv_caches))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate memory again; `rlsys_load` brings the weights."""
        if not current_platform.is_cpu():
            super().wake_up(tags)
            return
        assert self._asleep is not None
        self._asleep.take_back()
        self._asleep = None

    def rlsys_load(self, policy: int = 0) -> None:
        """Load the prepared version of a policy while generation is paused."""
        self._updates[policy].switch()
        del self._updates[policy]


class Update:
    """A version of the weights that a thread prepares while the worker continues."""

    def __init__(self, updater: Updater, manifest: WeightManifest, device: torch.device) -> None:
        self._weights = Weights(manifest)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlsys-update")
        self._switch = self._thread.submit(self._prepare, updater, device)

    def _prepare(self, updater: Updater, device: torch.device) -> Switch | tuple[str, str]:
        try:
            self._weights.open_on(shared_device(device))
        except tuple(UPDATE_ERRORS.values()) as error:
            return type(error).__name__, str(error)
        return updater.prepare(self._weights)

    def is_ready(self) -> bool | tuple[str, str]:
        """See `Worker.rlsys_is_prepared`."""
        if not self._switch.done():
            return False
        found = self._switch.result()
        return found if isinstance(found, tuple) else True

    def switch(self) -> None:
        """Load it, and free the old weights during generation.

        Raises MemoryGone if the trainer dies while memory of its device is read.
        """
        switch = self._switch.result()
        assert not isinstance(switch, tuple), "is_ready comes first"
        self._weights.require_owners()
        replaced = switch()
        self._weights.require_owners()
        self.release(replaced)

    def release(self, replaced: list[Any] | None = None) -> None:
        """Free this version, and what it replaced, on its thread."""

        def end() -> None:
            if replaced is not None:
                replaced.clear()
            self._weights.close()

        self._thread.submit(end)
        self._thread.shutdown(wait=False)


def _end_with(owner: int) -> None:
    """Kill vLLM's engine core and this worker once the process `owner` is gone.

    vLLM ends its core on an orderly shutdown only; after a SIGKILL it would run forever.
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

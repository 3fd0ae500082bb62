"""vLLM's processes: started with an environment of their own, ended to the last one.

    start_vllm(model, rollout, ...) ──► AsyncLLM, with an engine core and its workers behind it
    end_vllm(AsyncLLM)              ──► none of them left

Both block; they belong in a thread. vllm is imported inside functions: importing this module costs
nothing where vllm is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlsys.config import ModelConfig, RolloutConfig

WORKER = "rlsys.engines.generation.vllm_worker.Worker"
CLOSE_TIMEOUT_S = 10.0  # for vLLM's processes to end in order; then they are killed


def start_vllm(
    model: ModelConfig, rollout: RolloutConfig, *, seed: int, max_context: int | None
) -> Any:
    """An AsyncLLM whose model is loaded. `max_context` None: as much as model and cache allow.

    Raises ValueError for a model that vLLM does not serve, RuntimeError if a process of vLLM's
    fails; none is left then.
    """
    num_threads = max(1, int(rollout.num_cpus) // rollout.tensor_parallel)
    with _environment(
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(num_threads),
        VLLM_NO_USAGE_STATS="1",
        TORCHDYNAMO_DISABLE="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        RLSYS_ENGINE_OWNER=str(os.getpid()),
    ):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        on_cpu = current_platform.is_cpu()
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model.path,
                dtype=model.dtype,
                seed=seed,
                max_model_len=-1 if max_context is None else max_context,
                max_num_seqs=rollout.max_running,
                tensor_parallel_size=rollout.tensor_parallel,
                distributed_executor_backend="uni" if rollout.tensor_parallel == 1 else "mp",
                kv_cache_memory_bytes=int(rollout.kv_cache_gib * 2**30) if on_cpu else None,
                gpu_memory_utilization=rollout.gpu_memory_frac,
                enforce_eager=on_cpu,  # nothing to compile there; on GPUs graphs pay
                logprobs_mode="processed_logprobs",  # at the temperature; the worker sees to the cut
                worker_cls=WORKER,
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        )


def end_vllm(llm: Any) -> None:
    """End the processes of an AsyncLLM, also those that hang or have lost their parent."""
    import psutil

    processes = []
    for core in llm.engine_core.resources.engine_manager.processes:
        try:
            root = psutil.Process(core.pid)
            processes += [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    llm.shutdown(timeout=CLOSE_TIMEOUT_S)
    _, alive = psutil.wait_procs(processes, timeout=CLOSE_TIMEOUT_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=CLOSE_TIMEOUT_S)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables for the processes started inside; undo these and what vLLM sets itself."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

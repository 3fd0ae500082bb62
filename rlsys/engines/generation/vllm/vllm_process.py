"""vLLM's processes: started with an environment of their own, ended to the last one.

    start_vllm(path, rollout, ...) ──► AsyncLLM, with an engine core and its workers behind it
    end_vllm(AsyncLLM)              ──► none of them left

Both block; they belong in a thread. vllm is imported inside functions: importing this module costs
nothing where vllm is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rlsys.config import RolloutConfig
from rlsys.engines.devices.network import LOOPBACK, loopback_variables

WORKER = "rlsys.engines.generation.vllm.vllm_worker.Worker"
CLOSE_TIMEOUT_S = 10.0  # for what is killed to be gone


def start_vllm(
    path: str,
    rollout: RolloutConfig,
    *,
    dtype: str,
    max_context: int | None,
    shares_device: bool,
    reuses_prefixes: bool,
    sockets: str,
) -> Any:
    """An AsyncLLM whose model is loaded; arguments as VLLMEngine has them. `sockets` is a
    directory for the processes to meet in, which is of no more use when the first request has run.

    Raises ValueError for a model that vLLM does not serve, RuntimeError if a process of vLLM's
    fails; none is left then.
    """
    num_threads = max(1, int(rollout.num_cpus) // rollout.tensor_parallel)
    with _environment(
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(num_threads),
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        PYTHONWARNINGS="ignore",
        TORCH_CPP_LOG_LEVEL="ERROR",
        VLLM_RPC_BASE_PATH=sockets,
        RLSYS_ENGINE_OWNER=str(os.getpid()),
        # An engine's processes are on one node, and nobody else may reach them.
        VLLM_HOST_IP=LOOPBACK,
        **loopback_variables(),
    ):
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=path,
            dtype=dtype,
            quantization=rollout.quantization,
            # Logits as the trainer computes them, not rounded to 16 bits.
            hf_overrides={"head_dtype": "float32"},
            max_model_len=-1,  # the longest that model and KV cache allow
            max_num_seqs=rollout.max_running,
            tensor_parallel_size=rollout.tensor_parallel,
            distributed_executor_backend="uni" if rollout.tensor_parallel == 1 else "mp",
            gpu_memory_utilization=rollout.gpu_memory_frac,
            scheduling_policy="priority",
            enable_prefix_caching=None if reuses_prefixes else False,  # None: by the model's kind
            logprobs_mode="processed_logprobs",  # at the temperature; the worker sees to the rest
            # As rlsys.engines.generation.constraint reads structures, or none would agree.
            structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
            worker_cls=WORKER,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        if max_context is not None:
            args.max_model_len = min(max_context, args.create_model_config().max_model_len)
        # On the CPU our worker does without (vllm_worker.py).
        args.enable_sleep_mode = shares_device and not current_platform.is_cpu()
        if current_platform.is_cpu():
            args.kv_cache_memory_bytes = int(rollout.kv_cache_gib * 2**30)
            args.enforce_eager = True
            args.block_size = 32  # whole blocks are reused; by default the CPU's have 128 tokens
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # vLLM would prefer it to the above
            # vLLM compiles two small functions all the same, for 20 s within the first request.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
        return AsyncLLM.from_engine_args(args)


def end_vllm(llm: Any) -> None:
    """Kill the processes of an AsyncLLM, also those that have lost their parent.

    They have nothing to save, and an orderly end would complain about the files whose names
    unlink_shared_files has taken away.
    """
    import psutil

    resources = llm.engine_core.resources
    resources.engine_dead = True  # or vLLM would report the end as an error
    processes = []
    for core in resources.engine_manager.processes:
        try:
            root = psutil.Process(core.pid)
            processes += [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=CLOSE_TIMEOUT_S)
    llm.shutdown(timeout=CLOSE_TIMEOUT_S)


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

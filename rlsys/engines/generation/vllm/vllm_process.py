"""Start and end of vLLM's processes, with environment variables of their own.

    start_vllm(path, rollout, ...) ──► AsyncLLM, with an engine core and its workers
    end_vllm(AsyncLLM)              ──► all processes are gone

Both block; call them on a thread. vllm is imported inside functions, so that this module can be
imported without it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rlsys.config import RolloutConfig
from rlsys.config.lora import Lora
from rlsys.config.speculation import Speculation
from rlsys.config.vllm_argument_types import check_types
from rlsys.engines.devices.network import LOOPBACK, loopback_variables
from rlsys.engines.models.eagle_head import write_new_head
from rlsys.errors import require

QUANTIZATION = {"int8": "int8_per_channel_weight_only"}  # vLLM's names, where they differ
WORKER = "rlsys.engines.generation.vllm.vllm_worker.Worker"
SCHEDULER = "rlsys.engines.generation.vllm.vllm_scheduler.WindowedScheduler"
ASYNC_SCHEDULER = "rlsys.engines.generation.vllm.vllm_scheduler.WindowedAsyncScheduler"
CLOSE_TIMEOUT_S = 10.0  # for killed processes to end


def start_vllm(
    path: str,
    rollout: RolloutConfig,
    *,
    dtype: str,
    max_context: int | None,
    shares_device: bool,
    reuses_prefixes: bool,
    loras: Sequence[Lora],
    adapted_layers: Collection[str],
    sockets: str,
) -> Any:
    """Return an AsyncLLM with a loaded model; arguments as those of VLLMEngine.

    `loras` are the adapters that the engine gets unmerged, one of each policy, all in
    `adapted_layers`; empty if it gets whole weights. `sockets` is a directory in which the
    processes connect. It can be removed after the first request.

    Raises ValueError for a model that vLLM does not serve, RuntimeError if a process of vLLM fails;
    all processes have then ended.
    """
    check_types(rollout.vllm)
    num_ranks = rollout.num_devices
    num_threads = max(1, int(rollout.num_cpus) // num_ranks)
    with _environment(
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(num_threads),
        # vLLM's search for n-grams starts Numba, whose default layer changes the threads of torch.
        NUMBA_THREADING_LAYER="workqueue",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        PYTHONWARNINGS="ignore",
        TORCH_CPP_LOG_LEVEL="ERROR",
        VLLM_RPC_BASE_PATH=sockets,
        RLSYS_ENGINE_OWNER=str(os.getpid()),
        # An engine's processes are on one node, and other hosts must not reach them.
        VLLM_HOST_IP=LOOPBACK,
        **loopback_variables(),
    ):
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments: dict[str, Any] = {
            "model": path,
            "dtype": dtype,
            "quantization": QUANTIZATION.get(str(rollout.quantization), rollout.quantization),
            # Logits in float32, as the trainer computes them.
            "hf_overrides": {"head_dtype": "float32"},
            "max_model_len": -1,  # the maximum for model and KV cache
            "max_num_seqs": rollout.max_running,
            "tensor_parallel_size": rollout.tensor_parallel,
            "distributed_executor_backend": "uni" if num_ranks == 1 else "mp",
            "gpu_memory_utilization": rollout.gpu_memory_frac,
            "scheduling_policy": "priority",
            "enable_prefix_caching": None if reuses_prefixes else False,  # None: vLLM decides
            "logprobs_mode": "processed_logprobs",  # at the temperature; see vllm_sampler.py
            # The same backend as in rlsys.engines.generation.constraint.
            "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
            "worker_cls": WORKER,
            # vLLM never schedules asynchronously on the CPU.
            "scheduler_cls": SCHEDULER if current_platform.is_cpu() else ASYNC_SCHEDULER,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "speculative_config": _speculative_config(path, rollout.draft, dtype, sockets),
            # On the CPU, vllm_worker.py implements sleep mode.
            "enable_sleep_mode": shares_device and not current_platform.is_cpu(),
            # On the CPU, vllm_router_hooks.py records experts.
            "enable_return_routed_experts": rollout.replay_routing
            and not current_platform.is_cpu(),
        }
        if current_platform.is_cpu():
            arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
            arguments["enforce_eager"] = True
            # Whole blocks are reused; the CPU's default is 128 tokens.
            arguments["block_size"] = 32
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the above
            # Even when eager, vLLM compiles two small functions, for 20 s in the first request.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
        arguments |= {**rollout.vllm, "enable_lora": bool(loras)}
        if loras:
            arguments |= {
                "max_loras": len(loras),
                "max_lora_rank": max(one.vllm_rank or 0 for one in loras),
                # Other layers run without a LoRA kernel.
                "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers}),
            }
        args = AsyncEngineArgs(**arguments)
        if loras:
            _check_lora_support(args.create_model_config(), path)
        if max_context is not None:
            args.max_model_len = min(max_context, args.create_model_config().max_model_len)
        return AsyncLLM.from_engine_args(args)


def _speculative_config(
    path: str, draft: Speculation | None, dtype: str, directory: str
) -> dict[str, Any] | None:
    """Return vLLM's options of speculation. A new head is written into the directory."""
    if draft is None:
        return None
    head = ""
    if draft.trained_along and not draft.model:
        head = f"{directory}/head"
        write_new_head(path, head, dtype)
    return draft.for_vllm(head)


def _check_lora_support(model: Any, path: str) -> None:
    """Raise an InvalidValue if vLLM has no adapters for a model; `model` is its ModelConfig."""
    from vllm.model_executor.models import supports_lora

    architecture, name = model.registry.resolve_model_cls(model.architectures, model)
    require(
        supports_lora(architecture),
        "rollout.vllm.enable_lora",
        True,
        rule=f"vLLM has no adapters for {name} ({path})",
        fix="Leave it out: the adapters of model.lora are then merged into the weights.",
    )


def end_vllm(llm: Any) -> None:
    """Kill the processes of an AsyncLLM, including orphans.

    They have nothing to save, and an orderly exit would report errors about the files that
    unlink_shared_files has removed.
    """
    import psutil

    resources = llm.engine_core.resources
    resources.engine_dead = True  # otherwise vLLM would report the end as an error
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
    """Set variables for processes started in the block; undo them and those that vLLM sets."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

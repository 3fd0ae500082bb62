"""The arguments of vLLM's engine: those that rollout.vllm may set, and who sets the others.

    rollout.vllm = {max_num_batched_tokens = 4096} ──► check_vllm_arguments ──► AsyncEngineArgs

Each field of vLLM 0.32's AsyncEngineArgs has one kind:

    passed    goes to vLLM as it is
    marked    goes to vLLM, and makes it sample from another distribution than the trainer computes
    owned     an option of this project sets it
    refused   it would break weight updates, log-probabilities or the bookkeeping of requests

    python -m rlsys.config.vllm_arguments       prints all of them
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlsys.errors import ErrorCollector, InvalidValue, require

FIELD = "rollout.vllm"

Kind = Literal["passed", "marked", "owned", "refused"]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """How rlsys treats one argument.

    Attributes:
        kind: See above.
        note: The option that sets an owned one; the reason for a refused one; the effect of a
            marked one; a restriction of a passed one.
        needs_gpu: Refused with rollout.num_gpus=0.
        has_run: A test has passed it to an engine and updated the weights.
    """

    kind: Kind
    note: str = ""
    needs_gpu: bool = False
    has_run: bool = False


# Passed, and used by a test with an update of the weights, on the CPU.
_HAVE_RUN = """
    max_num_batched_tokens max_num_scheduled_tokens enable_chunked_prefill
    long_prefill_token_threshold block_size
    enable_prefix_caching num_gpu_blocks_override watermark
"""

_PASSED = {
    "": """
        long_prefill_token_threshold_adaptive max_num_active_seqs
        scheduler_reserve_full_isl prefill_schedule_interval disable_hybrid_kv_cache_manager
        prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit
        max_parallel_loading_workers safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size enable_shm_tensor_arena distributed_timeout_seconds
        cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus
        optimization_level performance_mode kernel_config ir_op_priority linear_backend
        jit_monitor_mode jit_monitor_verbose additional_config fail_on_environ_validation
        model_impl engram_config
    """,
    "experts in a form that cannot be packed again are refused at the start": "moe_backend",
    "needs rollout.tensor_parallel above 1, and a model with experts": "enable_expert_parallel",
    "needs model.lora: vLLM gets the adapters instead of weights that include them": "enable_lora",
    "keys and values of ended requests move to host memory, except those of older weights": """
        kv_offloading_size kv_offloading_backend
    """,
    "models with a state (Mamba, linear attention) only": """
        mamba_config mamba_backend mamba_ssu_algorithm mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm
        mamba_cache_philox_rounds gdn_prefill_backend kda_prefill_backend kda_decode_backend
    """,
    "rlsys sends text only; for models that also have an encoder": """
        language_model_only limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb
        mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        skip_mm_profiling mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        mm_device_do_normalize disable_chunked_mm_input interleave_mm_strings media_io_kwargs
        allowed_local_media_path allowed_media_domains video_pruning_rate video_pruning_method
        renderer_num_workers
    """,
    "traces and metrics of vLLM itself": """
        otlp_traces_endpoint collect_detailed_traces kv_cache_metrics kv_cache_metrics_sample
        custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
        enable_mm_processor_stats show_hidden_metrics_for_version profiler_config
        ray_workers_use_nsight
    """,
}

# Passed on GPUs only.
_ON_GPUS = {
    "": """
        enforce_eager compilation_config cudagraph_capture_sizes max_cudagraph_capture_size
        attention_backend attention_config disable_cascade_attn enable_flashinfer_autotune
        disable_custom_all_reduce sparse_indexer_topk_backend use_fp64_gumbel
        enable_batch_sharded_sampling async_scheduling all2all_backend expert_placement_strategy
        enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
        enable_hc_sp kv_sharing_fast_prefill sleep_mode_offload_cudagraph enable_cumem_allocator
        enable_nccl_comm_suspend
    """,
    "needs rollout.num_gpus = rollout.tensor_parallel times this number": "pipeline_parallel_size",
    "context parallelism within rollout.tensor_parallel": """
        decode_context_parallel_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size
    """,
}

_MARKED = {
    "keys and values are rounded": "kv_cache_dtype kv_cache_dtype_skip_layers",
    "the state of linear layers is rounded": """
        mamba_cache_dtype mamba_ssm_cache_dtype enable_mamba_cache_stochastic_rounding
    """,
    "attention reaches further than the model's window": "disable_sliding_window",
    "attention recomputes a window approximately": "swa_bounded_replay",
}

_OWNED = {
    "model.path": """
        model model_weights tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
        hf_config_path revision code_revision config_format download_dir served_model_name
    """,
    "the variable HF_TOKEN": "hf_token",
    "model.dtype": "dtype",
    "model.lora": """
        max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras
        lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
    """,
    "seed": "seed",
    "data.max_prompt_tokens and sampling.max_tokens": "max_model_len",
    "sampling.temperature, sampling.top_p, sampling.top_k and sampling.stop": """
        generation_config override_generation_config
    """,
    "rollout.max_running": "max_num_seqs max_num_queued_reqs max_num_queued_tokens",
    "rollout.tensor_parallel": "tensor_parallel_size distributed_executor_backend",
    "rollout.num_replicas": """
        data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
        data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
        data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
        dp_sync_interval disable_nccl_for_dp_synchronization
    """,
    "rollout.gpu_memory_frac": "gpu_memory_utilization",
    "rollout.kv_cache_gib (CPU) or rollout.gpu_memory_frac (GPU)": "kv_cache_memory_bytes",
    "rollout.quantization": "quantization quantization_config allow_deprecated_quantization",
    "rollout.speculation": "speculative_config spec_method spec_model spec_tokens",
    "rollout.replay_routing": "enable_return_routed_experts aux_output_config",
    "placement": "enable_sleep_mode sleep_preserve_parameter_names",
    "the variable VLLM_LOGGING_LEVEL": """
        logging_config log_level log_config_file enable_log_requests
        enable_logging_iteration_details aggregate_engine_logging
    """,
}

_REFUSED = {
    "rlsys reads log-probabilities of sampled tokens, before top-k and top-p": """
        logprobs_mode max_logprobs return_sampling_mask
    """,
    "rlsys extends vLLM's worker": "worker_cls worker_extension_cls",
    "rlsys brings new weights itself": "weight_transfer_config",
    "rlsys orders requests by priority": "scheduling_policy scheduler_cls",
    "a replica is on one node, and Ray chooses its devices": """
        nnodes node_rank master_addr master_port device_ids
    """,
    "replicas do not exchange keys and values": """
        kv_transfer_config kv_events_config ec_transfer_config ec_manager_config
        prefill_context_parallel_size
    """,
    "it moves experts between ranks, so that new weights would reach the wrong ones": """
        enable_eplb eplb_config enable_elastic_ep elastic_ep_max_dp_size enable_ep_weight_filter
    """,
    "weights outside the device would miss updates": """
        offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group
        offload_prefetch_step offload_params
    """,
    "weights come from model.path and then from the trainer": """
        load_format model_loader_extra_config ignore_patterns pt_load_map_location
        use_tqdm_on_load
    """,
    "the model must be the one that the trainer trains": """
        hf_overrides model_class_overrides trust_remote_code
    """,
    "rlsys generates text from token ids": """
        runner convert pooler_config io_processor_plugin enable_prompt_embeds enable_mm_embeds
        mm_encoder_only tokens_only diffusion_config
    """,
    "rlsys applies the same structures in both engines": """
        structured_outputs_config reasoning_parser reasoning_parser_plugin reasoning_config
    """,
    "rlsys draws the tokens itself": "watermark_config enable_trace_replay logits_processors",
    "rlsys takes completions whole, and counts tokens itself": """
        stream_interval disable_log_stats per_request_spec_decode_metrics
    """,
    "rlsys restarts replicas that fail": """
        shutdown_timeout fault_tolerance_config enable_fault_tolerance
    """,
    "vLLM's server sets it": "_api_process_count _api_process_rank",
}


# Least values of numbers, as vLLM's configuration or its use requires them.
_AT_LEAST_1 = """
    max_num_batched_tokens max_num_scheduled_tokens block_size num_gpu_blocks_override
    max_num_active_seqs prefill_schedule_interval max_parallel_loading_workers prefix_match_unit
    distributed_timeout_seconds cpu_distributed_timeout_seconds pipeline_parallel_size
    decode_context_parallel_size cp_kv_cache_interleave_size dcp_kv_cache_interleave_size
    mamba_block_size replayssm_buffer_len renderer_num_workers safetensors_prefetch_num_threads
    safetensors_prefetch_block_size
"""
_AT_LEAST_0 = """
    long_prefill_token_threshold kv_offloading_size prefix_cache_retention_interval ubatch_size
    dbo_decode_token_threshold dbo_prefill_token_threshold mm_processor_cache_gb
    mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb watermark video_pruning_rate
    kv_cache_metrics_sample mm_encoder_fp8_scale_save_margin
"""
LEAST = {**dict.fromkeys(_AT_LEAST_1.split(), 1), **dict.fromkeys(_AT_LEAST_0.split(), 0)}


def _table() -> dict[str, Argument]:
    table = {name: Argument(kind="passed", has_run=True) for name in _HAVE_RUN.split()}
    groups: tuple[tuple[Kind, dict[str, str], bool], ...] = (
        ("passed", _PASSED, False),
        ("passed", _ON_GPUS, True),
        ("marked", _MARKED, False),
        ("owned", _OWNED, False),
        ("refused", _REFUSED, False),
    )
    for kind, notes, needs_gpu in groups:
        for note, names in notes.items():
            for name in names.split():
                assert name not in table, f"{name} has two kinds"
                has_run = name in ("kv_cache_dtype", "enable_lora")
                table[name] = Argument(kind=kind, note=note, needs_gpu=needs_gpu, has_run=has_run)
    return table


VLLM_ARGUMENTS = _table()


def whole_number(values: Mapping[str, Any], name: str) -> int | None:
    """Return an argument that is a whole number; None if it is absent or has another type."""
    value = values.get(name)
    return value if type(value) is int else None


def check_scheduling(values: Mapping[str, Any], *, max_running: int) -> None:
    """Raise InvalidValue for limits of vLLM's scheduler that contradict rollout.max_running.

    Values of other types are ignored.
    """
    batched = whole_number(values, "max_num_batched_tokens")
    require(
        batched is None or batched >= max_running,
        f"{FIELD}.max_num_batched_tokens",
        batched,
        rule=f"a pass has a token of each running request, and rollout.max_running={max_running}",
        fix=f"Use at least {max_running}, or lower rollout.max_running.",
    )
    active = whole_number(values, "max_num_active_seqs")
    require(
        active is None or active <= max_running,
        f"{FIELD}.max_num_active_seqs",
        active,
        rule=f"must be at most rollout.max_running={max_running}",
        fix="Lower it, or leave it out.",
    )


def check_vllm_arguments(values: Mapping[str, Any], *, num_gpus: float) -> None:
    """Raise the mistakes in rollout.vllm that names and devices show.

    Types are checked against the installed vLLM before the run; see
    rlsys.config.vllm_argument_types.

    Raises:
        InvalidValue: One or more arguments are unknown, owned or refused, need a GPU, or are
            numbers below vLLM's least value.
    """
    mistakes = ErrorCollector()
    for name, value in values.items():
        with mistakes.collect():
            _check(name, value, num_gpus)
    mistakes.raise_found()


def _check(name: str, value: Any, num_gpus: float) -> None:
    field, argument = f"{FIELD}.{name}", VLLM_ARGUMENTS.get(name)
    if argument is None:
        near = difflib.get_close_matches(name, VLLM_ARGUMENTS, n=1, cutoff=0.7)
        raise InvalidValue(
            field,
            rule="not an argument of vLLM's engine that rlsys knows",
            fix=f"Did you mean {FIELD}.{near[0]}?" if near else "docs/rollouts.md has the list.",
        )
    if argument.kind == "owned":
        rule, fix = _owned(argument.note)
        raise InvalidValue(field, value, rule=rule, fix=fix)
    if argument.kind == "refused":
        raise InvalidValue(field, value, rule=argument.note, fix="Leave it out.")
    if argument.needs_gpu and not num_gpus:
        raise InvalidValue(
            field,
            value,
            rule="is for GPUs, and vLLM computes on the CPU here",
            fix="Leave it out, or use a GPU.",
        )
    least = LEAST.get(name)
    if least is not None and isinstance(value, int | float) and not value >= least:
        raise InvalidValue(
            field, value, rule=f"must be at least {least}", fix="Leave it out, or raise it."
        )


def _owned(owner: str) -> tuple[str, str]:
    """Return rule and fix for an argument that `owner` sets: options, or a variable."""
    if owner.startswith("the variable "):
        return f"rlsys sets it from {owner}", f"Set {owner.removeprefix('the ')} instead."
    if " " in owner:
        return f"rlsys sets it from the options {owner}", "Set these options instead."
    option = owner.replace("_", "-")
    return f"rlsys sets it from the option {owner}", f"Give --{option} instead."


def marked_arguments(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what changes the sampled distribution: {NAME=VALUE: effect}."""
    return {
        f"{FIELD}.{name}={value}": VLLM_ARGUMENTS[name].note
        for name, value in values.items()
        if VLLM_ARGUMENTS[name].kind == "marked" and value not in ("auto", False)
    }


def table_lines() -> Iterator[str]:
    """Yield the rows of a Markdown table: names by kind and note."""
    rows: dict[tuple[Kind, str, bool, bool], list[str]] = {}
    for name, one in VLLM_ARGUMENTS.items():
        rows.setdefault((one.kind, one.note, one.needs_gpu, one.has_run), []).append(name)
    yield "| Kind | Arguments | Note |"
    yield "|---|---|---|"
    for (kind, note, needs_gpu, has_run), names in rows.items():
        notes = [note] if note else []
        if kind in ("passed", "marked"):
            notes += ["GPU only"] if needs_gpu else []
            notes += [] if has_run else ["has not run"]
        yield f"| {kind} | {', '.join(f'`{name}`' for name in names)} | {'; '.join(notes)} |"


if __name__ == "__main__":
    print("\n".join(table_lines()))

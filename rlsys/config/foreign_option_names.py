"""Names of this project's options in other libraries.

In: the name of an option or field in TRL, verl, OpenRLHF, prime-rl, NeMo-RL, slime or vLLM.
Out: this project's name, with a note if the two count differently.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# Field of this project, or several of which a recipe has one: names in other libraries. A name with
# a dot only matches together with its section.
SAME = {
    "group_size": "num_generations num_generations_per_prompt n_samples_per_prompt "
    "rollouts_per_example num_samples_per_prompt num_return_sequences samples_per_prompt "
    "responses_per_prompt rollout.n rollout_n",
    "group_size num_samples": "n",
    "prompts_per_step": "num_prompts_per_step prompts_per_rollout groups_per_batch "
    "num_unique_prompts_rollout",
    "num_steps": "max_steps max_num_steps num_training_steps total_training_steps num_rollout "
    "total_steps",
    "name": "run_name experiment_name exp_name",
    "runs_dir": "output_dir default_local_dir ckpt_path log_path logging_dir",
    "resume": "resume_from_checkpoint resume_mode load_checkpoint",
    "checkpoint_every": "save_steps save_freq save_interval save_period ckpt.interval save_every",
    "keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num keep_last_n "
    "keep_last ckpt.keep",
    "clip clip_low": "epsilon eps_clip clip_ratio clip_range cliprange clip_eps clip_ratio_low "
    "eps_clip_low ratio_clip_min",
    "clip_high clip": "epsilon_high clip_ratio_high eps_clip_high ratio_clip_max",
    "kl_coefficient": "kl_loss_coef kl_coef init_kl_coef kl_ctl kl_beta kl_penalty_coef "
    "reference_policy_kl_penalty kl_tau kl_loss_weight beta",
    "trace_decay": "lam lambd gae_lambda lam_actor",
    "entropy_coefficient": "entropy_coef entropy_coeff entropy_loss_coef",
    "loss": "loss_type loss_mode loss.type",
    "advantage": "adv_estimator advantage_estimator",
    "label_smoothing": "label_smoothing_factor",
    "model.path": "model_name_or_path model_name pretrain hf_checkpoint pretrained_model "
    "base_model model_id model_path model.name",
    "model.dtype": "torch_dtype model_dtype bf16 fp16 mixed_precision precision",
    "model.lora": "use_peft lora_r lora_rank lora_alpha lora_target_modules target_modules "
    "peft_config",
    "model.gradient_checkpointing": "enable_gradient_checkpointing recompute_activations "
    "activation_checkpointing",
    "data.source": "dataset_name train_files prompt_data train_dataset dataset_path train_data "
    "dataset train_file",
    "data.subset": "dataset_config dataset_config_name subset_name",
    "data.split": "dataset_train_split dataset_split prompt_split train_split",
    "data.prompt_column": "prompt_key input_key dataset_text_field question_key",
    "data.chat_template": "apply_chat_template use_chat_template",
    "data.system_prompt": "system_message",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length max_prompt_len "
    "max_input_length rollout_max_prompt_len",
    "data.skip_long_prompts": "filter_overlong_prompts",
    "data.shuffle": "shuffle_dataset rollout_shuffle",
    "sampling.max_tokens": "max_completion_length max_response_length generate_max_len "
    "max_new_tokens response_length rollout_max_response_len max_completion_tokens "
    "max_response_len",
    "sampling.temperature": "rollout_temperature",
    "sampling.stop": "stop_strings stop_sequences rollout_stop",
    "rollout.engine": "use_vllm rollout_backend inference_backend rollout.name",
    "rollout.num_replicas": "vllm_num_engines num_rollout_engines num_engines data_parallel_size",
    "rollout.urls": "vllm_server_base_url",
    "rollout.tensor_parallel": "tensor_parallel_size tensor_model_parallel_size "
    "vllm_tensor_parallel_size rollout_num_gpus_per_engine",
    "rollout.max_running": "max_num_seqs max_concurrent_rollouts max_running_requests",
    "rollout.vllm": "vllm_kwargs engine_kwargs vllm_engine_kwargs vllm_cfg",
    "rollout.speculation": "speculative_config",
    "rollout.gpu_memory_frac": "gpu_memory_utilization vllm_gpu_memory_utilization "
    "mem_fraction_static sglang_mem_fraction_static",
    "trainer.learning_rate": "actor_learning_rate",
    "trainer.warmup_steps": "lr_warmup_steps num_warmup_steps lr_warmup_iters",
    "stop_when": "early_stopping early_stopping_patience",
    "push_to": "push_to_hub hub_model_id",
    "profile_steps": "profile_step_start",
    "trainer.decay_frac": "lr_wsd_decay_iters num_decay_steps",
    "trainer.schedule": "lr_scheduler_type lr_scheduler lr_decay_style warmup_style",
    "trainer.final_lr_frac": "min_lr_ratio",
    "trainer.adam_betas": "adam_beta1 adam_beta2 betas",
    "trainer.max_grad_norm": "grad_clip clip_grad max_norm gradient_clipping",
    "trainer.num_epochs": "num_iterations ppo_epochs max_epochs num_ppo_epochs",
    "trainer.layout": "zero_stage ulysses_sequence_parallel_size context_parallel_size fsdp_size "
    "pipeline_model_parallel_size dp_replicate expert_parallel_size sp_size cp_size",
    "critic.trainer.learning_rate": "critic_learning_rate",
    "critic.model.path": "critic_pretrain",
    "reward_model.model.path": "reward_pretrain reward_model_path",
    "reference.model.path": "ref_model ref_pretrain ref_model_path",
    "evaluation.source": "val_files eval_dataset val_dataset test_files eval_prompt_data",
    "evaluation.split": "dataset_test_split eval_split val_split",
    "evaluation.every": "eval_steps test_freq eval_interval val_period eval.interval eval_every "
    "eval_freq",
    "evaluation.num_samples": "n_samples_per_eval_prompt num_generations_eval val_kwargs.n",
    "asynchrony.max_staleness": "max_async_level max_head_offpolicyness max_off_policy_steps "
    "max_trajectory_age_steps staleness_threshold",
    "placement": "vllm_mode colocate colocate_all_models hybrid_engine",
    "observe.print_every": "logging_steps log_freq log_interval",
    "trackers": "report_to use_wandb loggers observe.wandb",
    "observe.print_samples": "log_completions num_completions_to_print",
}

# Names that count something else: (the fields to use, how to convert the value).
OTHER = {
    "train_batch_size rollout_batch_size batch_size": (
        "prompts_per_step",
        "it counts prompts, each with group_size completions: divide a number of completions by "
        "group_size",
    ),
    "per_device_train_batch_size generation_batch_size global_batch_size train_global_batch_size "
    "global_train_batch_size": (
        "prompts_per_step",
        "a step trains prompts_per_step * group_size completions on all devices together; "
        "trainer.micro_batch_tokens limits a micro-batch",
    ),
    "gradient_accumulation_steps micro_batch_size micro_train_batch_size micro_rollout_batch_size "
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
    "log_prob_micro_batch_size_per_gpu train_micro_batch_size max_tokens_per_gpu": (
        "trainer.micro_batch_tokens",
        "a step is split into micro-batches of at most this many tokens, with one gradient sum",
    ),
    "ppo_mini_batch_size mini_batch_size steps_per_generation num_steps_per_rollout": (
        "trainer.num_minibatches",
        "it counts the optimizer updates of a step: prompts_per_step divided by the size",
    ),
    "num_train_epochs total_epochs num_episodes num_epoch": (
        "num_steps",
        "it counts optimizer steps; an epoch has rows / prompts_per_step of them",
    ),
    "warmup_ratio lr_warmup_steps_ratio": (
        "trainer.warmup_steps",
        "it counts optimizer steps: the ratio times num_steps",
    ),
    "max_length max_seq_length max_seq_len seq_len max_model_len max_total_sequence_length max_len "
    "vllm_max_model_length cutoff_len": (
        "sampling.max_tokens",
        "it limits the completion, and data.max_prompt_tokens the prompt",
    ),
    "n_gpus_per_node nproc_per_node actor_num_gpus_per_node num_gpus_per_node num_train_gpus "
    "gpus_per_node": (
        "trainer.layout",
        "dp8 has eight ranks, each with trainer.num_gpus GPUs",
    ),
    "rollout_num_gpus num_infer_gpus": (
        "rollout.num_replicas",
        "each replica has rollout.num_gpus GPUs",
    ),
    "do_sample": (
        "evaluation.greedy greedy",
        "it is the opposite; completions to train on are always sampled",
    ),
    "max_num_batched_tokens": (
        "rollout.vllm",
        "as rollout.vllm.max_num_batched_tokens; rollout.max_running limits the sequences",
    ),
    "project_name wandb_project": (
        "",
        "Set the environment variable WANDB_PROJECT, and trackers to turn the copy on",
    ),
    "reward_funcs reward_fn reward_function custom_reward_function custom_reward_function.path "
    "custom_reward_function.name reward_model_fn remote_rm_url": (
        "",
        "Rewards are functions in the recipe: flow.score(rollouts, [reward]), or --rewards of "
        "rlsys evaluate",
    ),
    "label_key answer_key reward_fn_key solution_key": (
        "",
        'A reward names the column that it reads, such as numeric_answer("answer")',
    ),
    "packing packing_samples use_remove_padding padding_free use_dynamic_bsz": (
        "",
        "Rows are always packed without padding; remove the option",
    ),
    "prompt_tokens completion_tokens tool_seconds": (
        "",
        "It is an option of rlsys plan; a dry run takes the mean of the prompts from the data",
    ),
    "completion_only_loss assistant_only_loss train_on_inputs": (
        "",
        "Only completions and replies are trained on, never prompts; remove the option",
    ),
}

CLIPPED = "clipped_surrogate(0.2, 0.28)"

# Fields that only some recipes have: the value of the option `loss` that does the same.
IN_LOSS = {
    "clip": CLIPPED,
    "clip_high": CLIPPED,
    "entropy_coefficient": f"entropy_bonus({CLIPPED}, 0.001)",
}

# Fields that only some recipes have: what other recipes need for it.
ELSEWHERE = {
    "kl_coefficient": "It needs a reference model: use recipes/ppo.py, or with_kl in the graph of "
    "a recipe of your own",
    "trace_decay": "It needs a critic: use recipes/ppo.py",
}


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The fields that replace a foreign name, the best one first, and a note."""

    fields: tuple[str, ...] = ()
    note: str = ""


def _table() -> dict[str, Counterpart]:
    found = {
        name: Counterpart(fields=tuple(fields.split()))
        for fields, names in SAME.items()
        for name in names.split()
    }
    for names, (fields, note) in OTHER.items():
        for name in names.split():
            found[name] = Counterpart(fields=tuple(fields.split()), note=note)
    return found


COUNTERPARTS = _table()


def counterpart(name: str, *, with_section: bool = False) -> Counterpart | None:
    """Return the counterpart of a foreign name, or None.

    Leading sections are ignored: "actor_rollout_ref.rollout.n" matches "rollout.n". If
    `with_section`, at least one section must match.
    """
    parts = name.lstrip("-+").replace("-", "_").split(".")
    for start in range(len(parts) - with_section):
        found = COUNTERPARTS.get(".".join(parts[start:]))
        if found is not None:
            return found
    return None


def hint(
    name: str, known: Collection[str] | None = None, *, with_section: bool = False
) -> str | None:
    """Return a sentence that names the counterpart of a foreign name, or None if it is unknown.

    `known` are the available fields, or options with dashes. None makes all fields available.
    `with_section` is that of `counterpart`.
    """
    found = counterpart(name, with_section=with_section)
    if found is None:
        return None
    if not found.fields:
        return f"{found.note}."
    spelling = {one.lstrip("-").replace("-", "_"): one for one in known or ()}
    available = [spelling[one] for one in found.fields if one in spelling]
    note = f" ({found.note})" if found.note else ""
    if available or known is None:
        return f"Use {(available or found.fields)[0]}{note}."
    if (loss := IN_LOSS.get(found.fields[0])) and "loss" in spelling:
        return f'Use {spelling["loss"]} "{loss}".'
    rest = ELSEWHERE.get(found.fields[0], "")
    if loss:
        rest = f'A recipe with --loss, such as recipes/quickstart.py, takes --loss "{loss}"'
    unavailable = f"It corresponds to {found.fields[0]}{note}, which is not available here."
    return f"{unavailable} {rest}." if rest else unavailable

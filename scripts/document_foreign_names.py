"""Write the tables of docs/from_trl.md and docs/from_verl.md: options side by side.

    python scripts/document_foreign_names.py

In: the options below, and rlsys/config/foreign_option_names.py, which the command line uses for its
hints too. Out: the tables of both pages, after the line that begins with TABLE.
"""

from __future__ import annotations

from pathlib import Path

from rlsys.config.foreign_option_names import counterpart

DOCS = Path(__file__).resolve().parent.parent / "docs"
TITLES = {"trl": "TRL", "verl": "verl"}
TABLE = "<!-- scripts/document_foreign_names.py writes the table below -->"

# Options in the order in which a user of the library meets them.
OPTIONS = {
    "trl": """
        model_name_or_path bf16 gradient_checkpointing use_peft lora_r lora_alpha
        lora_target_modules
        dataset_name dataset_config dataset_train_split dataset_test_split shuffle_dataset
        reward_funcs
        num_generations per_device_train_batch_size gradient_accumulation_steps
        generation_batch_size steps_per_generation num_iterations max_steps num_train_epochs
        max_completion_length temperature top_p top_k
        learning_rate lr_scheduler_type warmup_steps adam_beta1 adam_beta2
        weight_decay max_grad_norm
        beta epsilon epsilon_high loss_type
        use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size
        output_dir run_name save_steps save_total_limit resume_from_checkpoint eval_steps
        num_generations_eval logging_steps log_completions num_completions_to_print report_to seed
    """,
    "verl": """
        data.train_files data.val_files data.prompt_key data.reward_fn_key data.train_batch_size
        data.max_prompt_length data.max_response_length data.filter_overlong_prompts data.shuffle
        actor_rollout_ref.model.path actor_rollout_ref.model.enable_gradient_checkpointing
        actor_rollout_ref.model.use_remove_padding actor_rollout_ref.model.lora_rank
        actor_rollout_ref.model.lora_alpha actor_rollout_ref.model.target_modules
        actor_rollout_ref.actor.ppo_mini_batch_size
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        actor_rollout_ref.actor.ppo_epochs actor_rollout_ref.actor.clip_ratio
        actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high
        actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.kl_loss_coef
        actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.optim.lr
        actor_rollout_ref.actor.optim.lr_warmup_steps
        actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
        actor_rollout_ref.actor.optim.weight_decay
        actor_rollout_ref.actor.ulysses_sequence_parallel_size
        actor_rollout_ref.actor.fsdp_config.fsdp_size
        actor_rollout_ref.rollout.name actor_rollout_ref.rollout.n
        actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.top_p
        actor_rollout_ref.rollout.tensor_model_parallel_size
        actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.max_num_seqs
        actor_rollout_ref.rollout.max_num_batched_tokens
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        actor_rollout_ref.rollout.val_kwargs.n actor_rollout_ref.rollout.val_kwargs.do_sample
        algorithm.adv_estimator algorithm.lam algorithm.kl_ctrl.kl_coef
        critic.model.path reward_model.model.path custom_reward_function.path
        custom_reward_function.name
        trainer.total_training_steps trainer.total_epochs trainer.n_gpus_per_node
        trainer.project_name trainer.experiment_name trainer.default_local_dir
        trainer.resume_mode trainer.save_freq trainer.max_actor_ckpt_to_keep trainer.test_freq
    """,
}

# Options of the same name and meaning here. The command line needs no hint for them.
SAME_NAME = {
    "critic.model.path": "critic.model.path",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "learning_rate": "trainer.learning_rate",
    "lr": "trainer.learning_rate",
    "max_grad_norm": "trainer.max_grad_norm",
    "model.path": "model.path",
    "reward_model.model.path": "reward_model.model.path",
    "seed": "seed",
    "shuffle": "data.shuffle",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "warmup_steps": "trainer.warmup_steps",
    "weight_decay": "trainer.weight_decay",
}


def row(name: str) -> tuple[tuple[str, ...], str]:
    """Return our fields, and a note, for an option of another library.

    Raises:
        KeyError: Nothing is known about the option.
    """
    parts = name.split(".")
    for start in range(len(parts)):
        if (own := SAME_NAME.get(".".join(parts[start:]))) is not None:
            return (own,), ""
    if (found := counterpart(name)) is None:
        raise KeyError(name)
    return found.fields, found.note


def table(library: str) -> str:
    """Return the table of a library as Markdown."""
    lines = [f"| {TITLES[library]} | rlsys | Note |", "|---|---|---|"]
    for name in OPTIONS[library].split():
        fields, note = row(name)
        ours = ", ".join(f"`{field}`" for field in fields) or "none"
        lines.append(f"| `{name}` | {ours} | {note} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, library: str) -> str:
    """Return a page with the table of its library in place of the one after TABLE."""
    before, mark, after = page.partition(f"{TABLE}\n\n")
    if not mark:
        raise ValueError(f"the page has no line {TABLE!r}")
    rest = after.split("\n")
    end = next((i for i, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return before + mark + table(library) + "\n".join(rest[end:])


def main() -> None:
    """Write both pages."""
    for library in OPTIONS:
        path = DOCS / f"from_{library}.md"
        path.write_text(with_table(path.read_text(), library))


if __name__ == "__main__":
    main()

"""What to type instead: what settings of other libraries are called here, what a path may mean."""
import re
import shlex

from harness.files import did_you_mean, find_folder, is_file, is_folder, is_there

THEIR_NAMES = {  # of our flags, in TRL, verl and others
    "--learning_rate": "lr",
    "--answers": "num_generations rollout.n n_samples_per_prompt group_size",
    "--questions": "train_batch_size rollout_batch_size batch_size",
    "--micro_batch": "per_device_train_batch_size ppo_mini_batch_size gradient_accumulation_steps "
                     "ppo_micro_batch_size_per_gpu",
    "--kl (with --loss dpo: --dpo_beta)": "beta kl_coef kl_loss_coef init_kl_coef",
    "--kl_kind": "kl_loss_type",
    "--max_new_tokens": "max_completion_length max_response_length generate_max_len max_tokens "
                        "max_length",
    "--epochs": "num_iterations ppo_epochs",
    "--steps": "num_train_epochs total_epochs max_steps total_training_steps",
    "--clip_low and --clip_high": "epsilon clip_ratio clip_ratio_low cliprange clip_eps",
    "--clip_high": "epsilon_high clip_ratio_high",
    "--loss_norm": "loss_type loss_agg_mode",
    "--advantage": "scale_rewards norm_adv_by_std_in_grpo adv_estimator",
    "--drop_unfinished": "mask_truncated_completions",
    "--eval_every": "eval_steps eval_strategy test_freq",
    "--checkpoint_every": "save_steps save_freq save_strategy",
    "--sample_every": "logging_steps log_completions",
    "--out": "output_dir default_local_dir run_name experiment_name",
    "--resume": "resume_from_checkpoint resume_mode",
    "--model": "model_name_or_path model_name model_path model.path pretrain",
    "--task (for Countdown: --data)": "dataset dataset_name train_files reward_funcs reward_fn",
    "--dtype": "bf16 fp16 torch_dtype",
    "--checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "--max_grad_norm": "grad_clip clip_grad gradient_clipping",
    "--rollouts": "use_vllm vllm_mode vllm_server_base_url rollout.name",
}
HINTS = {name: flag for flag, names in THEIR_NAMES.items() for name in names.split()}


def about_unknown(argument: str) -> str:
    """A sentence about something typed that is no flag here; empty if there is nothing to say. Of a
    name with points, as verl's actor_rollout_ref.rollout.n=8, the longest known ending counts."""
    typed = argument.partition("=")[0]
    name = typed.lstrip("-+")
    while name and name not in HINTS:
        name = name.partition(".")[2]
    if name:
        return f"{typed} is called {HINTS[name]} here (--help lists the flags)"
    if is_file(find_folder(argument) / "config.json"):
        return f"{argument} needs a flag before it: --model for a model, --resume for a run"
    return ""


def about_missing_model(name: str) -> str:
    """How to get a model that is no folder and named as on the Hugging Face Hub, OWNER/NAME, or
    what else may be meant; else an empty text. models/Qwen2.5-0.5B is Qwen/Qwen2.5-0.5B."""
    hub_name = re.sub("^models/(?=Qwen[23])", "Qwen/", name)
    match = re.fullmatch(r"([\w-]+)/([\w-][\w.-]*)", hub_name, re.ASCII)
    if not match or is_folder(match[1]) or is_there(find_folder(name)):
        near = "" if is_there(find_folder(name)) else did_you_mean(name)
        return f"there is no model folder {name}{near}" if near else ""
    command = shlex.join(["hf", "download", hub_name, "--local-dir", f"models/{match[2]}"])
    return (f"there is no model folder {name}. This makes one: {command}, "
            f"and then --model models/{match[2]} takes it")

"""What to type instead: commands to paste, and what settings of other libraries are called here."""
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from engine.files import PROJECT, find_folder, is_file, is_folder, is_there, paths_in

OTHER_WORDS = (  # names that TRL, verl and others give their settings -> what to say of them
    ("lr", "it is called --learning_rate"),
    ("lr_scheduler_type warmup_ratio warmup_steps",
     "--learning_rate stays what it is over the whole run"),
    ("num_generations rollout.n n_samples_per_prompt group_size",
     "--answers is how many answers each problem gets"),
    ("train_batch_size rollout_batch_size batch_size",
     "a step takes --questions, each with --answers"),
    ("per_device_train_batch_size ppo_mini_batch_size ppo_micro_batch_size_per_gpu",
     "a step takes --questions, each with --answers; --micro_batch is how many of these answers "
     "are in memory at once"),
    ("gradient_accumulation_steps",
     "a step is one update from all its answers, --micro_batch of them in memory at once"),
    ("beta kl_coef kl_loss_coef init_kl_coef",
     "--kl is the coefficient of the divergence, --dpo_beta that of --loss dpo"),
    ("kl_loss_type", "--kl_kind is k3 or k2"),
    ("max_completion_length max_response_length generate_max_len max_tokens max_length",
     "--max_new_tokens is where an answer is cut off"),
    ("max_prompt_length", "prompts are never cut"),
    ("num_iterations ppo_epochs", "--epochs is how many updates one batch makes"),
    ("num_train_epochs total_epochs", "--steps is how many batches are sampled"),
    ("max_steps total_training_steps", "--steps is how many batches are sampled"),
    ("epsilon clip_ratio clip_ratio_low cliprange clip_eps",
     "--clip_low and --clip_high bound the ratio, with --epochs above 1"),
    ("epsilon_high clip_ratio_high", "--clip_high bounds the ratio, with --epochs above 1"),
    ("loss_type loss_agg_mode",
     "--loss_norm token divides as DAPO does, sequence as GRPO, constant as Dr. GRPO"),
    ("scale_rewards norm_adv_by_std_in_grpo",
     "--advantage grpo divides by the group's standard deviation, dr_grpo does not"),
    ("adv_estimator", "--advantage is what an answer is compared with"),
    ("mask_truncated_completions", "--drop_unfinished leaves out answers that were cut off"),
    ("eval_steps eval_strategy test_freq", "--eval_every is the steps between evaluations"),
    ("save_steps save_freq save_strategy", "--checkpoint_every is the steps between checkpoints"),
    ("logging_steps log_completions",
     "every step is on record, and --sample_every keeps a few answers"),
    ("output_dir default_local_dir run_name experiment_name", "--out is the run's folder"),
    ("resume_from_checkpoint resume_mode", "--resume RUN goes on with a run"),
    ("model_name_or_path model_name model_path model.path pretrain",
     "it is called --model, the folder of a model"),
    ("dataset dataset_name train_files",
     "--task names a file with the problems, and --data a file of problems for Countdown"),
    ("reward_funcs reward_fn", "--task names a file with the problems and their reward"),
    ("bf16 torch_dtype", "--dtype bfloat16 computes in it"),
    ("fp16", "--dtype is float32 or bfloat16"),
    ("gradient_checkpointing enable_gradient_checkpointing",
     "--checkpointing keeps less for the backward pass"),
    ("grad_clip clip_grad gradient_clipping", "--max_grad_norm is where the gradient is clipped"),
    ("top_p top_k", "--temperature is all that shapes the sampling"),
    ("use_vllm vllm_mode vllm_server_base_url rollout.name",
     "--rollouts is the address of a vLLM or SGLang server that answers"),
)
HINTS = {name: sentence for names, sentence in OTHER_WORDS for name in names.split()}


def hint_for(argument: str) -> str:
    """What to type instead of a setting of another library; empty if it is not in HINTS. Of a name
    with points, as verl's actor_rollout_ref.rollout.n=8, the longest known ending counts."""
    name = argument.partition("=")[0].lstrip("-+")
    while name and name not in HINTS:
        name = name.partition(".")[2]
    return HINTS.get(name, "")


def about_unknown(argument: str) -> str:
    """A sentence about something typed that is no flag here; empty if there is nothing to say."""
    hint = hint_for(argument)
    if hint:
        return f"there is no {argument.partition('=')[0]} here: {hint}"
    if argument.startswith("-"):
        return ""
    folder = find_folder(argument)
    if is_file(folder / "config.json"):
        is_model = any(path.suffix == ".safetensors" for path in paths_in(folder))
        return f"{argument} needs its flag: {'--model' if is_model else '--resume'} {argument}"
    return about_missing_model(argument)


def about_missing_model(name: str) -> str:
    """How to get a model that is named as on the Hugging Face Hub; empty if it is not."""
    on_hub = name_on_hub(name)
    if not on_hub:
        return ""
    folder = f"models/{on_hub.partition('/')[2]}"
    if is_folder(find_folder(folder)):
        return f"there is no model folder {name}, but there is --model {folder}"
    command = shlex.join([program("hf"), "download", on_hub, "--local-dir", folder])
    return (f"there is no model folder {name}. This makes one: {command}, "
            f"and then --model {folder} takes it")


def name_on_hub(name: str) -> str:
    """OWNER/NAME of a model on the Hugging Face Hub, empty if it cannot be one. Qwen2.5-0.5B and
    models/Qwen2.5-0.5B are Qwen/Qwen2.5-0.5B."""
    if not re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", name, re.ASCII):
        return ""
    owner, _, last = name.rpartition("/")
    if owner in ("", "models"):
        return f"Qwen/{last}" if re.match("Qwen[23]", last) else ""
    return "" if is_folder(owner) else name


def python_command(*words) -> str:
    """A command to paste that works as it stands, in an environment that is active or not, and
    from this directory: python_command("train.py", "--resume", folder)."""
    script, *flags = map(str, words)
    if script.endswith(".py"):
        script = path_from_here(PROJECT / script)
    return shlex.join([program("python"), script, *flags])


def path_from_here(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def program(name: str) -> str:
    """How to call `python` or `hf` of this environment: by name if that is what the shell would
    start, else by its path."""
    folder = os.path.dirname(sys.executable)
    path = sys.executable if name == "python" else os.path.join(folder, name)
    shell_path = shutil.which(name)
    if shell_path and is_same_program(shell_path, path) or not is_there(path):
        return name
    return path


def is_same_program(one: str, other: str) -> bool:
    """Whether both are one file, and in one environment: the `python` of a venv is a link to that
    of the system, which does not have the venv's packages."""
    if os.path.realpath(os.path.dirname(one)) != os.path.realpath(os.path.dirname(other)):
        return False
    return os.path.realpath(one) == os.path.realpath(other)

"""Names of other programs: what their settings are called here.

`--config FILE.yaml` takes the settings of an earlier experiment and of GRPO-Zero. Of YAML only what
their files use is read: sections with lines `name: value` below them, and comments. Anything else
is refused with its line. docs/from_the_earlier_code.md has the names side by side.

    training:
      max_gen_len: 512    # is called max_new_tokens here
"""
from contextlib import suppress
from pathlib import Path

from engine.errors import UserError
from harness.files import parse_json, reading

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
    return ""


IN_FILES = {  # there -> here; None for what changes nothing here: folders, a limit never applied
    "model.pretrained_model_path": "model", "model.device": "device", "model.dtype": "dtype",
    "data.path": "data", "data.test_size": "eval_tasks",
    "training.random_seed": "seed", "training.max_steps": "steps",
    "training.num_questions_per_batch": "questions",
    "training.batch_size": "answers",  # of all questions there, of each here
    "training.max_gen_len": "max_new_tokens", "training.micro_batch_size": "micro_batch",
    "training.max_grad_norm": "max_grad_norm", "training.learning_rate": "learning_rate",
    "training.weight_decay": "weight_decay", "training.eval_interval": "eval_every",
    "training.ckpt_save_interval": "checkpoint_every",
    "training.skip_unfinished_episodes": "drop_unfinished",
    "training.memory_efficient_adamw": "offload_optimizer",
    "training.betas": None, "training.max_prompt_len": None, "training.ckpt_dir": None,
    "training.log_dir": None, "training.credit_log_dir": None,
    "training.credit_save_interval": None}


def read_earlier_settings(path: Path) -> dict:
    """Their values under the names they have here, and the prompt that went without saying."""
    settings, section = {"prompt": "original"}, ""
    with reading(path) as file:
        lines = file.readlines()
    for number, line in enumerate(lines, 1):
        name, _, value = line.partition("#")[0].strip().partition(":")
        if name and not line.startswith(" ") and not value:
            section = name
        elif f"{section}.{name}" in IN_FILES and line.startswith(" "):
            value = value.strip()
            with suppress(ValueError):  # a text without quotes; all else is the same in JSON
                value = parse_json(value)
            settings[IN_FILES[f"{section}.{name}"]] = value
            if name == "betas" and value != [0.9, 0.999]:
                raise UserError(f"{path}: training.betas should be [0.9, 0.999]: no flag sets it")
        elif name:
            raise UserError(f"{path}, line {number}: {line.strip()[:80]!r} is no setting that is "
                            "known here, as `  name: value` below its `section:`")
    settings.pop(None, None)
    if "data" in settings:  # a folder of parquet files there, a file of JSON lines beside it here
        settings["data"] = f"{str(settings['data']).rstrip('/')}.jsonl"
    if "answers" in settings:
        answers, questions = settings["answers"], settings.get("questions")
        try:
            settings["answers"], left = divmod(answers, questions)
        except (TypeError, ZeroDivisionError):
            left = answers
        if left:
            raise UserError(f"{path}: training.batch_size {answers} should be a multiple of "
                            f"num_questions_per_batch {questions}")
    return settings

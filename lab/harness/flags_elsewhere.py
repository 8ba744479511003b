"""What flags of other programs, mostly TRL, are called here, or what there is in their place."""
from collections.abc import Iterable

from lab.engine.errors import did_you_mean_name

ELSEWHERE = {
    "lr": "learning_rate", "batch_size": "questions", "prompts": "questions", "tasks": "problems",
    "group_size": "answers", "num_generations": "answers", "beta": "kl", "kl_coef": "kl",
    "max_length": "max_new_tokens", "max_completion_length": "max_new_tokens",
    "output_dir": "out", "model_name_or_path": "model", "model_name": "model", "gpu": "device",
    "cuda": "device", "epsilon": "clip_low", "epsilon_high": "clip_high", "max_steps": "steps",
    "num_iterations": "epochs", "save_steps": "checkpoint_every", "eval_steps": "eval_every",
    "gradient_checkpointing": "checkpointing", "use_peft": "lora", "lora_r": "lora",
    "dataset_name": "data", "reward_funcs": "task"}
BATCH = ("A step has --questions times --answers answers. --micro_batch of them are in memory at a "
         "time")
TRACK = "--track tensorboard shows a run's curves. There is no wandb"
MEMORY = "No weights are quantized. --lora 1 and a smaller --micro_batch need less memory"
CONSTANT = "The learning rate is constant, or falls with --decay linear"
INSTEAD = {  # of flags that there are none of: what there is
    "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": BATCH,
    "report_to": TRACK, "wandb": TRACK, "load_in_4bit": MEMORY, "load_in_8bit": MEMORY,
    "num_epochs": "Training is --steps long. --epochs is the number of updates from each batch",
    "bf16": "--dtype bfloat16 computes so", "fp16": "--dtype bfloat16 is the smaller type",
    "use_vllm": "This program samples by itself. vLLM opens a checkpoint of a run as it is",
    "logging_steps": "Every step is printed", "lora_alpha": "LoRA's addition is not scaled",
    "lr_scheduler_type": CONSTANT, "warmup_ratio": CONSTANT, "warmup_steps": CONSTANT,
    "loss_type": "--loss_norm sequence is TRL's grpo and token its dapo. --loss_norm constant with "
                 "--advantage dr_grpo is its dr_grpo",
    "top_entropy_quantile": "0.2 is --mitigation entropy_masking --mask_percentile 80 --rescale "
                            "none",
    "top_p": "Every token may be sampled", "top_k": "Every token may be sampled"}
INSTEAD["num_train_epochs"] = INSTEAD["num_epochs"]


def did_you_mean_flag(word: str, known: Iterable[str]) -> str:
    """A sentence about a flag that there is not; an empty one if nothing is like it."""
    names = [*known]
    if ELSEWHERE.get(word) in names:
        return f". Did you mean {ELSEWHERE[word]}?"
    return f". {INSTEAD[word]}" if word in INSTEAD else did_you_mean_name(word, names)

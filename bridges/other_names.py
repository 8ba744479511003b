"""What the settings of an earlier experiment and of GRPO-Zero are called here.

`--config FILE.yaml` takes theirs. Of YAML only what their files use is read: sections with lines
`name: value` below them, and comments. Anything else is refused with its line.
bridges/from_the_earlier_code.md has the names side by side.

    training:
      max_gen_len: 512    # is called max_new_tokens here
"""
from contextlib import suppress
from pathlib import Path

from engine.errors import UserError
from harness.files import parse_json, reading

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
        if not questions or answers % questions:
            raise UserError(f"{path}: training.batch_size {answers} should be a multiple of "
                            f"num_questions_per_batch {questions}")
        settings["answers"] = answers // questions
    return settings
